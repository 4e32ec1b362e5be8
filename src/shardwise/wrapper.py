"""The bare wrapper: a tensor of global shape outside, a local value and its layout inside.

It lives below the public class so that the engine can make results; `concrete` is the class those results get.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.layout import Layout
from shardwise.torch_private import make_wrapper, storage_id, without_torch_function


class Wrapper(torch.Tensor):
    """A tensor whose values live in `_local` as `_layout` says. To C++ it never requires grad."""

    _local: Any
    _layout: Layout
    _spreads: dict[Any, Any] | None = None
    concrete: type[Wrapper]

    def __init_subclass__(cls) -> None:
        if not hasattr(Wrapper, "concrete"):
            Wrapper.concrete = cls


def wrapper_of(layout: Layout) -> Callable[[Any], Any]:
    """`wrap` for one layout, with everything looked up beforehand: this runs once a call."""
    cls, shape, stride, dtype, device = Wrapper.concrete, layout.shape, layout.stride, layout.dtype, layout.device
    make = make_wrapper

    def wrap_local(local: Any) -> Any:
        self = make(cls, shape, strides=stride, dtype=dtype, device=device)
        self._local = local
        self._layout = layout
        return self

    return wrap_local


def wrap(local: Any, layout: Layout) -> Any:
    """The tensor that holds `local` as `layout` says."""
    self = make_wrapper(Wrapper.concrete, layout.shape, strides=layout.stride, dtype=layout.dtype, device=layout.device)
    self._local = local
    self._layout = layout
    return self


# What the library itself notes on a tensor; anything else was noted by the program.
_OURS = frozenset(
    "_local _layout _spreads _leaf _hooks _grad _spare_grad _loose_writes _gathered _unreduced _reports _is_param "
    "_coming _finish".split()
)


def notes_of(tensor: Any) -> dict[str, Any]:
    """The attributes that the program has set on a tensor."""
    return {name: value for name, value in tensor.__dict__.items() if name not in _OURS}


def storage_of(tensor: Any) -> torch.UntypedStorage:
    """The memory of its values (of the first rank played here)."""
    return tensor._layout.mesh.comm.first(tensor._local).untyped_storage()


def storage_id_of(tensor: Any) -> int:
    """What it has in common with every tensor that shares its memory (that of the first rank played here)."""
    return storage_id(tensor._layout.mesh.comm.first(tensor._local))


def shares_memory(one: Any, other: Any) -> bool:
    return storage_id_of(one) == storage_id_of(other)


def rebind(target: Any, value: Any) -> Any:
    """`target`, now holding what `value` holds: shape, dtype and layout included."""
    with without_torch_function():
        torch.Tensor.data.__set__(target, value)  # type: ignore[attr-defined]
    target._local, target._layout, target._spreads = value._local, value._layout, None
    return target
