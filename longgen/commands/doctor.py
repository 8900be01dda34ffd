"""`longgen doctor`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from longgen.commands.common import stopping


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine has, what is missing, and what each means."""
    from longgen.planning import doctor as examination

    with stopping():
        examination.report(as_json, sys.stdout)
