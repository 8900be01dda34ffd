"""Strings that end a text: found wherever they come, even across tokens, and cut off exactly."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes a text on as it comes, up to the first stop string in it.

    The first is the one that is complete first, whatever pieces the text comes in; of several that are complete with
    the same character, the longest. Text that may be the beginning of a stop string is held back until it is known not
    to be.

    Args:
        stops: the strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False  # whether a stop string has come; what comes after it is not part of the text

    def push(self, text: str) -> str:
        """What is certain to be part of the text, after `text` has come too."""
        if self.found:
            return ""
        text = self._held + text
        places = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)[1]]
        held = max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
