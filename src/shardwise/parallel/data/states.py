"""The states of data parallelism, and which state may follow which.

Three kinds of object have a state; each changes its own with `State.to`. Calls go down only: `DataParallel` (which
torch's hooks call) -> `Unit` and `Reduction` -> `LeafGroup` and `GradBucket` -> `Rows`, layouts -> moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from shardwise.errors import AutogradError


class Stage(Enum):
    """A state. There is one object for each, so that it need not be compared by its name."""

    __hash__ = object.__hash__


class Use(Stage):
    """What the module of a `Unit` computes with."""

    IDLE = "idle"  # its parameters, the DTensors that the optimizer sees
    FORWARD = "in its forward"  # whole leaves that stand in for the parameters
    BACKWARD = "in its backward"  # the leaves again, for forwards that are repeated
    BOTH = "in its forward and its backward"  # a repeated forward, or a backward pass that the forward asks for


class Memory(Stage):
    """Where the values of the parameters of a `LeafGroup` are."""

    PARTS = "in parts"  # each rank has what it keeps; the leaves have no memory
    GATHERING = "being gathered"  # the other ranks' parts are on their way
    WHOLE = "whole"  # the leaves hold the parameters


class Gradients(Stage):
    """How far a `GradBucket` is in one backward pass."""

    COLLECTING = "collecting gradients"  # those of leaves are taken as they come
    REDUCING = "being reduced"  # all are taken, and their sum over the ranks is under way
    REDUCED = "reduced"  # the parameters have their gradients; nothing more may come in this pass


S = TypeVar("S", bound=Stage)
Allowed = Mapping[S, frozenset[S]]

USE: Allowed[Use] = {
    Use.IDLE: frozenset({Use.FORWARD, Use.BACKWARD}),
    Use.FORWARD: frozenset({Use.IDLE, Use.FORWARD, Use.BOTH}),  # itself: the module calls itself
    Use.BACKWARD: frozenset({Use.IDLE, Use.BOTH}),
    Use.BOTH: frozenset({Use.FORWARD, Use.BACKWARD, Use.BOTH}),
}
MEMORY: Allowed[Memory] = {
    Memory.PARTS: frozenset({Memory.GATHERING}),
    Memory.GATHERING: frozenset({Memory.GATHERING, Memory.WHOLE, Memory.PARTS}),  # PARTS: nobody needed it after all
    Memory.WHOLE: frozenset({Memory.GATHERING, Memory.PARTS}),  # GATHERING: a parameter was written since
}
GRADIENTS: Allowed[Gradients] = {
    Gradients.COLLECTING: frozenset({Gradients.COLLECTING, Gradients.REDUCING}),  # itself: no_sync, or it failed
    Gradients.REDUCING: frozenset({Gradients.REDUCED}),
    Gradients.REDUCED: frozenset({Gradients.COLLECTING}),
}


class State(Generic[S]):
    """The present state of one object, and the only way to change it."""

    __slots__ = ("_allowed", "_name", "now")

    def __init__(self, name: str, start: S, allowed: Allowed[S]) -> None:
        self._name, self.now, self._allowed = name, start, allowed

    def to(self, following: S) -> None:
        if following not in self._allowed[self.now]:
            may = ", ".join(repr(s.value) for s in self._allowed[self.now])
            raise AutogradError(
                f"data_parallel: {self._name} cannot become {following.value!r} while {self.now.value!r}; only {may} "
                f"may follow. Forward and backward passes of one module overlap in a way that is not supported"
            )
        self.now = following
