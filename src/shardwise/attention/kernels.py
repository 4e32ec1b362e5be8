"""torch's fused attention kernels as functions that also give, and take, the log-sums of the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
Scale: TypeAlias = float | None  # of scores; None for torch's own
Part: TypeAlias = tuple[Tensor, Tensor]  # output, log of the sum of the exponentials
Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]  # of q, k and v


class Kernel(NamedTuple):
    """forward(q, k, v, causal, scale) and backward(grad, q, k, v, out, lse, causal, scale)."""

    forward: Callable[[Tensor, Tensor, Tensor, bool, Scale], Part]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, Scale], Gradients]


def fused_kernel(q: Tensor, k: Tensor, v: Tensor) -> Kernel | None:
    same = (
        q.ndim == k.ndim == v.ndim == 4
        and q.shape[:2] == k.shape[:2] == v.shape[:2]
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        and bool(q.numel() and k.numel())
    )
    if not same:
        return None
    if q.device.type == "cpu":
        return _CPU
    if q.device.type != "cuda" or q.shape[-1] % 8 or q.shape[-1] > 256 or torch.version.hip is not None:
        return None
    if q.dtype in (torch.float16, torch.bfloat16) and torch.cuda.get_device_capability(q.device) >= (8, 0):
        return _FLASH
    return _EFFICIENT if q.dtype == torch.float32 else None


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Scale) -> Part:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: Scale
) -> Gradients:
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, q, k, v, out, lse, 0.0, causal, scale=scale)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Scale) -> Part:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: Scale
) -> Gradients:
    unused = torch.zeros(2, dtype=torch.int64, device=q.device)  # the state of the random numbers: none are drawn
    longest = (q.shape[-2], k.shape[-2])
    kernel = aten._scaled_dot_product_flash_attention_backward
    lse = lse.contiguous()
    return kernel(grad, q, k, v, out, lse, None, None, *longest, 0.0, causal, unused, unused, scale=scale)


_ROWS = 32  # the kernel below counts log-sums in multiples of this


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Scale) -> Part:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[-2]]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: Scale
) -> Gradients:
    lse = F.pad(lse, (0, -lse.shape[-1] % _ROWS), value=torch.inf)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    kernel = aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    return kernel(grad, q, k, v, None, out, lse, unused, unused, 0.0, wanted, causal, scale=scale)[:3]


_CPU = Kernel(_cpu_forward, _cpu_backward)
_FLASH = Kernel(_flash_forward, _flash_backward)
_EFFICIENT = Kernel(_efficient_forward, _efficient_backward)
