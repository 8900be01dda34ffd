"""Imports without garbage collection: the collector is as before afterwards, and does not look at what they made."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longgen.run.startup import UNUSED, import_libraries

CODE = """
import gc, sys
from longgen.run.startup import import_libraries
if {disabled}:
    gc.disable()
import_libraries()
assert {{"torch", "transformers", "longgen.engine", "longgen.model.tokenizer"}} <= set(sys.modules)
import longgen.run.batch
before = gc.get_freeze_count()
assert before > 100_000, before
import_libraries()
assert gc.get_freeze_count() <= before
print(gc.isenabled())
"""


@pytest.mark.parametrize("disabled", [False, True])
def test_imports_are_set_aside_and_the_collector_goes_on(disabled: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(disabled=disabled)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == (f"{not disabled}\n", "")


def test_nothing_is_set_aside_where_the_libraries_are_there_already() -> None:
    import transformers  # noqa: F401

    frozen = gc.get_freeze_count()
    import_libraries()
    assert gc.get_freeze_count() == frozen and gc.isenabled()


@pytest.mark.parametrize("name", UNUSED)
def test_what_no_run_uses_is_not_imported(tmp_path: Path, name: str) -> None:
    """transformers imports these where it finds them; here each would fail the run, as one of another torch does."""
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("print('imported'); raise RuntimeError\n", encoding="utf-8")
    code = f"""
import importlib.util, sys
from longgen.run.startup import import_libraries
import_libraries()
import transformers.generation, transformers.loss.loss_utils, transformers.image_utils
assert "{name}" not in sys.modules and importlib.util.find_spec("{name}") is not None
try:
    import {name}
except RuntimeError:
    pass
"""
    places = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": places},
    )
    assert (done.stdout, done.stderr) == ("imported\n", "")  # once, by the last lines
