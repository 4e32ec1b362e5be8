"""Rules of the user as lists of strategies, as torch's register_sharding takes them, and a check of their promises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.errors import RuleError
from shardwise.layout import Layout, Placement, Shard, as_placements
from shardwise.layout.placement import REPLICATE
from shardwise.spec import TensorMeta
from shardwise.strategy.spec import Assignment, Choice, Factors, Operand, Spec, fitting, operands_in

Op = Callable[..., Any]  # an op of torch.ops or torch.library, or a Python function
Pair = tuple[tuple[Placement, ...], tuple[Placement, ...]]  # placements of outputs, of inputs


class TensorInfo:
    """A tensor argument as a sharding function sees it: everything but values. The shape is the global one."""

    def __init__(self, layout: Layout) -> None:
        self.shape, self.ndim, self.dtype = torch.Size(layout.shape), layout.ndim, layout.dtype
        self.mesh = self.device_mesh = layout.mesh.source
        self.placements = layout.placements
        self.tensor_meta = TensorMeta(self.shape, layout.stride, layout.dtype)

    def stride(self) -> tuple[int, ...]:
        return self.tensor_meta.stride

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()


def rule_from_strategies(op: Op, strategies: Callable[..., Any]) -> Callable[..., CheckedRule]:
    """The rule of an op from a function that lists what is right on one mesh axis."""

    def rule(*args: Any, **kwargs: Any) -> CheckedRule:
        described = tree_map_only(Operand, lambda one: TensorInfo(one.layout), (args, kwargs))
        operands = list(operands_in((*args, *kwargs.values())))
        pairs = [_pair(op, n, pair, operands) for n, pair in enumerate(strategies(*described[0], **described[1]))]
        return CheckedRule(Strategies([()] * len(operands), [], pairs=pairs), op, args, kwargs)

    rule.__doc__ = strategies.__doc__
    return rule


def _pair(op: Op, number: int, pair: Any, operands: Sequence[Operand]) -> Pair:
    """One strategy, checked: what is not a tensor left out, dims counted from the front."""
    what = f"{op}: strategy {number}, {pair!r}"
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise RuleError(f"{what}: expected a pair of output placements and input placements")
    one = lambda given: [given] if hasattr(given, "is_replicate") else given
    outs, ins = (as_placements([p for p in one(side) if p is not None]) for side in pair)
    if len(ins) != len(operands):
        raise RuleError(
            f"{what}: {len(ins)} input placements for {len(operands)} tensors; give one for each, None for every "
            f"argument that is not a tensor"
        )
    return outs, tuple(_from_the_front(p, x.ndim, f"{what}: input {i}") for i, (p, x) in enumerate(zip(ins, operands)))


def _from_the_front(placement: Placement, ndim: int, what: str) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    if not -ndim <= placement.dim < ndim:
        raise RuleError(f"{what}: {placement!r} of a tensor with {ndim} dims; give a dim it has")
    return placement.at(placement.dim % ndim)


@dataclasses.dataclass
class Strategies(Factors):
    """The strategies that a user lists, for any one axis.

    Where all dims that a strategy cuts are of one size, they may be cut in any way, so an existing cut is kept. Where
    they are of several sizes, only equal parts are known to belong together."""

    pairs: Sequence[Pair] = ()

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Any], pinned: bool) -> Assignment | None:
        self.shapes = [tuple(out.shape) for out in outputs]
        self.outputs = [()] * len(outputs)
        return super().assign(operands, outputs, pinned)

    def choices(self, operands: Sequence[Operand], axis: int, before: list[list[Placement]]) -> list[Choice]:
        is_whole = all(x.layout.placements[axis].is_replicate() for x in operands)  # and is to stay so
        pairs = [] if is_whole else self.pairs
        found = [self._choice(pair, operands, axis, before) for pair in pairs]
        everywhere = (REPLICATE,) * len(operands), (REPLICATE,) * len(self.shapes)
        return [c for c in found if c is not None] + [Choice(*everywhere, "compute it all on each rank")]

    def _choice(
        self, pair: Pair, operands: Sequence[Operand], axis: int, before: list[list[Placement]]
    ) -> Choice | None:
        outs, ins = pair
        if len(outs) != len(self.shapes):
            raise RuleError(
                f"strategy {pair!r} has {len(outs)} output placements, the op has {len(self.shapes)} results; give one "
                f"for each"
            )
        outs = tuple(_from_the_front(p, len(s), f"output {i}") for i, (p, s) in enumerate(zip(outs, self.shapes)))
        cut = [(p, x.shape) for p, x in zip(ins, operands)] + list(zip(outs, self.shapes))
        sizes = {shape[p.dim] for p, shape in cut if isinstance(p, Shard)}
        name = f"use the strategy {list(map(str, ins))} -> {list(map(str, outs))}"
        if len(sizes) > 1:
            return None if any(size % len(operands[0].mesh.ranks) for size in sizes) else Choice(ins, outs, name)
        there = (
            fitting(x.layout, axis, now, before[i])
            for i, (p, x) in enumerate(zip(ins, operands))
            if isinstance(p, Shard) and isinstance(now := x.layout.placements[axis], Shard) and now.dim == p.dim
        )
        kept = next(there, None)
        alike = lambda p: kept.at(p.dim) if kept is not None and isinstance(p, Shard) else p
        return Choice(tuple(map(alike, ins)), tuple(map(alike, outs)), name)


# -- a rule of the user's is not trusted -------------------------------------------------------------------
@dataclasses.dataclass
class CheckedRule(Spec):
    """A rule of the user's for one call. The op is run on meta tensors of the local shapes first: where the results do
    not have the shapes that the layouts promise, the values would be wrong and nobody would notice."""

    spec: Factors
    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Any], pinned: bool) -> Assignment | None:
        found = self.spec.assign(operands, outputs, pinned)
        if found is None:
            return None
        ins = [x.layout.replace(placements=p) for x, p in zip(operands, found.inputs, strict=True)]
        outs = [Layout.make(x.mesh, p, o.shape, o.dtype) for x, o, p in zip(ins * len(outputs), outputs, found.outputs)]
        mesh = operands[0].mesh
        at = lambda layouts, rank: tuple(layout.local_shape_at(mesh.coords(rank)) for layout in layouts)
        for given, promised in {(at(ins, rank), at(outs, rank)) for rank in mesh.ranks}:
            made = self._made_of(given, operands)
            if made != promised:
                places = ", ".join(str([str(p) for p in places]) for places in found.inputs)
                raise RuleError(
                    f"{self.op}: its rule cuts the inputs as {places} and promises results of shapes {list(promised)} "
                    f"from what a rank then holds, {list(given)}; the op makes {list(made)} of it. Correct the rule"
                )
        return found

    def _made_of(self, shapes: Sequence[tuple[int, ...]], operands: Sequence[Operand]) -> tuple[tuple[int, ...], ...]:
        metas = iter([torch.empty(s, dtype=x.dtype, device="meta") for s, x in zip(shapes, operands, strict=True)])
        args, kwargs = tree_map_only(Operand, lambda _: next(metas), (self.args, self.kwargs))
        with torch.no_grad():
            made = tree_flatten(self.op(*args, **kwargs))[0]
        return tuple(tuple(m.shape) for m in made if isinstance(m, torch.Tensor))
