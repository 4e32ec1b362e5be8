"""Attention of some queries to some keys, block by block, on one device: parts that can be merged afterwards.

A part is (output, log of the sum of the exponentials), both as if its keys were all there are. Parts over different
keys merge exactly; given the merged pair, the gradient of each block can be had on its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.attention.kernels import Part, fused_kernel
from shardwise.layout.shapes import dense_stride
from shardwise.layout.split import Interval, Intervals
from shardwise.strategy.program import sum_dtype

_MOST_SCORES = 1 << 22  # elements of a block of scores alive at a time, where no fused kernel fits


class Block(NamedTuple):
    """Queries and keys, as positions in the tensors at hand; `column` is the first key's global index. Where `causal`,
    the block is square and query i sees the keys up to i; else every query sees every key."""

    rows: Interval
    keys: Interval
    column: int
    causal: bool


class How(NamedTuple):
    """What holds for a whole call."""

    scale: float | None
    grouped: bool  # several heads of queries share one of keys


def visible_blocks(rows: Intervals, keys: Intervals, causal: bool, by_piece: bool = False) -> tuple[Block, ...]:
    """The blocks of what these queries see of these keys, both given by their global indices.

    Blocks of the same queries whose keys stand next to each other are one, unless their columns must be (`by_piece`).

    >>> visible_blocks(((2, 4), (6, 8)), ((0, 2), (6, 8)), causal=True)[0]
    Block(rows=(0, 2), keys=(0, 2), column=0, causal=False)
    """
    found: list[Block] = []
    for a, b, row in _placed(rows):
        mine: list[Block] = []
        for c, d, key in _placed(keys):
            for (r0, r1), (k0, k1), diagonal in _seen(a, b, c, d) if causal else [((a, b), (c, d), False)]:
                block = Block((r0 - a + row, r1 - a + row), (k0 - c + key, k1 - c + key), k0, diagonal)
                if mine and _follows(mine[-1], block, by_piece):
                    mine[-1] = mine[-1]._replace(keys=(mine[-1].keys[0], block.keys[1]))
                else:
                    mine.append(block)
        found += mine
    return tuple(found)


def _placed(intervals: Intervals) -> Iterator[tuple[int, int, int]]:
    at = 0
    for start, stop in intervals:
        yield start, stop, at
        at += stop - start


def _seen(a: int, b: int, c: int, d: int) -> Iterator[tuple[Interval, Interval, bool]]:
    """What the queries [a, b) see of the keys [c, d): the keys before the first query, for all; the square on the
    diagonal where both begin together; what is left below it."""
    if c < min(d, a):
        yield (a, b), (c, min(d, a)), False
    start, stop = max(a, c), min(b, d)
    if start < stop:
        yield (start, stop), (start, stop), True
        if stop < b:
            yield (stop, b), (start, stop), False


def _follows(one: Block, other: Block, by_column: bool) -> bool:
    if one.causal or other.causal or one.rows != other.rows or one.keys[1] != other.keys[0]:
        return False
    return not by_column or one.column + one.keys[1] - one.keys[0] == other.column


# -- forward -----------------------------------------------------------------------------------------------
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, so_far: Part | None, how: How, blocks: tuple[Block, ...]
) -> Part:
    """`so_far` (output, log-sum) with these blocks merged in; None where there is nothing yet."""
    out, lse = so_far or _nothing_seen(q, k, v, how)
    for block in blocks:
        part = _forward(*_operands(q, k, v, block, how), _cut(mask, block, q), block.causal, how.scale)
        _merge(out, lse, part, block.rows)
    return out, lse


def output_shape(q: Sequence[int], k: Sequence[int], v: Sequence[int], how: How) -> tuple[int, ...]:
    kept = 3 if how.grouped else 2
    batch = torch.broadcast_shapes(*(tuple(shape[: len(shape) - kept]) for shape in (q, k, v)))
    return (*batch, *q[len(q) - kept : -1], v[-1])


def _nothing_seen(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    shape = output_shape(q.shape, k.shape, v.shape, how)
    in_order = q.ndim == len(shape) and 0 not in q.stride()[:-1]  # of an expanded tensor strides tell no order
    like = q.stride() if in_order else range(len(shape), 0, -1)
    dtype, device = sum_dtype(q.dtype), q.device
    out = torch.empty_strided(shape, dense_stride(shape, like), dtype=dtype, device=device).zero_()
    return out, torch.full(shape[:-1], -torch.inf, dtype=dtype, device=device)


def _merge(out: Tensor, lse: Tensor, part: Part, rows: Interval) -> None:
    more, more_lse = part
    out, lse = out[..., slice(*rows), :], lse[..., slice(*rows)]
    both = torch.logaddexp(lse, more_lse)
    base = both.masked_fill(both == -torch.inf, 0)  # queries that see nothing yet
    out.mul_((lse - base).exp_().unsqueeze(-1)).add_(more * (more_lse - base).exp_().unsqueeze(-1))
    lse.copy_(both)


def _operands(q: Tensor, k: Tensor, v: Tensor, block: Block, how: How) -> tuple[Tensor, Tensor, Tensor]:
    rows, keys = slice(*block.rows), slice(*block.keys)
    q, k, v = q[..., rows, :], k[..., keys, :], v[..., keys, :]
    return (q, _grouped(k, q), _grouped(v, q)) if how.grouped else (q, k, v)


def _grouped(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values with a head for every head of the queries."""
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _cut(mask: Tensor | None, block: Block, q: Tensor) -> Tensor | None:
    """The mask of a block. Rows are cut as the queries are, columns are all there."""
    mask = _rows_of(mask, block.rows, q)
    if mask is None or mask.shape[-1] == 1:
        return mask
    return mask.narrow(-1, block.column, block.keys[1] - block.keys[0])


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Part:
    kernel = fused_kernel(q, k, v) if mask is None else None
    if kernel is not None:
        return kernel.forward(q, k, v, causal, scale)
    parts = []
    for rows in _row_chunks(q, k):
        scores = _scores(q[..., slice(*rows), :], k, _rows_of(mask, rows, q), causal, scale, rows[0])
        lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
        weights = _weights(scores, lse)
        parts.append((weights @ v.to(weights.dtype), lse))
    return torch.cat([out for out, _ in parts], -2), torch.cat([lse for _, lse in parts], -1)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp_()


def _row_chunks(q: Tensor, k: Tensor) -> list[Interval]:
    rows, batch = q.shape[-2], math.prod(q.shape[:-2])
    step = max(1, _MOST_SCORES // max(1, batch * k.shape[-2]))
    return [(a, min(a + step, rows)) for a in range(0, max(rows, 1), step)]


def _rows_of(mask: Tensor | None, rows: Interval, q: Tensor) -> Tensor | None:
    if mask is None or mask.ndim < 2 or mask.shape[-2] != q.shape[-2]:
        return mask
    return mask.narrow(-2, rows[0], rows[1] - rows[0])


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None, first: int) -> Tensor:
    """What each query, of which the first stands at `first` in its block, makes of each key."""
    dtype = sum_dtype(q.dtype)
    scores = q.to(dtype) @ k.to(dtype).mT * scale_of(q, scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(first)
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask


def scale_of(q: Tensor, scale: float | None) -> float:
    return (1 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0) if scale is None else scale


# -- backward ----------------------------------------------------------------------------------------------
def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    so_far: tuple[Tensor, Tensor | None] | None,
    how: How,
    blocks: tuple[Block, ...],
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The gradients of q and of the mask with these blocks added to `so_far`, and those of these keys and values."""
    no_gradient = None if mask is None or not mask.is_floating_point() else torch.zeros_like(mask)
    dq, dmask = so_far or (torch.zeros_like(q, dtype=sum_dtype(q.dtype)), no_gradient)
    dk, dv = (torch.zeros_like(x, dtype=sum_dtype(x.dtype)) for x in (k, v))
    for block in blocks:
        rows, keys = slice(*block.rows), slice(*block.keys)
        here = _operands(q, k, v, block, how)
        results = grad[..., rows, :], out[..., rows, :], lse[..., rows]
        more = _backward(*results, *here, _cut(mask, block, q), _cut(dmask, block, q), block.causal, how.scale)
        for total, part in ((dq[..., rows, :], more[0]), (dk[..., keys, :], more[1]), (dv[..., keys, :], more[2])):
            _add_to(total, part, how)
    return dq, dmask, dk, dv


def _add_to(total: Tensor, part: Tensor, how: How) -> None:
    """Add a gradient to that of what was broadcast, or shared by several heads."""
    if how.grouped and part.shape[-3] != total.shape[-3]:
        part = part.unflatten(-3, (total.shape[-3], -1)).sum(-3)
    total.add_(part.sum_to_size(total.shape))


def _backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dmask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = fused_kernel(q, k, v) if mask is None and grad.dtype == out.dtype == q.dtype else None
    if kernel is not None:
        out = out if out.stride(-1) == 1 else out.contiguous()  # kernels read rows, as of q, k and v
        return kernel.backward(grad.contiguous(), q, k, v, out, lse, causal, scale)
    dtype = sum_dtype(q.dtype)
    wide_q, wide_k, wide_v = (x.to(dtype) for x in (q, k, v))
    factor = scale_of(q, scale)
    dq: list[Tensor] = []
    dk, dv = (torch.zeros((), dtype=dtype, device=q.device) for _ in range(2))
    for rows in _row_chunks(q, k):
        at = slice(*rows)
        g, mine = grad[..., at, :].to(dtype), _rows_of(mask, rows, q)
        weights = _weights(_scores(q[..., at, :], k, mine, causal, scale, rows[0]), lse[..., at])
        expected = (g * out[..., at, :]).sum(-1, keepdim=True)
        dscores = weights * (g @ wide_v.mT - expected)
        if dmask is not None:
            into = _rows_of(dmask, rows, q)
            assert into is not None
            into.add_(dscores.sum_to_size(into.shape))
        dq.append(dscores @ wide_k * factor)
        dk = dk + dscores.mT @ wide_q[..., at, :] * factor
        dv = dv + weights.mT @ g
    return torch.cat(dq, -2), dk, dv


# -- the whole, for derivatives of the derivative ----------------------------------------------------------
def attend_by_definition(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: How, causal: bool, rows: Intervals
) -> Tensor:
    """Attention of the queries `rows` to all keys, in plain differentiable ops."""
    kept, dtype = q.dtype, sum_dtype(q.dtype)
    if how.grouped:
        k, v = _grouped(k, q), _grouped(v, q)
    scores = _scores(q, k, mask, False, how.scale, 0)
    if causal:
        indices = [torch.arange(a, b, device=q.device) for a, b in rows] or [torch.arange(0, device=q.device)]
        hidden = torch.arange(k.shape[-2], device=q.device) > torch.cat(indices).unsqueeze(-1)
        scores = scores.masked_fill(hidden, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    return (weights @ v.to(dtype)).to(kept)
