"""The program, also as `python -m longgen`. It imports next to nothing before it has taken charge of Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from longgen.run.interrupts import EXIT_INTERRUPTED, Interrupts


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line as a program. Returns the exit code, but for Ctrl-C, which ends the process here."""
    interrupts = Interrupts.installed()
    from longgen.cli import main as command_line
    from longgen.run.notices import lossy

    if sys.stderr is not None:
        sys.stderr = lossy(sys.stderr)  # hours of work are not to end because a log cannot be written

    code = 1
    try:
        code = command_line(arguments)
    except BaseException:
        if not interrupts.noted:
            raise
    if interrupts.noted:
        # Not by Python's own end, which makes a death by SIGINT of an interrupt that exec() has seen.
        interrupts.leave(said=code == EXIT_INTERRUPTED)
    return code


if __name__ == "__main__":
    sys.exit(main())
