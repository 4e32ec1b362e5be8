"""The states of data parallelism, and which state may follow which.

Three kinds of object have a state. Each changes its own with `State.to`, which raises on a change that is not listed.

Use of a unit (`unit.Unit`): what its module computes with.

    IDLE               the module shows its parameters, the DTensors that the optimizer sees
    FORWARD            inside of its forward: whole leaves stand in for the parameters
    BACKWARD           its gradients are being computed: the leaves stand in again, for forwards that are repeated
    BOTH               a forward repeated inside the backward pass (activation checkpoints), or a backward pass that the
                       forward itself asks for

    IDLE -> FORWARD -> IDLE -> BACKWARD -> IDLE;  FORWARD <-> BOTH <-> BACKWARD
    FORWARD -> FORWARD, BOTH -> BOTH: the module calls itself

Memory of a group of leaves (`leaves.LeafGroup`): where the values of its parameters are.

    PARTS              each rank has what it keeps; the leaves have no memory
    GATHERING          the other ranks' parts are on their way
    WHOLE              the leaves hold the parameters

    PARTS -> GATHERING -> WHOLE -> PARTS
    GATHERING -> PARTS: nobody needed it after all
    WHOLE -> GATHERING, GATHERING -> GATHERING: a parameter was written since, so it is gathered again

Gradients of a bucket (`gradients.GradBucket`) in one backward pass.

    COLLECTING         gradients of leaves are taken as they come
    REDUCING           all are taken, and their sum over the ranks is under way
    REDUCED            the parameters have their gradients; nothing more may come in this pass

    COLLECTING -> REDUCING -> REDUCED -> COLLECTING (the next pass)
    COLLECTING -> COLLECTING: the last pass reduced nothing (no_sync, or it failed)

Calls go down only: `DataParallel` (which torch's hooks call) -> `Unit` and `Reduction` -> `LeafGroup` and `GradBucket`
-> `rows`, `layouts` -> moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from shardwise.errors import AutogradError


class Use(Enum):
    IDLE = "idle"
    FORWARD = "in its forward"
    BACKWARD = "in its backward"
    BOTH = "in its forward and its backward"


class Memory(Enum):
    PARTS = "in parts"
    GATHERING = "being gathered"
    WHOLE = "whole"


class Gradients(Enum):
    COLLECTING = "collecting gradients"
    REDUCING = "being reduced"
    REDUCED = "reduced"


S = TypeVar("S", bound=Enum)
Allowed = Mapping[S, frozenset[S]]

USE: Allowed[Use] = {
    Use.IDLE: frozenset({Use.FORWARD, Use.BACKWARD}),
    Use.FORWARD: frozenset({Use.IDLE, Use.FORWARD, Use.BOTH}),
    Use.BACKWARD: frozenset({Use.IDLE, Use.BOTH}),
    Use.BOTH: frozenset({Use.FORWARD, Use.BACKWARD, Use.BOTH}),
}
MEMORY: Allowed[Memory] = {
    Memory.PARTS: frozenset({Memory.GATHERING}),
    Memory.GATHERING: frozenset({Memory.GATHERING, Memory.WHOLE, Memory.PARTS}),
    Memory.WHOLE: frozenset({Memory.GATHERING, Memory.PARTS}),
}
GRADIENTS: Allowed[Gradients] = {
    Gradients.COLLECTING: frozenset({Gradients.COLLECTING, Gradients.REDUCING}),
    Gradients.REDUCING: frozenset({Gradients.REDUCED}),
    Gradients.REDUCED: frozenset({Gradients.COLLECTING}),
}


class State(Generic[S]):
    """The present state of one object, and the only way to change it.

    >>> memory = State("leaves", Memory.PARTS, MEMORY)
    >>> memory.to(Memory.GATHERING)
    >>> memory.now.value
    'being gathered'
    """

    __slots__ = ("_allowed", "_name", "now")

    def __init__(self, name: str, start: S, allowed: Allowed[S]) -> None:
        self._name, self.now, self._allowed = name, start, allowed

    def to(self, following: S) -> None:
        """Change the state.

        Raises:
            AutogradError: the present state may not be followed by this one.
        """
        if following not in self._allowed[self.now]:
            may = ", ".join(repr(s.value) for s in self._allowed[self.now])
            raise AutogradError(
                f"data_parallel: {self._name} cannot become {following.value!r} while {self.now.value!r}; only {may} "
                f"may follow. Forward and backward passes of one module overlap in a way that is not supported"
            )
        self.now = following
