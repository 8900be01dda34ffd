"""Keeping libraries off standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' own warnings and loading bar: what matters of them is raised as an error or said by us."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Without the warnings of the hub's library, of every try to reach it: the last one is raised as an error."""
    level = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        hub_logging.set_verbosity(level)
