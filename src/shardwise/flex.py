"""flex_attention on distributed tensors: batch, heads and queries may be cut, keys and values are whole.

torch hands the operator below `flex_attention` to the tensor class. Each rank calls it for what it holds, with a
`score_mod` and a `mask_mod` that see the indices of the whole tensors, and with its own part of the block mask.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise import traced
from shardwise.comm.base import Coords
from shardwise.comm.capturing import tape_here, tapes
from shardwise.context import of_thread, running
from shardwise.engine.call import SPECIAL
from shardwise.engine.plain_tensors import with_plain_wrapped
from shardwise.errors import RuleError
from shardwise.functions import COMPILED_ON_RANKS
from shardwise.imports import when_imported
from shardwise.layout import Layout
from shardwise.layout.shapes import contiguous_stride
from shardwise.layout.split import Intervals
from shardwise.protocols import Item
from shardwise.reachable import tensors_read_by
from shardwise.strategy import Operand, factors
from shardwise.strategy.empty_ranks import of_one_each
from shardwise.strategy.program import run_local
from shardwise.strategy.spec import Factors
from shardwise.torch_private import flex as torchs
from shardwise.torch_private.tensors import is_abstract, without_modes
from shardwise.wrapper import Wrapper, wrap

Mod = Callable[..., torch.Tensor]  # a score_mod (score, b, h, q, kv) or a mask_mod (b, h, q, kv)
Sets = Sequence[Intervals | None]  # of batches, heads and queries; None for all of them
_NAME = "flex_attention"


def take_flex_attention() -> None:
    """Have the engine hand torch's operator to the function below, once the program imports it."""
    when_imported(torchs.OPERATOR, lambda module: SPECIAL.update({module.flex_attention: _on_ranks}))
    COMPILED_ON_RANKS.add(torchs.MODULE)


def _on_ranks(
    query: Item,
    key: Item,
    value: Item,
    score_mod: Mod,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[torch.Tensor | None, ...]:
    """The operator: the result, and for each query the logarithm of its sum and its greatest score; None for what
    nobody asked for."""
    if tapes and (tape := tape_here()) is not None:
        tape.refuse(f"{_NAME} on distributed tensors: compile it by itself, torch.compile({_NAME})")
        with without_modes():  # no rule of the operator knows the tape's
            return _on_ranks(query, key, value, score_mod, block_mask, scale, kernel_options)
    tensors = [query, key, value]
    if not all(isinstance(t, Wrapper) for t in tensors):
        tensors = list(with_plain_wrapped(_NAME, tensors, {})[0])
    mask = _Mask(block_mask)
    made: list[Wrapper | None] = [None, None, None]
    asked = [0, *(i for i, name in ((1, "OUTPUT_LOGSUMEXP"), (2, "OUTPUT_MAX")) if kernel_options.get(name, True))]
    attend = functools.partial(_attend, score_mod, mask, scale, kernel_options, asked)
    with running(_NAME):
        ways = _ways([t._layout for t in tensors], mask)
        _check_reads(score_mod, block_mask[-1], is_cut=any(p.is_shard() for p in ways.query.placements))
        moved = [t.redistribute(placements=layout.placements) for t, layout in zip(tensors, ways.inputs, strict=True)]
        local = of_one_each(attend, ways.factors.inputs, [ways.factors.outputs[i] for i in asked])
        found = run_local(local, moved, [ways.outputs[i] for i in asked], ways.held_at)
        for i, result in zip(asked, found, strict=True):
            made[i] = _as_computed(result)
    return tuple(made)


def _check_reads(*mods: Mod, is_cut: bool) -> None:
    """Raise if a function of the program's reads what it would read wrongly on a rank, or if the call `is_cut`, what
    each rank would have only a part of the gradient of."""
    for tensor in (t for mod in mods for t in tensors_read_by(mod)):
        if isinstance(tensor, Wrapper):
            raise RuleError(
                f"{_NAME}: score_mod or mask_mod reads a distributed tensor of shape {tuple(tensor.shape)}, and every "
                f"rank looks up numbers of the whole: give it the plain tensor, x.full_tensor()"
            )
        if is_cut and tensor.requires_grad and torch.is_grad_enabled():
            raise RuleError(
                f"{_NAME}: score_mod reads a tensor of shape {tuple(tensor.shape)} that requires grad, and each rank "
                f"would have the gradient of its own part only: redistribute query, key and value to Replicate, or use "
                f"scaled_dot_product_attention with the tensor in attn_mask"
            )


def _as_computed(x: Wrapper) -> Wrapper:
    """A result with the dtype that the ranks' kernel chose."""
    dtype = x._layout.mesh.comm.first(x._local).dtype
    return x if dtype == x._layout.dtype else wrap(x._local, x._layout.replace(dtype=dtype))


@dataclass(frozen=True)
class _Mask:
    """A block mask as the operator takes it: which blocks of keys each block of queries sees, whole or in part."""

    given: tuple[Any, ...]

    @property
    def blocks(self) -> torch.Tensor:
        """How many blocks of keys each block of queries sees in part, for each batch and head."""
        found: torch.Tensor = self.given[2]
        return found

    @property
    def is_ordered(self) -> bool:
        """Whether it says in which order gradients are added up, which holds for the whole mask only."""
        return any(entry is not None for entry in self.given[10:-3])

    @property
    def structure(self) -> tuple[int | bool, ...]:
        """What decides where queries may be cut."""
        return (self.blocks.shape[-1], self.given[-3], self.given[0], self.is_ordered)

    def rows(self, queries: Intervals) -> Intervals | None:
        """The blocks that these queries are; None if a block would have to be taken apart."""
        if self.blocks.shape[-1] == 1:
            return ((0, 1),)
        size, end = self.given[-3], self.given[0]
        if any(a % size or (b % size and b != end) for a, b in queries):
            return None
        return tuple((a // size, -(-b // size)) for a, b in queries)

    def part(self, sets: Sets, queries: int) -> tuple[Any, ...]:
        """The mask of a rank that holds these of the batches, heads and queries."""
        if not any(sets):
            return self.given
        kept = [held if n > 1 else None for held, n in zip(sets[:2], self.blocks.shape[:2])]  # masks are broadcast
        kept.append(None if sets[2] is None else self.rows(sets[2]))
        blocks = [None if t is None else _taken(t, kept) for t in self.given[2:6]]
        length = queries if self.blocks.shape[-1] > 1 else self.given[0]
        mod = traced.mask_of_whole(self.given[-1], *(_index(held, self.blocks.device) for held in sets))
        return torchs.block_mask(blocks, self.given[-3:-1], mod, (length, self.given[1]), self.given[6] is not None)


def _taken(x: torch.Tensor, kept: Sequence[Intervals | None]) -> torch.Tensor:
    for d, held in enumerate(kept):
        if held is not None:
            x = x.index_select(d, _numbers(held, x.device))
    return x


def _numbers(held: Intervals, device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(a, b, device=device) for a, b in held])


def _index(held: Intervals | None, device: torch.device) -> traced.Index:
    """The index in the whole tensor, by that in what a rank holds."""
    if held is None:
        return traced.same
    if len(held) == 1:
        return traced.shifted(torch.tensor([held[0][0]], device=device))
    return traced.looked_up(_numbers(held, device))


# -- how the call is split ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Held:
    """The batches, heads and queries that a rank holds; None for all of them. A rank without any gets the first one,
    of which nothing remains in its result."""

    sets: Sets


@dataclass(frozen=True)
class _Ways:
    """Where the operands go, and how the results are laid out."""

    factors: Factors
    inputs: list[Layout]
    outputs: list[Layout]

    @property
    def query(self) -> Layout:
        return self.inputs[0]

    def held_at(self, coords: Coords) -> _Held:
        cut = self.query.is_cut
        return _Held(tuple((self.query.held(d, coords) or ((0, 1),)) if cut(d) else None for d in range(3)))


def _ways(layouts: Sequence[Layout], mask: _Mask) -> _Ways:
    plans, key = layouts[0].mesh.plans, (_NAME, *layouts, *mask.structure)
    if key not in plans:
        plans.add(key, _planned(layouts, mask))
    found: _Ways = plans[key]
    return found


def _planned(layouts: Sequence[Layout], mask: _Mask) -> _Ways:
    """Queries stay cut where the cuts fall between blocks of the mask."""
    q, k = layouts[:2]
    if any(0 in layout.shape for layout in layouts) or mask.is_ordered:
        return _along("b! h! l! e!, b! g! s! e!, b! g! s! v! -> b! h! l! v!, b! h! l!", layouts)
    heads = ["(g q)", "(g k)", "(g v)"] if q.shape[1] != k.shape[1] else ["h"] * 3
    text = f"b {heads[0]} l e!, b {heads[1]} s! e!, b {heads[2]} s! v! -> b {heads[0]} l v!, b {heads[0]} l"
    found = _along(text, layouts)
    if all(mask.rows(held) is not None for held in _cuts(found.query, 2)):
        return found
    return _along(text.replace(" l", " l!"), layouts)


def _cuts(layout: Layout, dim: int) -> Iterator[Intervals]:
    """What the ranks hold of a dim."""
    axes = layout.axes_of(dim)
    for spot in itertools.product(*(range(layout.mesh.shape[axis]) for axis in axes)):
        at = dict(zip(axes, spot, strict=True))
        yield layout.held(dim, [at.get(axis, 0) for axis in range(len(layout.mesh.shape))])


def _along(text: str, layouts: Sequence[Layout]) -> _Ways:
    operands = [Operand(layout, i) for i, layout in enumerate(layouts)]
    spec = factors(text, operands, outputs=2)
    chosen = spec.assign(operands, (), False)
    assert chosen is not None  # there is always the way of computing it all on each rank
    moved = [layout.replace(placements=p) for layout, p in zip(layouts, chosen.inputs, strict=True)]
    shape = (*layouts[0].shape[:-1], layouts[2].shape[-1])
    strides = (_in_order_of(layouts[0].stride, shape), contiguous_stride(shape[:3]))
    out, sums = (
        layouts[0].replace(placements=places, shape=shape[: len(stride)], stride=stride)
        for places, stride in zip(chosen.outputs[:2], strides, strict=True)
    )
    return _Ways(spec, moved, [out, sums, sums])


def _in_order_of(stride: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of the result: its dims lie in memory in the order of the queries', the last one innermost."""
    found, step = [1] * len(shape), shape[-1]
    for d in sorted(range(len(shape) - 1), key=lambda d: (stride[d], -d)):
        found[d], step = step, step * shape[d]
    return tuple(found)


# -- what a rank computes ----------------------------------------------------------------------------------
def _attend(
    score_mod: Mod,
    mask: _Mask,
    scale: float,
    options: dict[str, Any],
    asked: Sequence[int],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    held: _Held,
) -> tuple[torch.Tensor, ...]:
    """The operator, for what one rank holds."""
    if is_abstract(q):
        return _without_values(q, k, v, scale, asked)
    if any(held.sets):
        score_mod = traced.scores_of_whole(score_mod, *(_index(some, q.device) for some in held.sets))
    run: Callable[..., Any] = torchs.compiled(traced.calling(torchs.operator(), asked), of_thread.compiling)
    return tuple(run(q, k, v, score_mod, mask.part(held.sets, q.shape[2]), scale, options))


def _without_values(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, asked: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """On tensors without values: what attention to all keys takes, an upper bound."""
    grouped = q.shape[1] != k.shape[1]
    k, v = (t.expand(q.shape[0], *t.shape[1:]) for t in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)
    sums = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return tuple(out if i == 0 else sums for i in asked)
