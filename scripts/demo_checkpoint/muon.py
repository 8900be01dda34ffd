"""Muon, for the matrices of the layers.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon/: momentum, made orthogonal by a Newton-Schulz iteration.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Coefficients and number of iterations of the post's section "Definition".
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrices, roughly: singular values between about 0.7 and 1.2.

    Args:
        matrices: [count, rows, columns], floating point.

    Returns:
        The same shape and dtype.
    """
    work = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = work.shape[-2] > work.shape[-1]
    work = work.mT if tall else work
    work = work / (work.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = work @ work.mT
        work = _A * work + (_B * gram + _C * gram @ gram) @ work
    return (work.mT if tall else work).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum; matrices of one shape are updated together.

    Args:
        matrices: parameters with two dimensions.
        lr: size of a step; the update of a tall matrix is larger by the root of rows / columns.
        momentum: share of the last steps' gradients.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        super().__init__([{"params": group} for group in by_shape.values()], {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update from the gradients; every parameter must have one."""
        for group in self.param_groups:
            matrices = group["params"]
            gradients = torch.stack([matrix.grad for matrix in matrices])
            state = self.state[matrices[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradients)
            state["momentum"].lerp_(gradients, 1 - group["momentum"])
            update = orthogonalised(gradients.lerp(state["momentum"], group["momentum"]))
            rows, columns = matrices[0].shape
            scale = group["lr"] * max(1.0, rows / columns) ** 0.5
            torch._foreach_add_(matrices, list(update.unbind()), alpha=-scale)
