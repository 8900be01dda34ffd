"""Errors whose message a user can act on: what happened, the numbers, and what to do."""

from __future__ import annotations


class LongGenError(Exception):
    """Base of every expected failure; the command line prints it as one line and exits with `exit_code`."""

    exit_code = 1


class UsageError(LongGenError):
    """A setting, flag or input that is wrong and was found before anything was loaded."""

    exit_code = 2


class PromptLengthError(UsageError):
    """A prompt of no tokens, or of so many that none can be generated. tokens: of the prompt."""

    def __init__(self, message: str, tokens: int) -> None:
        super().__init__(message)
        self.tokens = tokens


class CheckpointError(LongGenError):
    """A checkpoint folder that cannot be used: missing, broken, or of an unsupported kind."""

    exit_code = 2


class OutputError(LongGenError):
    """The output cannot be written, for the reason of an OSError: nothing that is still to come can be either."""

    def __init__(self, error: OSError, name: str = "standard output") -> None:
        super().__init__(f"{name} cannot be written: {error.strerror or error}")


class CapacityError(LongGenError):
    """More tokens or memory asked for than was planned or than there is."""


class SlotError(LongGenError):
    """A slot used against its rules: unknown, busy, or asked for a length it does not hold."""
