"""The bare wrapper: a tensor of global shape outside, a local value and its layout inside.

It lives below the public class so that the engine can make results; `concrete` is the class those results get.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardwise.layout import Layout
from shardwise.protocols import LocalValue
from shardwise.torch_private.tensors import held_by_transforms, make_wrapper, storage_id, without_torch_function


class Wrapper(torch.Tensor):
    """A tensor whose values live in `_local` as `_layout` says. To C++ it never requires grad.

    Whatever the library keeps on a tensor is declared here: copies and pickles of a tensor take along every other
    attribute, since that is the program's (`notes_of`).
    """

    concrete: type[Wrapper]
    _local: LocalValue
    _layout: Layout
    _shown_grad: tuple[list[torch.Tensor | None], Any] | None = None  # local gradients, and the tensor that shows them
    _loose_writes: int = 0  # how often `.data` was handed out or replaced
    _rebinds: int = 0  # how often an op gave the tensor another value and shape
    _spreads: dict[Any, Any] | None = None  # the value as it enters split calls, by axes (`engine/plan.py`)
    _offset: int = 0  # where its elements begin in the memory that plain torch would have (`storage_offset()`)
    _origin: Origin | None = None  # what it has in common with views of it; None as long as it has none (`origin_of`)
    _gathered: Any = None  # the parts this tensor was gathered from (`engine/reduce_to_parts.py`)
    _guessed: bool = False  # on a rank outside of the mesh: whether its placements there are not known
    _coming: Any  # while an asynchronous move to it is under way: what waits for the value (`move/arrival.py`)
    _unreduced: bool  # data parallelism: the gradient is this rank's own so far
    _reports: bool  # data parallelism: a hook tells when the gradient is there
    _is_managed: bool = False  # data parallelism: each rank computes with it on a batch of its own
    _stand_ins: Callable[[], Callable[[], list[torch.Tensor]] | None]  # data parallelism: what forwards compute with

    def __init_subclass__(cls) -> None:
        if not hasattr(Wrapper, "concrete"):
            Wrapper.concrete = cls


def wrapper_of(layout: Layout) -> Callable[..., Any]:
    """`wrap` for one layout, with everything looked up beforehand: this runs once per call."""
    cls, shape, stride, dtype, device = Wrapper.concrete, layout.shape, layout.stride, layout.dtype, layout.device
    make, strided = make_wrapper, torch.strided

    def wrap_local(local: LocalValue, offset: int = 0) -> Any:
        # by position: torch takes a fifth less time to read the arguments than by name
        self = make(cls, shape, stride, offset or None, None, dtype, strided, device)
        if offset:
            self._offset = offset
        self._local = local
        self._layout = layout
        return self

    return wrap_local


def wrap(local: LocalValue, layout: Layout, offset: int = 0) -> Any:
    """The tensor that holds `local` as `layout` says; `offset` is its `storage_offset()`."""
    self = make_wrapper(
        Wrapper.concrete, layout.shape, layout.stride, offset or None, None, layout.dtype, torch.strided, layout.device
    )
    if offset:
        self._offset = offset
    self._local = local
    self._layout = layout
    return self


_DECLARED = frozenset({*inspect.get_annotations(Wrapper), "_is_param"})  # the last is nn.Parameter's


def notes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that the program has set on a tensor."""
    return {name: value for name, value in tensor.__dict__.items() if name not in _DECLARED}


def is_note(name: str) -> bool:
    """Whether a program may set an attribute of this name on a tensor: neither the library nor the class has it."""
    return name not in _DECLARED and not (name.startswith("__") or hasattr(Wrapper.concrete, name))


def storage_of(tensor: Wrapper) -> torch.UntypedStorage:
    """The memory of its values (those of this process's first rank)."""
    return held_by_transforms(tensor._layout.mesh.comm.first(tensor._local))[0].untyped_storage()


def storage_id_of(tensor: Wrapper) -> int:
    """A number that two tensors have in common if they share memory (that of this process's first rank)."""
    return storage_id(tensor._layout.mesh.comm.first(tensor._local))


_LENT = 64  # local tensors of ``.data`` to which writes are counted


class Origin:
    """What a tensor has in common with its views. ``.data`` of it, and views of that, have another one, which knows of
    the first: autograd does not see what is written there, so it is counted here (`engine/unseen.py`)."""

    __slots__ = ("__weakref__", "_handed_out", "_lent", "_lent_before", "memory", "taken", "unseen_writes", "watchers")

    def __init__(self, shown: Origin | None = None) -> None:
        self.memory: Origin = self if shown is None else shown  # the one that stands for the memory
        self.unseen_writes = 0
        self._handed_out: weakref.WeakSet[Origin] | None = None  # those of ``.data`` that somebody has
        self._lent: deque[tuple[torch.Tensor, int]] | None = None  # what `lend` was told of, with its version then
        self._lent_before = 0  # the writes to what was in there and had to make room
        # who is told, by a function of itself, before somebody may write unseen
        self.watchers: weakref.WeakKeyDictionary[object, Callable[[Any], None]] | None = None
        # the local values of views that calls took, by who looks at them later; they live no longer than this memory
        self.taken: weakref.WeakKeyDictionary[object, LocalValue] | None = None

    def hand_out(self) -> Origin:
        """The origin of a new ``.data``."""
        memory = self.memory
        for watcher, tell in list((memory.watchers or {}).items()):
            tell(watcher)
        if memory._handed_out is None:
            memory._handed_out = weakref.WeakSet()
        made = Origin(memory)
        memory._handed_out.add(made)
        return made

    def lend(self, values: Iterable[torch.Tensor]) -> None:
        """Count the writes to these local tensors of a ``.data``: the program is given them, and writes go by us."""
        memory = self.memory
        lent = memory._lent = deque() if memory._lent is None else memory._lent
        lent.extend((value, value._version) for value in values if not value.is_inference())
        while len(lent) > _LENT:
            value, version = lent.popleft()
            memory._lent_before += value._version - version

    @property
    def lent_writes(self) -> int:
        """How often local tensors of ``.data`` were written, by this process alone."""
        return self._lent_before + sum(value._version - version for value, version in self._lent or ())

    @property
    def is_handed_out(self) -> bool:
        return bool(self._handed_out)


def origin_of(tensor: Wrapper) -> Origin:
    """What a tensor has in common with its views, on all ranks alike. Tensors that only share a storage (parts of one
    buffer, which data parallelism or a program made) have different ones."""
    if tensor._origin is None:
        tensor._origin = Origin()
    return tensor._origin


def shares_memory(one: Wrapper, other: Wrapper) -> bool:
    return storage_id_of(one) == storage_id_of(other)


def rebind(target: Wrapper, value: Any) -> Any:
    """`target`, now holding what `value` holds: shape, dtype and layout included. That is a write to it."""
    _become(target, value)
    target._origin = origin_of(value)
    target._rebinds += 1
    return target


# Told before and after numbers are drawn into a tensor, which no plan of a call does: it may be the copy of a view, or
# have such copies. The name is that of the op.
before_fill: list[Callable[[Wrapper, str], None]] = []
after_fill: list[Callable[[Wrapper], None]] = []


def restride(target: Wrapper, stride: tuple[int, ...], offset: int = 0) -> None:
    """Have `target` report these strides and this storage offset. Its values stay where they are."""
    if target._layout.stride != stride or target._offset != offset:
        _become(target, wrap(target._local, target._layout.replace(stride=stride), offset))


def retype(target: Wrapper, dtype: torch.dtype) -> None:
    """Have `target` report the dtype that its values have."""
    _become(target, wrap(target._local, target._layout.replace(dtype=dtype), target._offset))


def _become(target: Wrapper, value: Wrapper) -> None:
    with without_torch_function():
        torch.Tensor.data.__set__(target, value)  # type: ignore[attr-defined]
    target._local, target._layout, target._offset, target._spreads = value._local, value._layout, value._offset, None
