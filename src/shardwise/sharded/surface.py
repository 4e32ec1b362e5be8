"""Autograd of sharded tensors: requires_grad, grad, backward and hooks, asked of the tensors of the tiles."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.sharded.hooks import LeafHooks
from shardwise.sharded.metadata import ShardedTensorMetadata
from shardwise.sharded.moving import Movable


class Differentiable(Movable):
    """The graph is that of the parts."""

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._parts[0].requires_grad

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    def requires_grad_(self, requires_grad: bool = True) -> Any:  # type: ignore[override]
        for part in self._parts:
            part.requires_grad_(requires_grad)
        if self._metadata.tensor_properties.requires_grad != requires_grad:
            properties = copying.copy(self._metadata.tensor_properties)
            properties.requires_grad = requires_grad
            self._metadata = ShardedTensorMetadata(self._metadata.shards_metadata, self._metadata.size, properties)
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self._parts[0].is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return self._parts[0].grad_fn

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._parts[0].retains_grad

    @property
    def _version(self) -> int:  # type: ignore[override]
        return self._parts[0]._version

    @property
    def grad(self) -> Any:  # type: ignore[override]
        """The gradient, in the same tiles; the same object as long as the tiles' gradients are the same."""
        grads = [part.grad for part in self._parts]
        kept = self.__dict__.get("_grad_kept")
        if kept is not None and len(kept[0]) == len(grads) and all(a is b for a, b in zip(kept[0], grads)):
            return kept[1]
        if all(grad is None for grad in grads):
            return None
        made = self._with_parts([torch.zeros_like(p) if g is None else g for g, p in zip(grads, self._parts)])
        self.__dict__["_grad_kept"] = (grads, made)
        return made

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None and not isinstance(value, Differentiable):
            raise TypeError(f"grad: expected a ShardedTensor or None, got {type(value).__name__}")
        if value is not None and value.size() != self.size():
            raise RuntimeError(f"grad: size {list(value.size())} for a tensor of size {list(self.size())}")
        self.__dict__.pop("_grad_kept", None)
        value = None if value is None else value._like(self)
        grads = [None] * len(self._parts) if value is None else value._parts
        for part, grad in zip(self._parts, grads):
            part.grad = grad
        if value is not None:
            self.__dict__["_grad_kept"] = (grads, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Any:  # type: ignore[override]
        return self._with_parts([part.data for part in self._parts])

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, Differentiable):
            raise TypeError(f"data: expected a ShardedTensor, got {type(value).__name__}")
        if value.size() != self.size():
            raise RuntimeError(f"data: size {list(value.size())} for a tensor of size {list(self.size())}")
        for part, other in zip(self._parts, value._like(self)._parts):
            part.data = other

    def backward(
        self, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:  # type: ignore[override]
        """Start a backward pass; every rank of the group calls it."""
        torch.autograd.backward([self], [gradient], retain_graph, create_graph, inputs=inputs)

    def retain_grad(self) -> None:  # type: ignore[override]
        for part in self._parts:
            part.retain_grad()

    def detach_(self) -> Any:  # type: ignore[override]
        for part in self._parts:
            part.detach_()
        return self

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:  # type: ignore[override]
        """The hook sees the gradient in this tensor's tiles, and may give another. Where a rank holds several tiles of
        a tensor that is no leaf, it can watch only."""

        def ask(grads: Sequence[torch.Tensor]) -> Any:
            given = hook(self._with_parts(grads))
            return None if given is None else given._like(self)._parts

        if len(self._parts) == 1:

            def on_part(grad: torch.Tensor) -> Any:
                given = ask([grad])
                return None if given is None else given[0]

            return self._parts[0].register_hook(on_part)
        if self.is_leaf:
            return self._leaf_hooks().add(ask)

        def on_all(grads: Sequence[torch.Tensor | None]) -> None:
            full = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, self._parts)]
            if ask(full) is not None:
                raise RuntimeError(
                    f"register_hook: this rank holds {len(self._parts)} shards of a tensor that is no leaf, whose "
                    f"gradients go on one by one: a hook can watch them but not replace them; hook "
                    f"local_shards()[i].tensor"
                )

        return torch.autograd.graph.register_multi_grad_hook(self._parts, on_all)

    def _hooked(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Gradients of the parts as the hooks of a leaf of several parts want them; those of one part have run."""
        if len(self._parts) > 1 and self.is_leaf:
            return self._leaf_hooks().answer(grads)
        return [torch.zeros_like(part) if grad is None else grad for grad, part in zip(grads, self._parts)]

    def _leaf_hooks(self) -> LeafHooks:
        """One for all hooks of a leaf: they follow one another."""
        kept, parts = self.__dict__.get("_hooks_kept"), self._parts
        if kept is None or len(kept.parts) != len(parts) or any(a is not b for a, b in zip(kept.parts, parts)):
            kept = self.__dict__["_hooks_kept"] = LeafHooks(parts)
        return kept
