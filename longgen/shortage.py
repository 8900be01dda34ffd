"""Device memory that runs out, as an error that a user can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from longgen.errors import CapacityError
from longgen.units import show_bytes


@contextmanager
def shortage_reported(doing: str, device: torch.device) -> Iterator[None]:
    """Turns torch's out-of-memory error into a CapacityError that says what was being done and what there is."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"device memory ran out while {doing}{_figures(device)}: lower --gpu-memory, --chunk-size or "
            "--resident-blocks, or end what else uses the GPU"
        ) from error


def _figures(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return f" ({show_bytes(free)} of {show_bytes(total)} free, {show_bytes(reserved)} held by this process)"
