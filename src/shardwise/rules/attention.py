"""Attention: batch and head dims pass. Cut queries stay where they are and the keys come to them (sequence.py)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.layout import Layout, Shard
from shardwise.layout.layout import dense_stride
from shardwise.rules.attention_blocks import How
from shardwise.rules.sequence import CutAttention, keys_alone_are_cut
from shardwise.strategy.program import reduced
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Algorithm, Factors, Operand, Result


@rule("scaled_dot_product_attention")
def attention(
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout_p > 0.0:
        return Algorithm(attention_by_definition)
    q, k, v = query, key, value
    batch = max(q.ndim, k.ndim, v.ndim) - 2
    sizes = [max(_size(op, i, batch) for op in (q, k, v)) for i in range(batch)]
    grouped = enable_gqa and batch > 0 and _size(q, batch - 1, batch) != _size(k, batch - 1, batch)

    def leading(op: Operand) -> list[str | None]:
        names: list[str | None] = []
        for i in range(batch - (op.ndim - 2), batch):
            if grouped and i == batch - 1:
                names.append("heads" if _heads_may_be_cut((q, k, v)) else None)
            else:
                names.append(f"b{i}" if _size(op, i, batch) == sizes[i] else None)
        return names

    rows = "l"
    out = [f"b{i}" for i in range(batch)]
    if grouped:
        out[-1] = "heads"
    inputs = [(*leading(q), rows, None), (*leading(k), None, None), (*leading(v), None, "e")]
    if isinstance(attn_mask, Operand):
        mask_batch: list[str | None] = []
        for i in range(batch - (attn_mask.ndim - 2), batch):
            fits = _size(attn_mask, i, batch) == sizes[i] and not (grouped and i == batch - 1)
            mask_batch.append(f"b{i}" if fits else None)
        inputs.append((*mask_batch, rows if attn_mask.ndim > 1 and attn_mask.shape[-2] == q.shape[-2] else None, None))
    causal, grouping = is_causal, enable_gqa

    def local(layouts: list[Layout], outputs: list[Layout]) -> Callable[..., Any]:
        plain_mask = None if isinstance(attn_mask, Operand) else attn_mask

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = plain_mask) -> torch.Tensor:
            if q.numel() and v.numel():
                return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouping)
            # fused kernels drop the graph of an empty shard; every rank must build the same one
            return attention_by_definition(q, k, v, mask, 0.0, causal, scale, grouping)

        return attend

    factors = Factors(
        inputs, [(*out, rows, "e")], linear="each", joint=frozenset({2}), local=local, result=_result(q, k, v)
    )
    if not _along_cuts(q, k, v, attn_mask, is_causal):
        return factors
    return Algorithm(functools.partial(_over_cuts, CutAttention(factors, How(scale, grouped), is_causal)))


def _along_cuts(q: Operand, k: Operand, v: Operand, mask: Any, is_causal: bool) -> bool:
    """Whether keys or values are cut along the sequence, or queries that a causal mask counts."""
    counted = [q, mask] if isinstance(mask, Operand) and mask.ndim > 1 else [q]
    return any(op.layout.is_cut(op.ndim - 2) for op in ((k, v, *counted) if is_causal else (k, v)))


def _over_cuts(
    attend: CutAttention, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """`attend` on the operands; under autocast, as one op of the lower precision."""
    if keys_alone_are_cut(query._layout, key._layout, value._layout):
        return reduced(attention_by_definition(query, key, value, attn_mask, *args, **kwargs))
    operands = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return attend(operands)
    dtype = torch.get_autocast_dtype(device)
    cast = [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in operands]
    with torch.autocast(device, enabled=False):
        return attend(cast)


@rule("_scaled_dot_product_flash_attention_for_cpu")
def cpu_kernel(
    q: Operand, k: Operand, v: Operand, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Any = None, scale: Any = None,
) -> Factors:  # fmt: skip
    """What torch makes of attention inside its own functions (multi_head_attention_forward): batch and heads pass."""
    names = ("b", "h", None, None)
    inputs: list[tuple[str | None, ...]] = [names] * 3
    if isinstance(attn_mask, Operand):
        leading = zip(names, q.shape, attn_mask.shape[:-2], strict=False)
        inputs.append((*(name if n == m else None for name, n, m in leading), None, None))

    def local(layouts: list[Layout], outputs: list[Layout]) -> Callable[..., Any]:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> Any:
            if q.numel():
                kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
                return kernel(q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale)
            out = attention_by_definition(q, k, v, mask, 0.0, is_causal, scale)  # the kernel divides by the heads
            return out, q.new_zeros(q.shape[:3], dtype=outputs[1].dtype)

        return attend

    return Factors(inputs, [names, names[:3]], local=local)


def _result(q: Operand, k: Operand, v: Operand) -> Result | None:
    """As torch's fused kernels have it: stored in the order of the queries."""
    if not q.ndim == k.ndim == v.ndim or q.shape[:-3] != v.shape[:-3] or not q.dtype == k.dtype == v.dtype:
        return None
    shape = (*q.shape[:-1], v.shape[-1])
    return Result(shape, q.dtype, dense_stride(shape, q.layout.stride))


def _size(op: Operand, batch_dim: int, batch: int) -> int:
    """The size of a batch dim counted in the broadcast result."""
    dim = batch_dim - (batch - (op.ndim - 2))
    return op.shape[dim] if dim >= 0 else 1


def _heads_may_be_cut(operands: tuple[Operand, ...]) -> bool:
    """Grouped queries: query and key heads are cut alike only where both divide evenly."""
    cuts = [(axis, p) for op in operands for axis, p in enumerate(op.layout.placements) if p.is_shard(op.ndim - 3)]
    parts = math.prod(operands[0].mesh.shape[axis] for axis in {axis for axis, _ in cuts})
    regular = all(isinstance(p, Shard) and p.pieces is None for _, p in cuts)
    return regular and all(op.shape[-3] % parts == 0 for op in operands)


def attention_by_definition(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    """The definition, spelled out, so that dropout draws what one device would draw."""
    q, k, v = query, key, value
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype is torch.bool else scores + attn_mask
    weights = torch._safe_softmax(scores, -1)  # zeros for a query that sees nothing, as in torch
    return (F.dropout(weights, dropout_p) if dropout_p else weights) @ v
