"""The twin of an optimizer: the same options, but its parameters and state are the local tensors behind the DTensors.

A step on the twin is plain torch's step, foreach and fused kernels included. The optimizer itself keeps DTensors; both
sides share their memory, so after the first step nothing is converted any more. Whatever a step changes on the twin
(attributes, options of a group, state of any key) is put on the optimizer when the step ends, and around a closure.
A slot is one distributed parameter with its local tensors, and the state that both sides keep for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from operator import is_
from typing import Any, cast

import torch

from shardwise.autograd.leaves import leaf_values
from shardwise.engine import aliasing
from shardwise.errors import LayoutError, RuleError
from shardwise.tensor import DTensor
from shardwise.wrapper import wrap

State = dict[Any, Any]  # an optimizer's state: for each parameter a dict, and what else an optimizer keeps there
NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})  # one for a whole parameter: plain tensors, as torch has them


class Slot:
    """One parameter: its local tensors (one for each distinct value of the ranks of this process) and their states."""

    def __init__(self, param: DTensor) -> None:
        self.local, self.layout = param._local, param._layout
        self.values: tuple[torch.Tensor, ...] = leaf_values(param)
        self.seen: dict[str, tuple[Any, tuple[Any, ...]]] = {}  # by key: both sides of the state after the last step
        self._unchanged: tuple[list[Any], list[Any]] | None = None  # what both sides held after a step: the short cut

    def is_of(self, param: torch.Tensor) -> bool:
        """Whether the parameter still has the memory and layout it had when this was made."""
        own = param.__dict__
        return own["_local"] is self.local and own["_layout"] is self.layout

    def enter(self, outer: dict[str, Any] | None, state: State) -> None:
        """Bring the states of the local tensors to what the optimizer holds for the parameter."""
        if self._unchanged is not None and outer and _are(outer.values(), self._unchanged[0]):
            return
        seen, self._unchanged = self.seen, None
        if outer is not None:
            for local in self.values:
                state.setdefault(local, {})
        for key, value in outer.items() if outer else ():
            known = seen.get(key)
            if known is None or known[0] is not value:
                if isinstance(value, DTensor) and value._layout.placements != self.layout.placements:
                    value = outer[key] = value.redistribute(placements=self.layout.placements)  # type: ignore[index]
                parts = self._inward(value)
                for local, part in zip(self.values, parts, strict=True):
                    state[local][key] = part
                seen[key] = (value, parts)
            elif len(known[1]) > 1 and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                for part in known[1][1:]:  # a number someone may have loaded in place
                    part.copy_(value)
        if len(seen) > len(outer or ()):
            for key in [key for key in seen if not outer or key not in outer]:
                del seen[key]
                for local in self.values:
                    state.get(local, {}).pop(key, None)

    def leave(self, outer: dict[str, Any], state: State) -> None:
        """Put what the step made, replaced or removed on the optimizer's side."""
        seen, values = self.seen, self.values
        inner = state[values[0]]
        if self._unchanged is not None and _are(inner.values(), self._unchanged[1]):
            return
        for key, value in inner.items():
            known = seen.get(key)
            if known is None or known[1][0] is not value:
                parts = tuple(state[local][key] for local in values)
                outer[key] = made = self._outward(key, parts)
                seen[key] = (made, parts)
        for key in seen.keys() - inner.keys():
            del seen[key]
            outer.pop(key, None)
        if len(values) == 1:
            self._unchanged = [*outer.values()], [*inner.values()]

    def _inward(self, value: object) -> tuple[Any, ...]:
        """A state, for each local tensor."""
        if isinstance(value, DTensor):
            comm = self.layout.mesh.comm
            return comm.pick(comm.structure(self.local), value._local)
        if isinstance(value, torch.Tensor):  # a number: every local tensor counts for itself
            return (value, *(value.clone() for _ in self.values[1:]))
        return (value,) * len(self.values)

    def _outward(self, key: str, parts: tuple[Any, ...]) -> Any:
        """A state as the optimizer shows it, from those of the local tensors."""
        first = parts[0]
        if not isinstance(first, torch.Tensor) or key in NUMBERS or (first.dim() == 0 and self.layout.ndim > 0):
            return first
        for local, part in zip(self.values, parts, strict=True):
            if part.shape != local.shape:
                raise LayoutError(
                    f"optimizer state {key!r} has shape {tuple(part.shape)} where this rank holds {tuple(local.shape)} "
                    f"of a parameter of shape {self.layout.shape}: the optimizer is not elementwise, so it must not be "
                    f"stepped on local tensors; use it without shardwise.optim.local(..., elementwise=True)"
                )
        comm = self.layout.mesh.comm
        return wrap(comm.assemble(comm.structure(self.local), parts), self.layout.replace(dtype=first.dtype))


def _are(values: Collection[Any], known: Collection[Any]) -> bool:
    """Whether these are the same objects in the same order."""
    return len(values) == len(known) and all(map(is_, values, known))


Group = dict[str, Any]  # an optimizer's param_group: "params", and options of any type

_OWN = ("state", "param_groups")  # the twin has its own; everything else an optimizer has is mirrored
_OF_TORCH = frozenset({*_OWN, "defaults"})
_NOTHING = object()

# torch's optimizers that treat every element of a parameter by itself. (A subclass may do anything.)
ELEMENTWISE: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
)


class Mirror:
    """A copy of a dict of an optimizer (its attributes, the options of a group) in which DTensors (a learning rate, a
    gradient scale) are plain tensors.

    `enter` brings the copy to what the dict holds now, `leave` puts what was changed on the copy into the dict. What
    somebody else changed in the dict in between stays, unless the copy was changed at the same key.
    """

    def __init__(self, skip: tuple[str, ...]) -> None:
        self.inner: dict[str, Any] = {}
        self._skip = skip  # keys under which the copy holds something of its own
        self._entered: dict[str, Any] = {}
        self._tensors: list[tuple[str, DTensor, int]] = []  # DTensors, and the version of their plain tensors

    def enter(self, outer: dict[str, Any], **own: object) -> dict[str, Any]:
        """The copy, the same object at every call, with `own` in place of the skipped keys."""
        inner = self.inner
        inner.clear()
        inner.update(outer)
        self._tensors = []
        for key, value in outer.items():
            if isinstance(value, DTensor):
                inner[key] = whole = value.full_tensor().detach()
                self._tensors.append((key, value, whole._version))
        inner.update(own)
        self._entered = inner.copy()
        return inner

    def leave(self, outer: dict[str, Any]) -> None:
        """Put what was changed on the copy since `enter` into the dict."""
        inner, entered = self.inner, self._entered
        if not _are(inner.values(), entered.values()) or inner.keys() != entered.keys():
            for key, value in inner.items():
                if value is not entered.get(key, _NOTHING) and key not in self._skip:
                    outer[key] = value
            for key in entered.keys() - inner.keys():
                outer.pop(key, None)
        for key, tensor, version in self._tensors:  # written in place
            whole = inner.get(key)
            if whole is entered[key] and whole._version != version:
                with torch.no_grad():
                    tensor.copy_(whole)
        self._entered, self._tensors = {}, []


class _Params:
    """The parameters of one group as the last step saw them, and the local tensors in their place."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params = params
        self.slots = [Slot(p) if isinstance(p, DTensor) else None for p in params]
        self.local_params: list[torch.Tensor] = []
        for param, slot in zip(params, self.slots, strict=True):
            self.local_params += (param,) if slot is None else slot.values
        self.options = Mirror(skip=("params",))

    def are(self, params: list[torch.Tensor]) -> bool:
        """Whether these are the same tensors, with the same memory."""
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return False
        return all(slot is None or slot.is_of(param) for param, slot in zip(params, self.slots, strict=True))


class Twin:
    """Keeps the local side of one optimizer between steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.stand_in: torch.optim.Optimizer = object.__new__(type(optimizer))
        self.state: State = defaultdict(dict)
        self.groups: list[_Params] = []
        self.attributes = Mirror(skip=_OWN)
        self.stand_in.__dict__ = self.attributes.inner
        self.entered = False
        self._others: dict[Hashable, Any] = {}  # state whose keys are no parameters, as both sides last had it

    def enter(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The stand-in, holding what the optimizer holds now."""
        if not self._knows(optimizer.param_groups):
            self._learn(optimizer)
        state, count, groups = optimizer.state, 0, []
        for group, known in zip(optimizer.param_groups, self.groups, strict=True):
            for param, slot in zip(known.params, known.slots, strict=True):
                outer = state.get(param)
                count += outer is not None
                if slot is not None:
                    slot.enter(outer, self.state)
                elif outer is not None:
                    self.state[param] = outer
                else:
                    self.state.pop(param, None)
            groups.append(known.options.enter(group, params=known.local_params))
        if self._others or len(state) > count:
            params = {id(p) for known in self.groups for p in known.params}
            self._copy_others(state, self.state, params)
        self.attributes.enter(optimizer.__dict__, state=self.state, param_groups=groups)
        self.entered = True
        return self.stand_in

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Put what the step made, replaced or removed on the optimizer."""
        if not self.entered:
            return
        self.entered = False
        if self.attributes.inner["state"] is not self.state:
            self.state = defaultdict(dict, self.attributes.inner["state"])
        state, count = optimizer.state, 0
        for known in self.groups:
            for param, slot in zip(known.params, known.slots, strict=True):
                first = param if slot is None else slot.values[0]
                if first in self.state:
                    count += 1 if slot is None else len(slot.values)
                    if slot is None:
                        state[param] = self.state[param]
                    else:
                        slot.leave(state[param], self.state)
                else:
                    state.pop(param, None)  # the step removed it
        if aliasing.COPIES:
            slots = ((p, s) for known in self.groups for p, s in zip(known.params, known.slots, strict=True))
            aliasing.after_write(*(cast(DTensor, param) for param, slot in slots if slot is not None))
        if self._others or len(self.state) > count:
            self._copy_others(self.state, state, {id(v) for known in self.groups for v in known.local_params})
        for group, known in zip(optimizer.param_groups, self.groups, strict=True):
            known.options.leave(group)
        self.attributes.leave(optimizer.__dict__)
        self.attributes.inner.clear()  # it may refer to the optimizer, which must be free to die

    def around(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of a step: while it runs, the optimizer holds what the step has done, and the step goes on with
        what the closure does to the optimizer."""

        def call() -> Any:
            self.leave(optimizer)
            loss = closure()
            self.enter(optimizer)
            return loss

        return call

    def _copy_others(self, source: State, target: State, params: Collection[int]) -> None:
        """The state under keys that are no parameters, from one side to the other."""
        others = {key: value for key, value in source.items() if id(key) not in params}
        for key in self._others.keys() - others.keys():
            target.pop(key, None)
        target.update(others)
        self._others = others

    def _knows(self, groups: list[Group]) -> bool:
        """Whether the parameters are the same tensors as at the last step, with the same memory."""
        same = len(groups) == len(self.groups)
        return same and all(known.are(group["params"]) for group, known in zip(groups, self.groups, strict=True))

    def _learn(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [_Params(list(group["params"])) for group in optimizer.param_groups]
        if type(optimizer) not in ELEMENTWISE:
            _refuse_tensors_by_parameter(optimizer, _local_ids(self.groups) - _local_ids(groups))
        self.state.clear()
        self._others = {}
        self.groups = groups


def _local_ids(groups: list[_Params]) -> set[int]:
    return {id(v) for known in groups for slot in known.slots if slot is not None for v in slot.values}


def _refuse_tensors_by_parameter(optimizer: torch.optim.Optimizer, old: Collection[int]) -> None:
    """Raise where a container among the attributes holds DTensors, or local tensors that are no longer a parameter's:
    only what is in `state` can be followed from a parameter to its local tensors."""
    for name, value in vars(optimizer).items():
        if name in _OF_TORCH or not isinstance(value, (Mapping, list, tuple, set, frozenset)):
            continue
        if any(isinstance(x, DTensor) or id(x) in old for x in _items(value, set())):
            raise RuleError(
                f"{type(optimizer).__name__}.{name} holds tensors for each parameter; stepped on local tensors, an "
                f"optimizer finds them only in self.state[param]: keep them there, or step it without "
                f"shardwise.optim.local(..., elementwise=True)"
            )


def _items(container: Any, seen: set[int]) -> Any:
    """Everything inside of a container and the containers in it, keys of mappings included."""
    if id(container) in seen:
        return
    seen.add(id(container))
    for item in [*container, *container.values()] if isinstance(container, Mapping) else container:
        yield item
        if isinstance(item, (Mapping, list, tuple, set, frozenset)):
            yield from _items(item, seen)
