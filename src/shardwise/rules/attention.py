"""Attention: batch and head dims pass, queries too unless the causal mask counts them; keys are whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.attention.blocks import How
from shardwise.attention.sequence import CutAttention, along_cuts, keys_alone_are_cut, output_stride
from shardwise.strategy import Algorithm, Answer, Factors, Operand, Result, Tensor, factors, operands_in, reduced
from shardwise.strategy.registry import rule
from shardwise.torch_private.tensors import attention_math
from shardwise.wrapper import restride


@rule("scaled_dot_product_attention")
def attention(
    query: Operand, key: Operand, value: Operand, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
) -> Answer:  # fmt: skip
    if dropout_p > 0.0:
        return Algorithm(attention_by_definition)
    three, mask = (query, key, value), None if isinstance(attn_mask, Operand) else attn_mask
    operands, ranks = list(operands_in((*three, attn_mask))), [op.ndim for op in three]
    if min(ranks) < 2 or operands[-1].ndim > max(ranks):
        return None
    grouped = enable_gqa and min(ranks) > 2 and query.shape[-3] != key.shape[-3]
    q, k, v, out = [f"(g {h})" for h in "qkvq"] if grouped else [""] * 4  # heads of a group are cut together
    masked = "s!" if operands[-1].ndim == 1 else "*b h! l s!" if grouped and operands[-1].ndim > 2 else "*b l s!"
    text = f"*b {q} l e!, *b {k} s! e!, *b {v} s! v, {masked}? -> *b {out} l v"
    is_empty = 0 in query.shape or 0 in value.shape

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = mask) -> torch.Tensor:
        kernel = partial(
            F.scaled_dot_product_attention, dropout_p=0.0, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        if is_empty:
            return attention_by_definition(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        return kernel(q, k, v, mask) if q.numel() and v.numel() else _of_nothing(kernel, q, k, v, mask)

    spec = factors(text, operands, "each", joint={2}, call=attend, result=_result(*three))
    if is_empty or not along_cuts(*three, attn_mask, is_causal):
        return spec
    return Algorithm(partial(_over_cuts, CutAttention(spec, How(scale, grouped), is_causal)), knows_memory=True)


def _of_nothing(
    kernel: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """What a rank computes that holds no queries or no values. Fused kernels drop the graph of empty tensors, but every
    rank must build the same one, down to which derivatives torch has: the kernel is called on tensors made one longer
    where they are empty, of whose result nothing is kept."""
    found = kernel(*(t if t is None else _never_empty(t) for t in (q, k, v, mask)))
    batch = len(found.shape) - 2
    empty = [0 in sizes for sizes in zip(*(_aligned(t.shape[:-2], batch) for t in (q, v)), strict=True)]
    empty += [q.shape[-2] == 0, v.shape[-1] == 0]
    return found[tuple(slice(0, 0) if gone else slice(None) for gone in empty)]


def _aligned(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """With ones before, as torch aligns the dims of several tensors."""
    return (1,) * (count - len(sizes)) + tuple(sizes)


def _never_empty(x: torch.Tensor) -> torch.Tensor:
    """With one zero, or one True, along dims without elements."""
    more = [amount for n in reversed(x.shape) for amount in (0, int(n == 0))]
    return F.pad(x, more, value=x.dtype is torch.bool)


def _over_cuts(
    attend: CutAttention, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    if keys_alone_are_cut(query._layout, key._layout, value._layout):
        found = reduced(attention_by_definition(query, key, value, attn_mask, *args, **kwargs))
        restride(found, output_stride(tuple(found.shape), query._layout, key._layout, value._layout))
        return found
    return attend([query, key, value] if attn_mask is None else [query, key, value, attn_mask])


def _result(q: Operand, k: Operand, v: Operand) -> Result | None:
    """Stored in the order of the queries where a fused kernel of torch computes it."""
    if not q.ndim == k.ndim == v.ndim or q.shape[:-3] != v.shape[:-3] or not q.dtype == k.dtype == v.dtype:
        return None
    shape = (*q.shape[:-1], v.shape[-1])
    return Result(shape, q.dtype, output_stride(shape, q.layout, k.layout, v.layout))


@rule("_scaled_dot_product_flash_attention_for_cpu")
def cpu_kernel(
    q: Operand, k: Operand, v: Operand, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Any = None, scale: Any = None,
) -> Factors:  # fmt: skip
    """What torch makes of attention inside its own functions (multi_head_attention_forward): batch and heads pass."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> Any:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        given = (q, k, v) if q.numel() else map(_never_empty, (q, k, v))  # the kernel divides by the number of heads
        more = mask if mask is None or q.numel() else _never_empty(mask)
        out, log = kernel(*given, dropout_p, is_causal, attn_mask=more, scale=scale)
        if q.numel():
            return out, log
        here = tuple(slice(0, n) for n in q.shape[:-1])
        return out[(*here, slice(0, v.shape[-1]))], log[here]

    text = "*b l! e!, *b s! e!, *b s! v!, *b l! s!? -> *b l! v!, *b l!"
    return factors(text, list(operands_in((q, k, v, attn_mask))), call=attend)


def attention_by_definition(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    """In torch's own parts, whose dropout draws what one device would draw."""
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # of which the parts make nothing
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    return attention_math(query, key, value, attn_mask, *args, **kwargs)[0]
