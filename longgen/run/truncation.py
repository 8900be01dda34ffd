"""Cutting prompts that are too long, where the user asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longgen.errors import UsageError

if TYPE_CHECKING:
    import torch

    from longgen.model.tokenizer import EncodedPrompt


@dataclass(frozen=True, slots=True)
class Cut:
    """What was left out of a prompt: `removed` of `total` tokens of the user's text, from its head, middle or tail."""

    place: str
    removed: int
    total: int

    def __str__(self) -> str:
        return f"{self.place} cut: {self.removed:,} of the text's {self.total:,} tokens left out"


def truncate(
    prompt: EncodedPrompt, room: int, place: str, begins_inside: Callable[[int], bool]
) -> tuple[torch.Tensor, Cut | None]:
    """The ids of a prompt of at most `room` tokens, and what was left out of it (None: nothing).

    Only tokens of the user's text are left out: the first ones (`head`), the last ones (`tail`), or those in between
    (`middle`), of which as many are kept before as after, or one more. As many as must be, and up to three more where
    the cut would go through a character.

    Args:
        place: head, middle or tail.
        begins_inside: whether a token begins in the midst of a character.

    Raises:
        UsageError: nothing of the text would be left, or it is not known which tokens are the text's.
    """
    ids, surplus = prompt.ids, len(prompt.ids) - room
    if surplus <= 0:
        return ids, None
    if prompt.text is None:
        raise UsageError("this checkpoint's tokenizer gives no way to tell the text's tokens from the others")
    start, stop = prompt.text
    total = stop - start
    kept = total - surplus
    first = {"head": start, "middle": start + (kept + 1) // 2, "tail": stop - surplus}[place]
    last = first + surplus

    def splits(index: int) -> bool:
        return start < index < stop and begins_inside(int(ids[index]))

    while kept > 0 and splits(first):
        first -= 1
    while kept > 0 and splits(last):
        last += 1
    if kept <= 0 or last - first >= total:
        raise UsageError(
            f"there is room for {room:,} tokens, of which the template takes {len(ids) - total:,}: nothing of the "
            f"text's {total:,} would be left"
        )
    import torch

    return torch.cat((ids[:first], ids[last:])), Cut(place, last - first, total)
