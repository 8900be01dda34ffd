#!/usr/bin/env python3
"""Trains the demo checkpoint: a byte-level Qwen3 of a million parameters that finds numbers hidden in long text.

It learns on samples of 256 to 2,048 bytes and answers over millions: positions jump in training as far as a long
text reaches, and filler counts in the softmax as often as it would stand there. Then longgen's engine asks it for
numbers in filler that it has not seen.

On a GPU training takes a few minutes, on two CPU cores about 45. The log and a table go to stderr; the last line on
stdout is JSON. The folder is written after every stage.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, installed or not

# The processes that make data import this file, and need nothing of what training needs.
if __name__ == "__main__":
    from demo_checkpoint.command import main

    sys.exit(main(__doc__))
