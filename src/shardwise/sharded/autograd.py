"""Gradients and hooks of sharded tensors: the graph is that of the tiles, which are plain tensors.

A hook of a tensor of which a rank holds several tiles sees all of the gradient at once, but the gradients of the tiles
come one by one. Those of a leaf end in `grad`, so they can wait: each but the last enters as zeros, and when the last
has come the hook is called and its answer takes their places. Elsewhere in a graph a gradient cannot wait, so there a
hook can only watch.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.utils.hooks import RemovableHandle

from shardwise.sharded.base import ShardedTensorBase
from shardwise.sharded.metadata import ShardedTensorMetadata
from shardwise.torch_private.autograd import will_run

if TYPE_CHECKING:
    from shardwise.sharded.tensor import ShardedTensor

_state = threading.local()
TileHook = Callable[[list[torch.Tensor]], Sequence[torch.Tensor] | None]


# -- requires_grad, grad, data -------------------------------------------------------------------------------------
def requires_grad_(self: ShardedTensor, requires_grad: bool = True) -> ShardedTensor:
    for part in self._parts:
        part.requires_grad_(requires_grad)
    metadata = self._metadata
    if metadata.tensor_properties.requires_grad != requires_grad:
        properties = copy.copy(metadata.tensor_properties)
        properties.requires_grad = requires_grad
        self._metadata = ShardedTensorMetadata(metadata.shards_metadata, metadata.size, properties)
    return self


def get_grad(tensor: ShardedTensor) -> ShardedTensor | None:
    """Return the gradient in the tensor's tiles; the same object as long as the tiles' gradients are the same."""
    grads = [part.grad for part in tensor._parts]
    kept = tensor._grad_kept
    if kept is not None and len(kept[0]) == len(grads) and all(a is b for a, b in zip(kept[0], grads)):
        return kept[1]
    if all(grad is None for grad in grads):
        return None
    made = tensor._with_parts(_zeros_for_none(grads, tensor._parts))
    tensor._grad_kept = (grads, made)
    return made


def set_grad(tensor: ShardedTensor, value: ShardedTensor | None) -> None:
    """Set the gradient; one in other tiles is moved to the tensor's."""
    if value is not None:
        _check_like(tensor, value, "grad", "a ShardedTensor or None")
        value = value._in_tiles_of(tensor)
    grads: list[torch.Tensor | None] = [None] * len(tensor._parts) if value is None else [*value._parts]
    tensor._grad_kept = None
    for part, grad in zip(tensor._parts, grads):
        part.grad = grad
    if value is not None:
        tensor._grad_kept = (grads, value)


def set_data(tensor: ShardedTensor, value: ShardedTensor) -> None:
    """Set the values, not recorded by autograd; a tensor in other tiles is moved to this one's."""
    _check_like(tensor, value, "data", "a ShardedTensor")
    for part, other in zip(tensor._parts, value._in_tiles_of(tensor)._parts):
        part.data = other


def _check_like(tensor: ShardedTensor, value: object, name: str, expected: str) -> None:
    if not isinstance(value, ShardedTensorBase):
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")
    if value.size() != tensor.size():
        raise RuntimeError(f"{name}: size {list(value.size())} for a tensor of size {list(tensor.size())}")


def _zeros_for_none(grads: Sequence[torch.Tensor | None], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(part) if grad is None else grad for grad, part in zip(grads, parts)]


# -- hooks ---------------------------------------------------------------------------------------------------------
def register_hook(self: ShardedTensor, hook: Callable[[ShardedTensor], ShardedTensor | None]) -> RemovableHandle:
    """Call `hook` with the gradient when it is known, and return a handle whose `remove()` takes the hook away.

    The hook may return another gradient, except where a rank holds several tiles of a tensor that is no leaf.
    """

    def on_tiles(grads: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        answer = hook(self._with_parts(grads))
        return None if answer is None else answer._in_tiles_of(self)._parts

    if len(self._parts) == 1:
        return self._parts[0].register_hook(lambda grad: next(iter(on_tiles([grad]) or ()), None))
    if self.is_leaf:
        return _leaf_hooks(self).add(on_tiles)

    def watch(grads: Sequence[torch.Tensor | None]) -> None:
        if on_tiles(_zeros_for_none(grads, self._parts)) is not None:
            raise RuntimeError(
                f"register_hook: this rank holds {len(self._parts)} shards of a tensor that is no leaf, whose "
                f"gradients go on one by one: a hook can watch them but not replace them; hook "
                f"local_shards()[i].tensor"
            )

    return torch.autograd.graph.register_multi_grad_hook(self._parts, watch)


def call_hooks(tensor: ShardedTensor, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return the gradients of the tiles after the hooks of a leaf of several tiles; those of one tile have run."""
    if len(tensor._parts) > 1 and tensor.is_leaf:
        return _leaf_hooks(tensor).call(grads)
    return _zeros_for_none(grads, tensor._parts)


def _leaf_hooks(tensor: ShardedTensor) -> LeafHooks:
    """Return the one object that all hooks of a leaf share: they run one after the other."""
    kept, parts = tensor._hooks_kept, tensor._parts
    if kept is None or len(kept.parts) != len(parts) or any(a is not b for a, b in zip(kept.parts, parts)):
        kept = tensor._hooks_kept = LeafHooks(parts)
    return kept


@contextmanager
def hooks_called_later() -> Iterator[None]:
    """Inside, hooks of leaves let gradients pass: `torch.autograd.grad` returns them, and its caller calls the hooks
    with `call_hooks`."""
    saved = getattr(_state, "later", False)
    _state.later = True
    try:
        yield
    finally:
        _state.later = saved


class LeafHooks:
    """The hooks of one leaf of several tiles. Each is a function of the gradients of all tiles that returns others, or
    None."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.parts, self.hooks = list(parts), OrderedDict[int, TileHook]()
        self.nodes = [torch.autograd.graph.get_gradient_edge(part).node for part in parts]
        self.arrived: dict[int, torch.Tensor] = {}
        self.waits = False  # whether the tiles' gradients pass here

    def add(self, hook: TileHook) -> RemovableHandle:
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        for i, part in enumerate(() if self.waits else self.parts):
            part.register_hook(partial(self._arrive, i))
        self.waits = True
        return handle

    def _arrive(self, i: int, grad: torch.Tensor) -> torch.Tensor:
        """Return zeros until the gradient of the last tile is there; then call the hooks."""
        if not self.hooks or getattr(_state, "later", False):
            return grad
        self.arrived[i] = grad
        if any(j not in self.arrived and will_run(node) for j, node in enumerate(self.nodes)):
            return torch.zeros_like(grad)
        arrived, self.arrived = self.arrived, {}
        answer = self.call([arrived.get(j) for j in range(len(self.parts))])
        for j in arrived:
            if j != i:
                _add_to_grad(self.parts[j], answer[j])
        return answer[i]

    def call(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return what the hooks make of the gradients, one hook after the other."""
        current = _zeros_for_none(grads, self.parts)
        for hook in list(self.hooks.values()):
            answer = hook(current)
            current = current if answer is None else list(answer)
        return current


def _add_to_grad(part: torch.Tensor, grad: torch.Tensor) -> None:
    """Add to a `grad` that has, or will have, zeros in the place of this gradient."""
    if grad.requires_grad or part.grad is None:
        part.grad = grad if part.grad is None else part.grad + grad
    else:
        with torch.no_grad():
            part.grad.add_(grad)
