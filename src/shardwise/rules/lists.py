"""foreach and fused ops. Every position is planned like the plain op, one local call or exchange does them all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from shardwise.layout.placement import Partial
from shardwise.rules.pointwise import broadcast
from shardwise.strategy import Algorithm, Factors, Operand, factors, operands_in
from shardwise.strategy.positions import EachPosition, at_position, is_list
from shardwise.strategy.program import Tensor, leaves_empty, needs_grad, of_one_list, reduced
from shardwise.strategy.registry import named, rule
from shardwise.torch_private.tensors import foreach_max, foreach_mul_, foreach_norm, fused_optimizer_steps
from shardwise.wrapper import wrap, wrapper_of

_SAME_NAMES = {"alpha", "value", "weight", "memory_format", "non_blocking"}  # list ops have own names for the others


def addcdiv_each(xs: Any, ys: Any, zs: Any, *scalars: Any, **named: Any) -> list[Any]:
    """One by one: torch's list op has no gradient where there is nothing."""
    value, triples = [*scalars, *named.values(), 1][0], enumerate(zip(xs, ys, zs, strict=True))
    return of_one_list([torch.addcdiv(*three, value=at_position(value, i)) for i, three in triples])


def at_each_position(name: str, *args: object, **kwargs: object) -> EachPosition | Algorithm | None:
    """`_foreach_<name>`: what <name> does, at every position. A tensor outside of the lists is taken whole."""
    shared = any(isinstance(value, Operand) for value in (*args, *kwargs.values()))
    if shared and name.startswith("addc"):  # a number for each position, as a tensor
        return Algorithm(lambda xs, ys, zs, scalars: getattr(torch, f"_foreach_{name}")(xs, ys, zs, scalars.tolist()))
    if name == "addcdiv" and any(leaves_empty(op.layout) for op in operands_in(args)):
        return Algorithm(addcdiv_each)

    def plan(*here: Any, **options: Any) -> Any:
        others = [value for key, value in options.items() if key not in _SAME_NAMES]
        spec = named(name)(*here, *others, **{key: options[key] for key in _SAME_NAMES & options.keys()})
        return dataclasses.replace(spec, linear="none") if shared and isinstance(spec, Factors) else spec

    found = EachPosition(args, kwargs, plan)
    plain = all(isinstance(spec, Factors) and spec.local is None for _, spec in found.specs.values())
    return found if plain else None


for _name in (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 floor "
    "frac lerp lgamma log log10 log1p log2 maximum minimum mm mul neg pow reciprocal round rsqrt sigmoid sign sin sinh "
    "sqrt sub tan tanh trunc zero"
).split():
    rule(f"_foreach_{_name}", any_float=True)(partial(at_each_position, _name))


def fused(func: Any, *args: Any, **kwargs: Any) -> EachPosition | Algorithm | None:
    """A fused optimizer step: local where parameter, gradient and state are laid out alike. Gradients are made so."""
    lists = [a for a in args if is_list(a)]

    def with_gradients_alike(params: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        grads = [g.redistribute(placements=p.placements) for p, g in zip(params, grads, strict=True)]
        return func(params, grads, *args, **kwargs)

    if any(param.layout.placements != grad.layout.placements for param, grad in zip(*lists[:2], strict=True)):
        return Algorithm(with_gradients_alike, writes=True)
    columns = zip(*lists, strict=True)
    alike = all(op.layout.placements == param.layout.placements for param, *state in columns for op in state if op.ndim)
    pending = any(param.layout.is_partial for param in lists[0])
    return EachPosition(lists, {}, lambda *here: broadcast(here)) if alike and not pending else None


for _func in fused_optimizer_steps:
    rule(_func.__name__, any_float=True)(partial(fused, _func))


# -- one exchange for a list -------------------------------------------------------------------------------
def together(
    tensors: Sequence[Operand], op: Any, part: Any, reduce_op: str, after: Any = None, dtype: torch.dtype | None = None
) -> Any:
    """A program that gives one number per tensor of a list, of `dtype` or else of the tensors'. For tensors that are
    whole, `op` computes them. Tensors of one dtype that are cut along the same axes are reduced in one exchange: `part`
    makes a vector of what a rank holds, `reduce_op` reduces these, and `after` turns the sums into the numbers."""
    groups: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        axes = tuple(a for a, p in enumerate(t.layout.placements) if p.is_shard() and t.mesh.shape[a] > 1)
        groups.setdefault((axes, t.dtype), []).append(i)

    def run(tensors: Tensor) -> Tensor:
        tensors, found = [reduced(t) if t._layout.is_partial else t for t in tensors], [None] * len(tensors)
        for (axes, own), positions in groups.items():
            layout, values = tensors[positions[0]]._layout, [tensors[i]._local for i in positions]
            comm, kind = layout.mesh.comm, (dtype or own).to_real()
            if axes:
                parts = comm.bind(part, axes)(values)
                vector = layout.replicated(shape=(len(values),), dtype=comm.first(parts).dtype)
                whole = reduced(wrap(parts, vector.placed(dict.fromkeys(axes, Partial(reduce_op)))))
                finish = lambda sums, kind=kind: (after(sums) if after else sums).to(kind).unbind()  # noqa: E731
                numbers = comm.bind(finish)(whole._local)
            else:
                numbers = comm.bind(op)(values)
            one = wrapper_of(layout.replicated(shape=(), dtype=kind))
            for i, number in zip(positions, numbers, strict=True):
                found[i] = one(number)
        return tuple(found)

    return run


def _filled(values: Sequence[torch.Tensor], fill: Any) -> list[torch.Tensor]:
    """What a rank holds; in place of a tensor without elements, one of `fill`, which does not change the result."""
    return [v if v.numel() else v.new_full((1,), fill) for v in values]


def one_each(tensors: Sequence[Operand], alone: Any, op: Any, *more: Any, **options: Any) -> Algorithm:
    """The numbers of a list: where gradients are needed, of each tensor alone."""
    every, each = together(tensors, op, *more, **options), lambda ts: tuple(of_one_list(list(map(alone, ts))))
    return Algorithm(lambda ts, *args, **kwargs: each(ts) if needs_grad(*ts) else every(ts))


@rule("_foreach_norm")
def norms(tensors: Sequence[Operand], ord: Any = 2, dtype: torch.dtype | None = None) -> Algorithm:
    """Without gradients the p-th powers of the ranks' norms add up, in double precision so that nothing overflows."""
    power = ord if ord and math.isfinite(ord) else 1

    def part(values: Sequence[torch.Tensor]) -> torch.Tensor:
        half = dtype is None and values[0].dtype in (torch.float16, torch.bfloat16)
        values = _filled(values, 0 if ord >= 0 else math.inf)
        return torch.stack(foreach_norm(values, ord, torch.float32 if half else dtype)).double() ** power

    alone = lambda t: torch.linalg.vector_norm(t, ord, dtype=dtype)  # noqa: E731
    op = lambda values: foreach_norm(values, ord, dtype)  # noqa: E731
    reduce_op = "sum" if math.isfinite(ord) else "max" if ord > 0 else "min"
    return one_each(tensors, alone, op, part, reduce_op, lambda sums: sums ** (1 / power), dtype)


@rule("_foreach_max")
def maxima(tensors: Sequence[Operand]) -> Algorithm:
    def part(values: Sequence[torch.Tensor]) -> torch.Tensor:
        kind = values[0].dtype
        lowest = -math.inf if kind.is_floating_point else False if kind == torch.bool else torch.iinfo(kind).min
        return torch.stack(foreach_max(_filled(values, lowest)))

    return one_each(tensors, torch.max, lambda values: foreach_max(list(values)), part, "max")


@rule("_foreach_powsum")
def foreach_powsum(tensors: Sequence[Operand], ord: Any = 2, dtype: torch.dtype | None = None) -> EachPosition | None:
    """Sums of powers: of what is cut, each rank has a part."""
    if not 0 < ord < math.inf:
        return None
    return EachPosition((tensors, ord), {"dtype": dtype}, lambda t, *_, **options: factors("*d -> ", [t]))


@rule("_amp_foreach_non_finite_check_and_unscale")
def unscale(tensors: Sequence[Operand], found_inf: Operand, inv_scale: Operand) -> Algorithm:
    """Gradients times `inv_scale`, in place; `found_inf` is set on every rank if any has an infinity or NaN."""
    part = lambda values: torch.stack([v.isfinite().logical_not().any() for v in values]).float()  # noqa: E731
    flags = together(tensors, lambda values: part(values).unbind(), part, "max", dtype=torch.float32)

    def run(tensors: Tensor, found_inf: Tensor, inv_scale: Tensor) -> None:
        found_inf.copy_(torch.maximum(found_inf, torch.stack(flags(tensors)).amax()))
        foreach_mul_(tensors, inv_scale.to(tensors[0].dtype).reshape(()))

    return Algorithm(run, writes=True)
