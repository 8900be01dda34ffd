"""The command line: its commands, and the exit code that each way of ending has."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import longgen
from longgen.commands.bench import bench
from longgen.commands.common import EXIT_BROKEN_PIPE
from longgen.commands.doctor import doctor
from longgen.commands.needle import needle
from longgen.commands.plan import plan
from longgen.commands.run import run
from longgen.errors import LongGenError, OutputError, UsageError

# click's UsageError: of click itself, or of the copy of it that newer releases of typer bring along.
_WRONG_CALL: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Generate after very long prompts on one GPU, with the KV cache in host memory.",
)

evaluation = typer.Typer(rich_markup_mode=None, help="Judge what a model finds in long text.")
evaluation.command()(needle)
app.add_typer(evaluation, name="eval")

for command in (run, plan, bench, doctor):
    app.command()(command)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"longgen {longgen.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Generate after very long prompts on one GPU, with the KV cache in host memory."""
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(UsageError.exit_code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (None: the program's own arguments). Returns the exit code; README.md lists them."""
    # A stream that is closed when Python starts is None.
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  as long as the program
    if sys.stdout is None:
        return _fail("standard output is closed", UsageError.exit_code)
    return _flush(_call(arguments))


def _call(arguments: Sequence[str] | None) -> int:
    try:
        return app(args=arguments, prog_name="longgen", standalone_mode=False) or 0
    except LongGenError as error:
        return _fail(str(error), error.exit_code)
    except _WRONG_CALL as error:
        return _fail(_wrong_call(error), UsageError.exit_code)
    except ImportError as error:
        return _fail(f"a library cannot be imported: {error}; install longgen again", LongGenError.exit_code)
    except OSError as error:  # of the text that --help writes
        return _fail(str(error), LongGenError.exit_code)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1


def _wrong_call(error: Any) -> str:
    """What is wrong with the arguments, and which help explains them, in one line. error: a _WRONG_CALL."""
    command = error.ctx.command_path if error.ctx else "longgen"
    return f"{' '.join(error.format_message().split()).rstrip('.')}; see {command} --help"


def _flush(code: int) -> int:
    """What a run with this exit code ends with once standard output has taken what is left."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Let Python's own flush at exit go nowhere instead of complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return EXIT_BROKEN_PIPE
        return code or _fail(str(OutputError(error)), OutputError.exit_code)
    return code


def _fail(message: str, code: int) -> int:
    print(f"longgen: error: {message}", file=sys.stderr)
    return code
