"""foreach and fused ops: lists of tensors. Every position is a call of its own, planned by the rule of the plain op,
and one local call does them all. Norms and maxima of a list take one exchange for the whole list."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.layout import Layout, Partial
from shardwise.layout.placement import REPLICATE
from shardwise.rules.pointwise import broadcast
from shardwise.strategy.notation import operands_in
from shardwise.strategy.program import needs_grad, reduced
from shardwise.strategy.registry import named, rule
from shardwise.strategy.spec import Algorithm, Assignment, Factors, Operand, Places
from shardwise.wrapper import wrap, wrapper_of


@dataclasses.dataclass
class Columns:
    """`columns[j]` are the operands at position j of the lists, with how they may be split there; `shared` are tensors
    that meet every position, whole."""

    in_place_without_meta = True  # fused steps have no meta kernels, and need none

    columns: Sequence[tuple[tuple[Operand, ...], Factors]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def shared(self) -> list[Operand]:
        return [a for a in (*self.args, *self.kwargs.values()) if isinstance(a, Operand)]

    def run_meta(self, func: Callable[..., Any]) -> Any:
        """The call on meta tensors: one position of each kind stands for all that are alike."""
        kinds: dict[Any, int] = {}  # kind of position -> number among the results
        positions, index = [], []
        for j, (members, _) in enumerate(self.columns):
            here = (_at(a, j) for a in (*self.args, *self.kwargs.values()) if _is_list(a))
            kind = (*(op.layout for op in members), *(type(a) for a in here if not isinstance(a, Operand)))
            if kind not in kinds:
                kinds[kind] = len(kinds)
                positions.append(j)
            index.append(kinds[kind])
        meta = lambda a: [_meta(a[j]) for j in positions] if _is_list(a) and a else _one(a)  # noqa: E731
        found = func(*map(meta, self.args), **{name: meta(value) for name, value in self.kwargs.items()})
        return type(found)([found[i] for i in index])

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Any], pinned: bool) -> Assignment | None:
        ins: list[Places] = [(REPLICATE,) * len(op.layout.placements) for op in operands]
        splits: list[tuple[int, ...]] = [()] * len(operands)
        outs = []
        known: dict[Any, Assignment | None] = {}  # most positions are alike
        for members, spec in self.columns:
            key = tuple(op.layout for op in members)
            if key not in known:
                known[key] = spec.assign(members, [], pinned)
            found = known[key]
            if found is None:
                return None
            split = _split_axes((*found.inputs, found.outputs[0]))
            for op, places in zip(members, found.inputs, strict=True):
                ins[op.index], splits[op.index] = places, split
            outs.append(found.outputs[0])
        for op in self.shared:
            splits[op.index] = ()
        return Assignment(ins, outs, splits=splits)


def _meta(value: Any) -> Any:
    if not isinstance(value, Operand):
        return value
    layout = value.layout
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def _one(value: Any) -> Any:
    """A tensor outside of the lists is a number, and torch looks at it."""
    return torch.ones(value.shape, dtype=value.dtype) if isinstance(value, Operand) else value


def _split_axes(layouts: Sequence[Places]) -> tuple[int, ...]:
    return tuple(a for a in range(len(layouts[0])) if any(not places[a].is_replicate() for places in layouts))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _at(value: Any, j: int) -> Any:
    return value[j] if _is_list(value) and value else value


_SAME_NAMES = {"alpha", "value", "weight", "memory_format", "non_blocking"}  # list ops have own names for the others


def foreach(name: str) -> None:
    """`_foreach_<name>`: what <name> does, at every position. A tensor outside of the lists is taken whole."""

    @rule(f"_foreach_{name}", any_float=True)
    def at_each_position(*args: Any, **kwargs: Any) -> Columns | Algorithm | None:
        shared = [a for a in (*args, *kwargs.values()) if isinstance(a, Operand)]
        if shared and name.startswith("addc"):  # a number for each position, as a tensor
            func = getattr(torch, f"_foreach_{name}")
            return Algorithm(lambda xs, ys, zs, scalars: func(xs, ys, zs, scalars.tolist()))
        args, kwargs = tuple(map(_whole, args)), {k: _whole(v) for k, v in kwargs.items()}
        known: dict[Any, Any] = {}
        columns: list[Any] = []
        for j in range(len(next(filter(_is_list, args)))):
            here = [_at(a, j) for a in (*args, *(v for k, v in kwargs.items() if k not in _SAME_NAMES))]
            options = {k: _at(v, j) for k, v in kwargs.items() if k in _SAME_NAMES}
            members = tuple(operands_in((*here, *options.values())))
            key = tuple(op.layout for op in members)
            if key not in known:
                known[key] = named(name)(*here, **options)
            spec = known[key]
            if not isinstance(spec, Factors) or spec.local is not None:
                return None
            columns.append((members, dataclasses.replace(spec, linear="none") if shared else spec))
        return Columns(columns, args, kwargs)


def _whole(value: Any) -> Any:
    """A tensor outside of the lists as one that is whole."""
    if not isinstance(value, Operand):
        return value
    return Operand(value.layout.replace(placements=[REPLICATE] * len(value.layout.placements)), value.index)


for _name in (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 floor "
    "frac lerp lgamma log log10 log1p log2 maximum minimum mm mul neg pow reciprocal round rsqrt sigmoid sign sin sinh "
    "sqrt sub tan tanh trunc zero"
).split():
    foreach(_name)


def fused(name: str) -> None:
    """A fused optimizer step: local where parameter, gradient and state are laid out alike. Gradients are made so."""

    @rule(name, any_float=True)
    def step(*args: Any, **kwargs: Any) -> Columns | Algorithm | None:
        columns = list(zip(*(a for a in args if _is_list(a) and a), strict=True))
        if any(not _alike(param, grad) for param, grad, *_ in columns):
            return Algorithm(with_gradients_alike, writes=True)
        for param, _, *state in columns:
            if not all(_alike(param, op) for op in state if op.ndim) or param.layout.is_partial:
                return None
        return Columns([(tuple(column), broadcast(list(column))) for column in columns], args, kwargs)

    def with_gradients_alike(params: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        grads = [g.redistribute(placements=p.placements) for p, g in zip(params, grads, strict=True)]
        return getattr(torch, name)(params, grads, *args, **kwargs)


def _alike(one: Operand, other: Operand) -> bool:
    return one.layout.placements == other.layout.placements


for _name in "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_".split():
    fused(_name)


# -- one exchange for a list -------------------------------------------------------------------------------
class Together:
    """One number a tensor, for a whole list. Tensors of one dtype that are cut along the same axes travel together:
    what each rank makes of those it holds, a vector, is reduced over the ranks by `reduce_op`."""

    def __init__(self, tensors: Sequence[Operand], reduce_op: str) -> None:
        self.reduce_op = reduce_op
        self.pending = [i for i, t in enumerate(tensors) if t.layout.is_partial]
        self.groups: dict[tuple[Layout, tuple[int, ...]], list[int]] = {}
        first: dict[Any, Layout] = {}
        for i, t in enumerate(tensors):
            axes = tuple(a for a, p in enumerate(t.layout.placements) if p.is_shard() and t.mesh.shape[a] > 1)
            layout = first.setdefault((axes, t.dtype), t.layout)
            self.groups.setdefault((layout, axes), []).append(i)

    def run(
        self,
        tensors: Sequence[Any],
        op: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        part: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        after: Callable[[torch.Tensor], torch.Tensor] = lambda vector: vector,
        dtype: torch.dtype | None = None,
    ) -> tuple[Any, ...]:
        """Of whole tensors `op` makes the numbers. Of cut ones `part` makes a rank's vector of parts, which are reduced
        over the ranks, and `after` makes the numbers of the sums. They are of `dtype`, or else of the tensors'."""
        tensors = list(tensors)
        for i in self.pending:
            tensors[i] = reduced(tensors[i])
        found: list[Any] = [None] * len(tensors)
        for (layout, axes), positions in self.groups.items():
            comm, locals = layout.mesh.comm, [tensors[i]._local for i in positions]
            kind = (layout.dtype if dtype is None else dtype).to_real()
            if axes:
                parts = comm.bind(part, axes)(locals)
                places = [Partial(self.reduce_op) if a in axes else REPLICATE for a in range(len(layout.placements))]
                vector = layout.replace(shape=(len(locals),), placements=places, dtype=comm.first(parts).dtype)
                whole = wrap(parts, vector).redistribute(placements=[REPLICATE] * len(places))
                numbers = comm.bind(lambda sums, kind=kind: after(sums).to(kind).unbind())(whole._local)
            else:
                numbers = comm.bind(op)(locals)
            one = wrapper_of(layout.replace(shape=(), placements=[REPLICATE] * len(layout.placements), dtype=kind))
            for i, number in zip(positions, numbers, strict=True):
                found[i] = one(number)
        return tuple(found)


def _filled(values: Sequence[torch.Tensor], fill: Any) -> list[torch.Tensor]:
    """What a rank holds; for nothing, something that leaves the result of the others as it is."""
    return [v if v.numel() else v.new_full((1,), fill) for v in values]


@rule("_foreach_norm")
def foreach_norm(tensors: Sequence[Operand], ord: Any = 2, dtype: Any = None) -> Algorithm:
    """Without gradients the p-th powers of the ranks' norms add up, in double precision so that nothing overflows."""
    if any(0 in t.shape for t in tensors):
        torch._foreach_norm([torch.empty(0)], ord)  # raises where torch knows no norm of nothing
    together = Together(tensors, "sum" if math.isfinite(ord) else "max" if ord > 0 else "min")
    power = ord if ord and math.isfinite(ord) else 1

    def part(values: Sequence[torch.Tensor]) -> torch.Tensor:
        half = dtype is None and values[0].dtype in (torch.float16, torch.bfloat16)
        values = _filled(values, 0 if ord >= 0 else math.inf)
        return torch.stack(torch._foreach_norm(values, ord, torch.float32 if half else dtype)).double() ** power

    def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if needs_grad(*tensors):
            return tuple(torch.linalg.vector_norm(t, ord, dtype=dtype) for t in tensors)
        norms = lambda values: torch._foreach_norm(values, ord, dtype)  # noqa: E731
        return together.run(tensors, norms, part, lambda sums: sums ** (1 / power), dtype)

    return Algorithm(run)


@rule("_foreach_max")
def foreach_max(tensors: Sequence[Operand]) -> Algorithm:
    if any(0 in t.shape for t in tensors):
        torch._foreach_max([torch.empty(0)])  # raises torch's own error
    together = Together(tensors, "max")

    def part(values: Sequence[torch.Tensor]) -> torch.Tensor:
        kind = values[0].dtype
        lowest = -math.inf if kind.is_floating_point else False if kind == torch.bool else torch.iinfo(kind).min
        return torch.stack(torch._foreach_max(_filled(values, lowest)))

    def run(tensors: Any) -> Any:
        if needs_grad(*tensors):
            return tuple(t.max() for t in tensors)
        return together.run(tensors, lambda values: torch._foreach_max(list(values)), part)

    return Algorithm(run)


@rule("_foreach_powsum")
def foreach_powsum(tensors: Sequence[Operand], ord: Any = 2, dtype: Any = None) -> Columns | None:
    """Sums of powers: of what is cut, each rank has a part."""
    if not 0 < ord < math.inf:
        return None
    columns = [((t,), Factors([[f"d{i}" for i in range(t.ndim)]], [()])) for t in tensors]
    return Columns(columns, (tensors, ord), {"dtype": dtype})


@rule("_amp_foreach_non_finite_check_and_unscale")
def unscale(tensors: Sequence[Operand], found_inf: Operand, inv_scale: Operand) -> Algorithm:
    """Gradients times `inv_scale`, in place; `found_inf` hears on every rank if any has an infinity or NaN."""
    together = Together(tensors, "max")

    def part(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([v.isfinite().logical_not().any() for v in values]).float()

    def run(tensors: Any, found_inf: Any, inv_scale: Any) -> None:
        flags = together.run(tensors, lambda values: part(values).unbind(), part, dtype=torch.float32)
        found_inf.copy_(torch.maximum(found_inf, torch.stack(flags).amax()))
        torch._foreach_mul_(tensors, inv_scale.to(tensors[0].dtype).reshape(()))

    return Algorithm(run, writes=True)
