"""What a rule answers: how a call may be split. A spec turns the layouts of the operands into an assignment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from shardwise.layout import Layout, Partial, Placement, Shard
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import Mesh
from shardwise.move.cost import cost_of

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

    __slots__ = ("layout", "index")

    def __init__(self, layout: Layout, index: int) -> None:
        self.layout, self.index = layout, index

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def ndim(self) -> int:
        return len(self.layout.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    def bytes_without(self, axis: int) -> float:
        """Local bytes if `axis` were replicated, sizes taken as even."""
        n = self.layout.dtype.itemsize
        for size in self.layout.shape:
            n *= size
        for other, p in enumerate(self.layout.placements):
            if other != axis and isinstance(p, Shard):
                n /= self.layout.mesh.shape[other]
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


class Described(Protocol):
    """A result as far as shapes tell: a meta tensor, or a `Result`."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def stride(self) -> tuple[int, ...]: ...


class Spec(Protocol):
    """An answer that leads to one local call: `Factors`, `Relayout`, or a class of a family's own."""

    result: Result | None = None  # of a single output; without it torch's meta kernel is asked
    may_alias: bool = False  # the local call may return a view where torch makes a copy: then it is copied
    in_place_without_meta: bool = False  # an in-place call has no meta kernel, and needs none
    run_meta: Callable[[Callable[..., Any]], Any] | None = None  # the function on meta tensors, in the rule's own way

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Described], pinned: bool) -> Assignment | None:
        """What each operand must be and what each result will be.

        Args:
            operands: The tensors of the call.
            outputs: The global results.
            pinned: Whether the result is written into the first operand, whose layout must stay.

        Returns:
            The assignment; None where the first operand cannot be written as it is laid out.
        """


Program = Callable[..., Any]  # an op on distributed tensors, in the call's own arguments


@dataclass
class Algorithm:
    """The op as a program on DTensors: `run` takes the call's own arguments.

    `writes` says that it writes into its first argument itself, where the op does; else its result is copied there."""

    run: Program
    writes: bool = False


@dataclass(frozen=True)
class Gathered:
    """No better way than to gather every operand and compute the op on all ranks; the ledger shows the reason.

    `check`, if given, sees the arguments of every call first."""

    reason: str
    check: Callable[..., None] | None = None


# what a rule may answer; None: it has no answer for this form of the call
Answer = Spec | Algorithm | Gathered | None


@dataclass(frozen=True)
class Choice:
    """One way to treat one axis."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    name: str


@dataclass
class Factors(Spec):
    """Named factors, one per dim: a factor that is cut passes through every operand and output that has it.

    `inputs[i][d]` names the factor of dim d of operand i; None means the dim must be whole. A factor that no output
    has is reduced: its result is Partial(reduce[factor]). `linear` says which operands may stay Partial: "joint" (all
    of `joint` together), "each" (any one of them), "none".
    """

    inputs: Sequence[Sequence[str | None]]
    outputs: Sequence[Sequence[str | None]]
    linear: str = "none"
    joint: frozenset[int] | None = None  # the operands that `linear` is about; None: all
    any_partial: bool = False  # parts of any reduction may stay, not only of sums: elements are only copied
    reduce: dict[str, str] = field(default_factory=dict)
    # no result is a sum of parts: one without the cut factor is the same on all ranks, or empty if not asked for
    same: bool = False
    local: MakeLocal | None = None
    aliases: Callable[[list[Layout]], bool] = lambda inputs: True  # as in Assignment
    may_alias: bool = False
    result: Result | None = None
    addends: frozenset[int] = frozenset()  # operands added to the result: where it is a sum of parts, one part has them

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Described], pinned: bool) -> Assignment | None:
        if pinned and self.local is not None:
            return None  # what it makes is new
        if self.same:
            sizes = [len(out.shape) for out in outputs]
            self.outputs = [
                names if len(names) == n else (None,) * n for names, n in zip(self.outputs, sizes, strict=True)
            ]
        ins: list[list[Placement]] = [[] for _ in operands]
        outs: list[list[Placement]] = [[] for _ in self.outputs]
        reasons = []
        for axis in range(len(operands[0].layout.placements)):
            best = self.choose(operands, axis, ins, pinned)
            if best is None:
                return None
            reasons.append(best.name)
            for i, placement in enumerate(best.inputs):
                ins[i].append(placement)
            for o, placement in enumerate(best.outputs):
                outs[o].append(placement)
        return Assignment([tuple(p) for p in ins], [tuple(p) for p in outs], self.local, self.aliases, reasons)

    def choose(
        self, operands: Sequence[Operand], axis: int, before: list[list[Placement]], pinned: bool = False
    ) -> Choice | None:
        """The cheapest choice for one axis; among equals one without a pending sum, and then the first."""
        best, best_cost = None, (0.0, 0)
        layouts = [op.layout for op in operands]
        some = {op.layout: op for op in operands}  # one operand of each layout: of many, most are alike
        for choice in self.choices(operands, axis, before):
            if pinned and not choice.inputs[0] == choice.outputs[0] == layouts[0].placements[axis]:
                continue
            moves = Counter(zip(layouts, choice.inputs, strict=True))
            cost = sum(
                times * move_cost(some[layout], axis, layout.placements[axis], to)
                for (layout, to), times in moves.items()
            )
            ranked = (cost, int(any(isinstance(p, Partial) for p in choice.outputs)))
            if best is None or ranked < best_cost:
                best, best_cost = choice, ranked
        return best

    def choices(self, operands: Sequence[Operand], axis: int, before: list[list[Placement]]) -> list[Choice]:
        present = [op.layout.placements[axis] for op in operands]
        found: list[Choice] = []
        seen: set[object] = set()
        cuts = 0
        for i, placement in enumerate(present):
            if isinstance(placement, Shard):
                factor = self.inputs[i][placement.dim]
                if factor is None:
                    continue
                cut = fitting(operands[i].layout, axis, placement, before[i])
                if (factor, cut.pieces) not in seen and cuts < MOST_CUTS:
                    seen.add((factor, cut.pieces))
                    found.append(self.cut(factor, cut))
                    cuts += 1
            elif (
                isinstance(placement, Partial)
                and self.linear != "none"
                and (self.any_partial or placement.reduce_op in ("sum", "avg"))
            ):
                if self.joint is not None and i not in self.joint:
                    continue
                stays = (self.joint or frozenset(range(len(present)))) if self.linear == "joint" else frozenset({i})
                if (placement, stays) not in seen:
                    seen.add((placement, stays))
                    if i in self.addends and self.linear == "each":
                        continue  # the product is not a part of anything, so the addend must be whole too
                    parts = stays | self.addends
                    floats = all(_is_float(op.dtype) for j, op in enumerate(operands) if j in parts)
                    if placement.reduce_op == "avg" and not floats:
                        continue  # integers have no average
                    ins = tuple(placement if j in parts else REPLICATE for j in range(len(present)))
                    found.append(Choice(ins, (placement,) * len(self.outputs), f"leave {placement} pending"))
        everywhere = (REPLICATE,) * len(present), (REPLICATE,) * len(self.outputs)
        found.append(Choice(*everywhere, "compute it all on each rank"))
        return found

    def cut(self, factor: str, shard: Shard) -> Choice:
        """The choice that cuts `factor` the way `shard` does."""
        part: Placement = REPLICATE if self.same else Partial(self.reduce.get(factor, "sum"))
        outs: tuple[Placement, ...] = tuple(shard.at(f.index(factor)) if factor in f else part for f in self.outputs)
        added = part if part in outs else REPLICATE
        at = {names: shard.at(names.index(factor)) for names in set(map(tuple, self.inputs)) if factor in names}
        ins = tuple(
            at.get(tuple(names)) or (added if i in self.addends else REPLICATE) for i, names in enumerate(self.inputs)
        )
        return Choice(ins, outs, f"cut factor {factor!r}")


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def fitting(layout: Layout, axis: int, shard: Shard, before: Sequence[Placement]) -> Shard:
    """The operand's cut; a chunk split instead, where the cut of an axis that it is nested in will change."""
    if shard.pieces is None:
        return shard
    kept = all(
        before[a] == p
        for a, p in enumerate(layout.placements[:axis])
        if p.is_shard(shard.dim) or before[a].is_shard(shard.dim)
    )
    return shard if kept else Shard(shard.dim)


def move_cost(operand: Operand, axis: int, now: Placement, to: Placement) -> float:
    """Seconds to change one axis of one operand, sizes taken as even. An axis of one rank is priced as one of two, so
    that the same program gets the same layouts on any number of ranks."""
    if now == to or now.is_replicate():
        return 0.0
    k = max(operand.layout.mesh.shape[axis], 2)
    full = operand.bytes_without(axis)
    if isinstance(now, Partial):
        share = (k - 1) / k if isinstance(to, Shard) else 2 * (k - 1) / k
    elif isinstance(to, Shard) and to.dim != now.dim:  # type: ignore[attr-defined]
        share = (k - 1) / (k * k)
    else:
        share = (k - 1) / k
    return cost_of(operand.layout.mesh).along(axis, full * share)
