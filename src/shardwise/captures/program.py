"""A captured program: statements in order, each a call on tensors that have numbers. It is data; `code.py` runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch

from shardwise.comm.record import Note
from shardwise.move.cost import cost_of
from shardwise.move.steps import MeshStep, Step
from shardwise.protocols import Item, Structure
from shardwise.torch_private.tensors import OpOverload, schema_of

GRADIENT_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)  # by which autograd adds gradients up


def items_in(*values: Item) -> list[Any]:
    """What stands in arguments of operators: lists, tuples and dicts are looked into."""
    found: list[Any] = []
    _collect(values, found)
    return found


def _collect(values: Iterable[Item], found: list[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is list or kind is tuple:
            _collect(value, found)
        elif kind is dict:
            _collect(value.values(), found)
        else:
            found.append(value)


def with_items(value: Item, kind: type, change: Callable[[Any], Any]) -> Item:
    """Arguments of operators with everything of this kind changed."""
    own = type(value)
    if own is list or own is tuple:
        return own([with_items(item, kind, change) for item in value])
    if own is dict:
        return {name: with_items(item, kind, change) for name, item in value.items()} if value else value
    return change(value) if isinstance(value, kind) else value


def with_tensors(value: Item, change: Callable[[torch.Tensor], Any]) -> Item:
    """Arguments of operators with every tensor changed."""
    own = type(value)
    if own is tuple or own is list:
        return own(
            [
                change(x) if isinstance(x, torch.Tensor) else with_tensors(x, change) if type(x) in _NESTED else x
                for x in value
            ]
        )
    return {name: with_items(item, torch.Tensor, change) for name, item in value.items()}


_NESTED = frozenset({list, tuple, dict})


@dataclass(frozen=True, slots=True, eq=False)
class Ref:
    """A tensor of the program, by its number. No two of one program have the same number, so they compare by identity:
    the passes look them up all the time."""

    number: int


@dataclass(eq=False)
class Statement:
    """One call. `outs` are the tensors it makes, in order; None for a result that is no tensor or is known already."""

    func: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outs: list[Ref | None] = field(default_factory=list)
    single: bool = True  # whether the call gives one tensor, and no sequence
    label: str = ""
    source: str = ""  # the user's line
    note: Note | None = None
    outside: bool = False  # whether it runs as a program of the user's does, with autograd and tensor classes on
    writes: tuple[Ref, ...] = ()  # tensors that it changes
    shares_memory: bool = True  # whether a result was in the memory of an argument
    kinds: tuple[Any, ...] = ()  # of a move: shape, stride, dtype and device of each result
    taken: tuple[Any, ...] = ()  # the same of what it takes
    lowered: Move | None = None  # the move whose last op this is, where it became ops and collectives
    draws: bool = False  # whether it took random numbers from torch's generator
    with_grad: bool = False  # whether grad mode was on: some kernels then give more than else (LSTM on a CPU)

    def refs(self) -> Iterator[Ref]:
        """The tensors that it takes."""
        return (item for item in items_in(*self.args, *self.kwargs.values()) if type(item) is Ref)

    @property
    def is_op(self) -> bool:
        """Whether it calls an operator of torch."""
        return isinstance(self.func, OpOverload)

    @property
    def is_pure(self) -> bool:
        """Whether it does nothing but make its results."""
        return self.is_op and not self.writes and not _is_random(self.func)

    @property
    def moves(self) -> Sequence[Move]:
        """The moves that it makes or begins: several where it is compiled."""
        if self.is_op:
            return () if self.lowered is None else (self.lowered,)
        return (self.func,) if isinstance(self.func, Move) else getattr(self.func, "moves", ())

    def replace_refs(self, new: dict[Ref, Ref]) -> None:
        """Take other tensors."""
        if not new:
            return
        swap: Callable[[Ref], Ref] = lambda ref: new.get(ref, ref)  # noqa: E731
        self.args, self.kwargs = with_items(self.args, Ref, swap), with_items(self.kwargs, Ref, swap)
        self.writes = tuple(map(swap, self.writes))


@lru_cache(maxsize=4096)
def _is_random(func: Callable[..., Any]) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags  # type: ignore[attr-defined]


class Move:
    """A move as the statement of a program: a function of the plain tensors of a local value."""

    def __init__(
        self,
        run: Callable[..., Any],
        comm: Item,
        steps: Sequence[Step],
        before: Structure,
        after: Structure,
        note: Note,
    ) -> None:
        self.run, self.comm, self.steps, self.note = run, comm, tuple(steps), note
        self.before, self.after, self.comm_after = before, after, steps[-1].comm_after(comm)

    def __call__(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        local = self.comm.assemble(self.before, values)
        return self.comm_after.values(self.run(self.comm, self.steps, local, self.note))

    @property
    def kind(self) -> str:
        """The collectives it is, joined."""
        return "+".join(step.kind for step in self.steps if step.kind != "local") or "local"

    @property
    def where(self) -> str:
        """The mesh axes along which it goes."""
        return "+".join(dict.fromkeys(step.where for step in self.steps if step.kind != "local"))

    @property
    def bytes(self) -> int:
        """Bytes that the ranks of this process receive."""
        return sum(step.bytes_received(self.comm) for step in self.steps if step.kind != "local")

    @property
    def seconds(self) -> float:
        """How long it takes a rank, by the cost model of its mesh."""
        total = 0.0
        for step in self.steps:
            if step.kind != "local" and isinstance(step, MeshStep):
                mesh, coords = step.layout.mesh, self.comm.coords_here()
                most = max(map(step.bytes_in, coords), default=0)
                total += cost_of(mesh).over(step.axes, mesh.shape, most)
        return total

    def is_like(self, other: object) -> bool:
        """Whether it does the same with the same tensors."""
        return (
            isinstance(other, Move)
            and other.comm is self.comm
            and other.before == self.before
            and len(other.steps) == len(self.steps)
            and all(map(_are_alike, self.steps, other.steps))
        )


def _are_alike(one: Step, other: Step) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or not is_dataclass(one) or not is_dataclass(other):
        return False
    names = [f.name for f in fields(one) if f.name != "kept"]  # which is what a step has worked out
    return all(getattr(one, name) == getattr(other, name) for name in names)


class Flattened:
    """An operator whose results are not only tensors: its tensors are taken out behind the call."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func

    def __call__(self, *args: object, **kwargs: object) -> list[torch.Tensor]:
        return [item for item in items_in(self.func(*args, **kwargs)) if isinstance(item, torch.Tensor)]


class SetGrad:
    """tensor.grad = another tensor, or None."""

    def __call__(self, leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
        leaf.grad = grad


class GetGrad:
    """The gradient that a tensor has."""

    def __call__(self, leaf: torch.Tensor) -> torch.Tensor | None:
        return leaf.grad


class OptimizerStep:
    """A step of an optimizer, which every run makes in Python."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self) -> None:
        self.optimizer.step()


@dataclass
class Program:
    """What one call of a function did.

    Attributes:
        inputs: The plain tensors of the arguments.
        state: Tensors that were there before the call and are no argument: parameters, buffers, constants.
        statements: What was done, in order.
        outputs: The plain tensors of the results.
        is_graph: Whether it is to run as a CUDA graph.
    """

    inputs: list[Ref]
    state: dict[Ref, torch.Tensor]
    statements: list[Statement]
    outputs: list[Ref]
    is_graph: bool = False

    @property
    def sets_gradients(self) -> bool:
        """Whether a backward pass that leaves gradients is part of it; `zero_grad` is none."""
        return any(
            isinstance(s.func, GetGrad) or (isinstance(s.func, SetGrad) and s.args[1] is not None)
            for s in self.statements
        )

    def moves(self) -> list[Move]:
        """What it communicates, in order."""
        return [m for s in self.statements if s.lowered is not None or not s.is_op for m in s.moves]


def written_places(func: Callable[..., Any]) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments that an operator changes, by its schema."""
    schema = schema_of(func)
    if schema is None or not schema.is_mutable:
        return ()
    places = enumerate(schema.arguments)
    return tuple((i, a.name) for i, a in places if a.alias_info is not None and a.alias_info.is_write)


def written_by(places: Iterable[tuple[int, str]], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Ref, ...]:
    """The tensors that a call of an operator changes, which has them in these places."""
    given = (args[i] if i < len(args) else kwargs.get(name) for i, name in places)
    return tuple(item for item in items_in(*given) if isinstance(item, Ref))
