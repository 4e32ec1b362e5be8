"""Calls on lists of tensors, which are many calls of one op: each position of the lists is planned by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.layout.placement import REPLICATE
from shardwise.strategy.memory import correct_thin, meta_like
from shardwise.strategy.order import is_endless
from shardwise.strategy.spec import Assignment, Operand, Places, Spec, operands_in


class EachPosition(Spec):
    """The plan of a call on lists: plan(*the arguments at a position) says how that position may be split. Positions
    whose arguments are alike are planned once. Tensors outside of the lists meet every position, whole."""

    in_place_without_meta = True  # fused steps have no meta kernels

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], plan: Callable[..., Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.members: list[tuple[Operand, ...]] = []
        self.kinds: list[Any] = []
        self.specs: dict[Any, tuple[int, Any]] = {}  # a position of each kind, and its plan
        for j in range(max(map(len, filter(is_list, (*args, *kwargs.values()))))):
            here = [at_position(a, j) for a in args]
            options = {name: at_position(value, j) for name, value in kwargs.items()}
            values = (*here, *options.values())
            kind = tuple(value.layout if isinstance(value, Operand) else _kind_of(value) for value in values)
            self.members.append(tuple(operands_in(values)))
            self.kinds.append(kind)
            if kind not in self.specs:
                self.specs[kind] = j, plan(*here, **options)

    def run_meta(self, func: Callable[..., Any]) -> Any:
        """The call on meta tensors: one position of each kind."""

        def meta(value: Any) -> Any:
            if isinstance(value, Operand):
                return torch.ones(value.shape, dtype=value.dtype)  # a number, and torch looks at it
            some = [value[j] for j, _ in self.specs.values()] if is_list(value) else []
            if not some or not isinstance(some[0], Operand):
                return some or value
            return [meta_like(op.layout) for op in some]

        args, kwargs = [meta(value) for value in self.args], {name: meta(value) for name, value in self.kwargs.items()}
        found = func(*args, **kwargs)
        correct_thin(func, self.members[0][0].layout.device.type, found, args, kwargs)
        of_kind = dict(zip(self.specs, found, strict=True))
        return type(found)([of_kind[kind] for kind in self.kinds])

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Any], pinned: bool) -> Assignment | None:
        found = {kind: spec.assign(self.members[j], [], pinned) for kind, (j, spec) in self.specs.items()}
        if None in found.values():
            return None
        everywhere: Places = (REPLICATE,) * len(operands[0].layout.placements)
        places = [everywhere] * len(operands)
        splits: list[tuple[int, ...]] = [()] * len(operands)
        split = {}
        for kind, assignment in found.items():
            axes = enumerate(zip(*assignment.inputs, assignment.outputs[0], strict=True))
            split[kind] = tuple(axis for axis, along in axes if not all(p.is_replicate() for p in along))
        for members, kind in zip(self.members, self.kinds, strict=True):
            for op, own in zip(members, found[kind].inputs, strict=True):
                places[op.index], splits[op.index] = own, split[kind]
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Operand):
                places[value.index], splits[value.index] = everywhere, ()
        return Assignment(places, [found[kind].outputs[0] for kind in self.kinds], splits=splits)


def _kind_of(value: object) -> tuple[object, ...]:
    """What rules see in an argument of one position that is no tensor: of numbers, whether it is infinite or zero."""
    return type(value), is_endless(value), isinstance(value, (int, float, complex)) and value == 0


def is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0


def at_position(value: Any, j: int) -> Any:
    return value[j] if is_list(value) else value
