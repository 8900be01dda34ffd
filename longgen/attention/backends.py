"""The backends of each kind of device, fastest first, for one, few and many query rows; and how results are merged."""

from __future__ import annotations

import torch

from longgen.attention.cpu import CpuFlash
from longgen.attention.cuda import TorchCudnn, TorchFlash, flash_package
from longgen.attention.kernels import Kernels, Rows
from longgen.attention.merges import Merges, triton_merge
from longgen.attention.plain import PlainTorch


def default_kernels(device: torch.device) -> Kernels:
    """The backends for tensors on `device`.

    The order comes from measurements on Hopper (docs/benchmarks.md): with many rows FlashAttention-3 and cuDNN run at
    twice the rate of FlashAttention-2; with one or few, only FlashAttention-2 splits the keys over the whole GPU.
    """
    if device.type == "cpu":
        order = (CpuFlash(), PlainTorch())
        return Kernels(dict.fromkeys(Rows, order))
    flash2 = flash_package("flash-attn-2", ("flash_attn",), (8, 0))
    flash3 = flash_package("flash-attn-3", ("flash_attn_interface", "fa3_fwd_interface"), (9, 0))
    flash4 = flash_package("flash-attn-4", ("flash_attn.cute",), (9, 0), "return_lse")
    merges = Merges((triton_merge(),))
    few = (flash2, TorchFlash(), flash3, flash4, PlainTorch())
    many = (flash3, flash4, TorchCudnn(merges), flash2, TorchFlash(), PlainTorch())
    return Kernels({Rows.ONE: few, Rows.FEW: few, Rows.MANY: many}, merges)
