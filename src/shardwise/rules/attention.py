"""Attention: batch and head dims pass, queries too unless the causal mask counts them; keys are whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.attention.blocks import How
from shardwise.attention.sequence import CutAttention, along_cuts, keys_alone_are_cut, output_stride
from shardwise.strategy import Algorithm, Answer, Operand, Result, Tensor, factors, line, operands_in, reduced
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

    kernel = attention_by_definition if is_empty else F.scaled_dot_product_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = mask) -> torch.Tensor:
        if is_empty and mask is not None:
            mask = mask.detach()  # of nothing, torch has no gradient for it
        return kernel(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)

    stored, keeps = _result(*three), "" if is_empty else "all"
    spec = factors(text, operands, "each", joint={2}, call=attend, never_empty=not is_empty, result=stored, keeps=keeps)
    if is_empty or not along_cuts(*three, attn_mask, is_causal):
        return spec
    run = partial(_over_cuts, CutAttention(spec, How(scale, grouped), is_causal))
    return Algorithm(run, knows_memory=True, keeps="all")


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


# what torch makes of attention inside its own functions (multi_head_attention_forward): batch and heads pass
line(
    "_scaled_dot_product_flash_attention_for_cpu",
    "*b l! e!, *b s! e!, *b s! v!, *b l! s!? -> *b l! v!, *b l!",
    takes="q k v dropout_p=0.0 is_causal=False attn_mask=None scale=None",
    never_empty=True,
)


def attention_by_definition(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    """In torch's own parts, whose dropout draws what one device would draw."""
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # of which the parts make nothing
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    return attention_math(query, key, value, attn_mask, *args, **kwargs)[0]
