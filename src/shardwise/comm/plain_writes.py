"""Simulated ranks that write into the same memory: a plain tensor of which, on processes, each rank would have its own.

Every rank's call starts from the old content. If all ranks write the same, that is the new content. If not, no single
tensor could hold it: the call raises and leaves the memory as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from shardwise.errors import LayoutError
from shardwise.functions import may_write, writes_first, written
from shardwise.torch_private.tensors import storage_id, storage_users

Run = Callable[[], Any]
Done = dict[Hashable, Any]  # results of calls, by the key of the call
Targets = Sequence[tuple[str, torch.Tensor]]  # what a call writes into, each with a name for messages
_SETS_MEMORY = {"__set__", "set_"}  # writes that cannot be undone


class DifferentWritesError(LayoutError):
    """Simulated ranks write different values into one plain tensor."""


def place(value: torch.Tensor) -> Hashable:
    """A key that is equal for tensors that are the same elements in memory; a new one for every empty tensor."""
    if not value.numel():
        return id(value)
    return storage_id(value), value.storage_offset(), value.dtype, value.shape, value.stride(), value.is_conj()


def name_of(func: object) -> str:
    """The name of a function in a message."""
    name = getattr(func, "__name__", str(func))
    if name.startswith("__i") and name.endswith("__"):
        return f"in-place {name[3:-2]}"
    return {"__setitem__": "x[...] = value", "__set__": "an attribute of a tensor"}.get(name, name)


def run_writes(func: object, calls: Mapping[Hashable, tuple[Run, Targets]], needs_grad: bool) -> Done:
    """The result of each call. Calls that write into the same memory must write the same."""
    by_memory: dict[tuple[Hashable, ...], list[Hashable]] = {}
    for key, (_, targets) in calls.items():
        by_memory.setdefault(tuple(place(t) for _, t in targets), []).append(key)
    seen: set[Hashable] = set()
    for places in by_memory:
        if not seen.isdisjoint(places):  # two calls write to tensors that overlap in part
            refuse(func, calls[by_memory[places][0]][1])
        seen.update(places)
    for keys in by_memory.values():
        if len(keys) > 1 and (needs_grad or getattr(func, "__name__", "") in _SETS_MEMORY):
            refuse(func, calls[keys[0]][1], needs_grad)
    done: Done = {}
    for keys in by_memory.values():
        if len(keys) == 1:
            done[keys[0]] = calls[keys[0]][0]()
            continue
        memory = _Memory(t for _, t in calls[keys[0]][1])
        try:
            for key in keys:
                memory.as_before()
                done[key] = calls[key][0]()
                if not memory.is_as_after():
                    refuse(func, calls[key][1])
        except BaseException:
            memory.as_before()
            raise
    return done


class _Memory:
    """Some tensors, their values before the first call, and after each call, which must all be equal."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self.before = [t.detach().clone() for t in self.tensors]
        self.after: list[torch.Tensor] | None = None

    def as_before(self) -> None:
        for tensor, value in zip(self.tensors, self.before, strict=True):
            if tensor.shape != value.shape:  # an `out` was resized
                tensor.data = value.clone()
            # through `.data`, so that autograd does not count a write: it may have saved the tensor
            tensor.data.copy_(value)

    def is_as_after(self) -> bool:
        """Whether they hold the same as after the previous call."""
        if self.after is None:
            self.after = [t.detach().clone() for t in self.tensors]
        return all(map(_is_same, self.tensors, self.after))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch.no_grad():
        return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def refuse(func: object, targets: Targets, needs_grad: bool = False) -> NoReturn:
    what, tensor = targets[0]
    why = "its gradient could only go to one of them" if needs_grad else "they write different values"
    raise DifferentWritesError(
        f"{name_of(func)}: the simulated ranks all write into {what}, one tensor of shape {tuple(tensor.shape)}, "
        f"and {why}. On processes each rank has a tensor of its own: give them one each (value.new_zeros(shape) of "
        f"what they write, or a RankTensor), or write what they have in common (value.full_tensor(), value.detach())"
    )


def run_unknown(func: object, runs: Mapping[Hashable, Run], plain: Sequence[torch.Tensor]) -> Done:
    """The result of each call of a function whose writes are unknown: it must not write into `plain`."""
    versions = [t._version for t in plain]
    done: Done = {}
    for key, run in runs.items():
        done[key] = run()
        for tensor, version in zip(plain, versions, strict=True):
            if tensor._version != version:
                refuse(func, [("a plain argument", tensor)])
    return done


# -- functions of the program, which may write into tensors that they were not given -------------------------------
class Watch(TorchFunctionMode):
    """Observes the writes of a function, which is run rank by rank, into tensors that are not the rank's own. A rank's
    own tensors are its arguments and those that the function made."""

    def __init__(self, func: object) -> None:
        super().__init__()
        self.func = func
        self.own: set[int] = set()
        self.outside: dict[int, _Outside] = {}  # what was written, by storage
        self.turns = 0

    def run(self, call: Run, given: Iterable[torch.Tensor]) -> Any:
        """The result of one rank's call. Its writes into other tensors are noted and undone."""
        self.own = {storage_id(t) for t in given}
        try:
            with self:
                result = call()
        except BaseException:
            self._restore()
            raise
        self.turns += 1
        # tensors that are freed by now were made by the function, in a way that no mode sees
        self.outside = {key: one for key, one in self.outside.items() if storage_users(one.memory) > 1}
        for one in self.outside.values():
            one.after.append(one.memory.clone())
        self._restore()
        return result

    def settle(self) -> None:
        """Write what all ranks wrote, once. Raise if they wrote different values."""
        for one in self.outside.values():
            if len(one.after) < self.turns or not all(torch.equal(one.after[0], value) for value in one.after):
                refuse(self.func, [("a tensor from outside of the function", one.example)])
        for one in self.outside.values():
            one.memory.copy_(one.after[0])

    def _restore(self) -> None:
        for one in self.outside.values():
            one.memory.copy_(one.before)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tree_flatten((args, kwargs))[0] if _has_memory(t)]
        for what, tensor in written(func, args, kwargs) if may_write(func, kwargs) else ():
            if _has_memory(tensor) and storage_id(tensor) not in self.own:
                if torch.is_grad_enabled() and writes_first(func) and any(t.requires_grad for t in inputs):
                    refuse(func, [(what, tensor)], needs_grad=True)
                self.outside.setdefault(storage_id(tensor), _Outside(tensor))
        known = self.own | set(self.outside)
        versions = [(t, t._version) for t in inputs if storage_id(t) not in known and not t.is_inference()]
        result = func(*args, **kwargs)
        for tensor, version in versions:
            if tensor._version != version:
                refuse(func, [("a tensor from outside of the function", tensor)])
        taken = {storage_id(t) for t in inputs}
        made = [t for t in tree_flatten(result)[0] if _has_memory(t)]
        self.own.update(storage_id(t) for t in made if storage_id(t) not in taken)
        return result


class _Outside:
    """Memory that is not a rank's own: its content before, and after each rank's call."""

    def __init__(self, tensor: torch.Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self.before = self.memory.clone()
        self.example = tensor.new_empty(tensor.shape, device="meta")
        self.after: list[torch.Tensor] = []


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _has_memory(value: object) -> bool:
    return isinstance(value, torch.Tensor) and type(value) in _PLAIN and value.layout is torch.strided
