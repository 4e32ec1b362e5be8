"""What a rule answers: how a call may be split. A spec turns the layouts of the operands into an assignment."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from shardwise.layout import Layout, Partial, Placement, Shard
from shardwise.layout.placement import REPLICATE
from shardwise.move.cost import cost_of
from shardwise.strategy.empty_ranks import of_one_each

MOST_CUTS = 16  # where operands cut an axis in more ways than this, only the first ones are considered

Places = tuple[Placement, ...]
Names = Sequence[str | None]  # the factor of each dim, None where it must be whole


class Result(NamedTuple):
    """Shape, dtype and stride of one output, where a rule knows them without asking torch's meta kernels."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]

    def stride(self) -> tuple[int, ...]:
        return self.strides


class Operand:
    """A tensor argument as a rule sees it: its layout, no values."""

    def __init__(self, layout: Layout, index: int) -> None:
        self.layout, self.index, self.mesh = layout, index, layout.mesh
        self.shape, self.ndim, self.dtype = layout.shape, layout.ndim, layout.dtype

    def bytes_without(self, axis: int) -> float:
        """Local bytes if `axis` were replicated, sizes taken as even."""
        n: float = math.prod(self.shape, start=self.dtype.itemsize)
        for other, p in enumerate(self.layout.placements):
            if other != axis and isinstance(p, Shard):
                n /= self.mesh.shape[other]
        return n


def operands_in(values: Iterable[object]) -> Iterator[Operand]:
    """The operands among the arguments, lists looked into."""
    for value in values:
        if isinstance(value, Operand):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from operands_in(value)


class PerCoords:
    """A local call whose last argument is `value_at(coords)`, another one for each rank."""

    def __init__(self, func: Callable[..., Any], value_at: Callable[[tuple[int, ...]], Any]) -> None:
        self.func, self.value_at = func, value_at


LocalCall = Callable[..., Any] | PerCoords  # of the operands' local values, in order
MakeLocal = Callable[[list[Layout], list[Layout]], LocalCall]  # (layouts of the operands, of the results) -> the call


@dataclass
class Assignment:
    """One decision: what each operand must be, what each output will be, and how to call locally."""

    inputs: list[Places]
    outputs: list[Places]
    local: MakeLocal | None = None
    # whether a view op's result shares memory with its operand
    aliases: Callable[[list[Layout]], bool] = lambda inputs: True
    reasons: Sequence[str] = ()  # what each axis does, for messages
    # for a list op, which is many calls in one: for each operand, the axes that its own call is split on
    splits: Sequence[tuple[int, ...]] | None = None
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None  # what every rank calls instead of it


Described = torch.Tensor | Result  # a result as far as shapes tell: a meta tensor, or what a rule knows


class Spec(Protocol):
    """An answer that leads to one local call: `Factors`, `Relayout`, or a class of a family's own."""

    result: Result | None = None  # of a single output; without it torch's meta kernel is asked
    may_alias: bool = False  # the local call may return a view where torch makes a copy: then it is copied
    view: Callable[..., Any] | None = None  # called in place of the local call where torch makes a view, if it can be
    # what is kept for the gradient, where the local call and torch do not keep the same: "more" (the local call keeps
    # tensors where torch keeps none) or "operand" (torch keeps the first operand, so it is kept here too); "all": torch
    # may keep its operands and results, which its kernels for meta tensors do not say
    keeps: str = ""
    in_place_without_meta: bool = False  # an in-place call has no meta kernel, and needs none
    run_meta: Callable[[Callable[..., Any]], Any] | None = None  # the function on meta tensors, in the rule's own way

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Described], pinned: bool) -> Assignment | None:
        """What each operand must be and what each of the global results will be; None where the result is `pinned`, as
        it is written into the first operand, and that cannot stay as it is laid out."""


Program = Callable[..., Any]  # an op on distributed tensors, in the call's own arguments


@dataclass
class Algorithm:
    """The op as a program on DTensors: `run` takes the call's own arguments."""

    run: Program
    writes: bool = False  # into its first argument itself, where the op does; else its result is copied there
    knows_memory: bool = False  # its results have torch's strides, also where torch's meta kernel says others
    is_checked: bool = True  # torch's meta kernel is asked first whether the call is right
    is_view: bool = False  # torch's result is a view of the first argument, which no op of the program says
    keeps: str = ""  # as in `Spec`


@dataclass(frozen=True)
class Gathered:
    """No better way than to gather every operand and compute the op on all ranks; the ledger shows the reason."""

    reason: str
    check: Callable[..., None] | None = None  # sees the arguments of every call first


# what a rule may answer; None: it has no answer for this form of the call
Answer = Spec | Algorithm | Gathered | None


class Choice(NamedTuple):
    """One way to treat one axis."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    name: str
    makes_parts: bool = False  # of a result, which somebody will have to add up


@dataclass(frozen=True)
class Order:
    """How an elementwise op treats the order of numbers: greatest and least values may stay pending through it."""

    way: Callable[..., int]  # of the op's name and the call's own arguments: 1 keeps it, -1 turns it around, 0 neither
    one_to_one: bool = False  # different numbers stay different: then the gradient goes where it would have gone before
    in_each: bool = False  # it is so for every operand alone, not only for the first
    together: Partial | None = None  # of this kind, parts of all operands give parts of the result


@dataclass
class Factors(Spec):
    """Named factors, one per dim: a factor that is cut passes through every operand and output that has it.

    `inputs[i][d]` names the factor of dim d of operand i; None means the dim must be whole. A factor that no output
    has is reduced: its result is Partial(reduce[factor]). `linear` says which operands may stay Partial: "joint" (all
    of `joint` together), "each" (any one of them), "none"."""

    inputs: Sequence[Sequence[str | None]]
    outputs: Sequence[Sequence[str | None]]
    linear: str = "none"
    joint: frozenset[int] | None = None  # the operands that `linear` is about; None: all
    any_partial: bool = False  # parts of any reduction may stay, not only of sums: elements are only copied
    order: Order | None = None
    extremes: bool = False  # greatest and least values stay pending, as `order` allows
    reduce: dict[str, str] = field(default_factory=dict)
    # no result is a sum of parts: one without the cut factor is the same on all ranks, or empty if not asked for
    same: bool = False
    local: MakeLocal | None = None
    never_empty: bool = False  # the kernel refuses tensors without elements, or drops their graph
    aliases: Callable[[list[Layout]], bool] = lambda inputs: True  # as in Assignment
    may_alias: bool = False
    view: Callable[..., Any] | None = None
    keeps: str = ""
    result: Result | None = None
    addends: frozenset[int] = frozenset()  # operands added to the result: where it is a sum of parts, one part has them

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Described], pinned: bool) -> Assignment | None:
        if pinned and self.local is not None:
            return None  # what it makes is new
        if self.same:
            named = zip(self.outputs, [len(out.shape) for out in outputs], strict=True)
            self.outputs = [names if len(names) == n else (None,) * n for names, n in named]
        kinds = {operands[0].dtype} if pinned else {out.dtype for out in outputs}
        chosen: list[Choice] = []
        for axis in range(len(operands[0].layout.placements)):
            before = [[choice.inputs[i] for choice in chosen] for i in range(len(operands))]
            sizes = [whole_bytes(out) / cuts_of(o, chosen, operands[0].mesh.shape) for o, out in enumerate(outputs)]
            best = self.choose(operands, axis, before, pinned, kinds, sizes)
            if best is None:
                return None
            chosen.append(best)
        inputs = [tuple(choice.inputs[i] for choice in chosen) for i in range(len(operands))]
        results = [tuple(choice.outputs[o] for choice in chosen) for o in range(len(self.outputs))]
        around = partial(of_one_each, inputs=self.inputs, outputs=self.outputs) if self.never_empty else None
        return Assignment(inputs, results, self.local, self.aliases, [c.name for c in chosen], around=around)

    def choose(
        self,
        operands: Sequence[Operand],
        axis: int,
        before: list[list[Placement]],
        pinned: bool,
        kinds: set[torch.dtype],
        sizes: Sequence[float],
    ) -> Choice | None:
        """The cheapest choice for one axis; among equals one without a pending sum, and then the first. A choice that
        moves something and ends with a pending sum pays for adding it up, too: the program will. `sizes`: the local
        bytes of each result as far as axes are planned; none where the results are not known, as in list ops."""
        best, best_cost = None, (0.0, 0)
        layouts = [op.layout for op in operands]
        some = {op.layout: op for op in operands}  # one operand of each layout: of many, most are alike
        for choice in self.choices(operands, axis, before, kinds):
            if pinned and not choice.inputs[0] == choice.outputs[0] == layouts[0].placements[axis]:
                continue
            moves = Counter(zip(layouts, choice.inputs, strict=True)).items()
            cost = sum(n * move_cost(some[layout], axis, layout.placements[axis], to) for (layout, to), n in moves)
            if cost and choice.makes_parts and sizes:
                parts = [n for n, p in zip(sizes, choice.outputs, strict=True) if isinstance(p, Partial)]
                cost += sum(reduction_cost(operands[0], axis, n) for n in parts)
            ranked = (cost, int(any(isinstance(p, Partial) for p in choice.outputs)))
            if best is None or ranked < best_cost:
                best, best_cost = choice, ranked
        return best

    def choices(
        self, operands: Sequence[Operand], axis: int, before: list[list[Placement]], kinds: set[torch.dtype]
    ) -> list[Choice]:
        found: dict[object, Choice] = {}
        cuts = 0
        for i, op in enumerate(operands):
            placement = op.layout.placements[axis]
            if isinstance(placement, Shard):
                factor, cut = self.inputs[i][placement.dim], fitting(op.layout, axis, placement, before[i])
                if factor is not None and (factor, cut.pieces) not in found and cuts < MOST_CUTS:
                    found[factor, cut.pieces] = self.cut(factor, cut)
                    cuts += 1
            elif isinstance(placement, Partial):
                parts = self._pending_with(i, placement, operands, kinds)
                if parts and (placement, parts) not in found:
                    ins = tuple(placement if j in parts else REPLICATE for j in range(len(operands)))
                    outs = (placement,) * len(self.outputs)
                    found[placement, parts] = Choice(ins, outs, f"leave {placement} pending")
        everywhere = (REPLICATE,) * len(operands), (REPLICATE,) * len(self.outputs)
        return [*found.values(), Choice(*everywhere, "compute it all on each rank")]

    def _pending_with(
        self, i: int, placement: Partial, operands: Sequence[Operand], kinds: set[torch.dtype]
    ) -> frozenset[int]:
        """The operands that stay pending where operand `i` does; none if it may not. `kinds`: dtypes of the results."""
        among = frozenset(range(len(operands))) if self.joint is None else self.joint
        if self.extremes and i in among and placement.reduce_op in ("max", "min"):
            return among
        sums = self.any_partial or placement.reduce_op in ("sum", "avg")
        alone = self.linear == "each"
        if self.linear == "none" or not sums or i not in among or (alone and i in self.addends):
            return frozenset()  # a product is not a part of anything, so its addend must be whole too
        parts = (frozenset({i}) if alone else among) | self.addends
        others = {op.dtype for j, op in enumerate(operands) if j in parts and not op.dtype.to_real().is_floating_point}
        if placement.reduce_op == "avg" and others:  # integers have no average
            return frozenset()
        # A sum of integers wraps, and one of bools is "or": neither survives in another dtype.
        survive = self.any_partial or (torch.bool not in others and all(kinds == {d} for d in others))
        return parts if survive else frozenset()

    def cut(self, factor: str, shard: Shard) -> Choice:
        """The choice that cuts `factor` the way `shard` does."""
        part: Placement = REPLICATE if self.same else Partial(self.reduce.get(factor, "sum"))
        outs: tuple[Placement, ...] = tuple(shard.at(f.index(factor)) if factor in f else part for f in self.outputs)
        added = part if part in outs else REPLICATE
        at = {names: shard.at(names.index(factor)) for names in set(map(tuple, self.inputs)) if factor in names}
        others = (added if i in self.addends else REPLICATE for i in range(len(self.inputs)))
        ins = tuple(at.get(tuple(names), other) for names, other in zip(self.inputs, others))
        return Choice(ins, outs, f"cut factor {factor!r}", any(isinstance(p, Partial) for p in outs))


def fitting(layout: Layout, axis: int, shard: Shard, before: Sequence[Placement]) -> Shard:
    """The operand's cut; a chunk split instead, where the cut of an axis that it is nested in will change."""
    if shard.pieces is None:
        return shard
    there = [pair for pair in zip(layout.placements[:axis], before) if any(p.is_shard(shard.dim) for p in pair)]
    return shard if all(now == planned for now, planned in there) else Shard(shard.dim)


def reduction_cost(operand: Operand, axis: int, full: float) -> float:
    """Seconds to add up the parts of a tensor of so many bytes and to cut the sum, on one axis."""
    k = max(operand.mesh.shape[axis], 2)
    return cost_of(operand.mesh).along(axis, full * (k - 1) / k)


def whole_bytes(described: Described) -> int:
    return math.prod(described.shape, start=described.dtype.itemsize)


def cuts_of(output: int, chosen: Sequence[Choice], mesh_shape: Sequence[int]) -> int:
    """Into how many parts an output is cut by the axes that are planned."""
    cut = [isinstance(choice.outputs[output], Shard) for choice in chosen]
    return math.prod(k for k, is_cut in zip(mesh_shape, cut) if is_cut)


def move_cost(operand: Operand, axis: int, now: Placement, to: Placement) -> float:
    """Seconds to change one axis of one operand, sizes taken as even. An axis of one rank is priced as one of two, so
    that the same program gets the same layouts on any number of ranks."""
    if now == to or now.is_replicate():
        return 0.0
    k = max(operand.mesh.shape[axis], 2)
    full = operand.bytes_without(axis)
    if isinstance(now, Partial):
        share = (k - 1) / k if isinstance(to, Shard) else 2 * (k - 1) / k
    elif isinstance(to, Shard) and to.dim != now.dim:  # type: ignore[attr-defined]
        share = (k - 1) / (k * k)
    else:
        share = (k - 1) / k
    return cost_of(operand.mesh).along(axis, full * share)
