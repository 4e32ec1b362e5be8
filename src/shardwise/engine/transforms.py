"""torch.func on distributed tensors.

A transform marks a tensor by wrapping it. Of a distributed tensor it wraps the local tensors (the tensor is *inside
out*), so that inside of `grad`, `vjp` and `jvp` it still is one: its rules, moves and methods work as usual, and torch
differentiates the ranks' own tensors. `vmap` wraps the whole tensor instead, because only so the dim it maps over may
be cut. Where the two meet, a tensor of the first kind is turned into one of the second, which is wrapped as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from shardwise.comm.record import Note
from shardwise.engine.plain_tensors import replicated_plain
from shardwise.layout import Layout, Shard
from shardwise.layout.gradient import grad_layout, summed_axes
from shardwise.layout.placement import REPLICATE, Placement
from shardwise.mesh import Mesh
from shardwise.move import move
from shardwise.protocols import Ctx, LocalValue, Structure, Tensors, VmapInfo
from shardwise.torch_private.autograd import take_jacfwd, take_transforms, take_undefined_grad, take_vmap
from shardwise.torch_private.tensors import (
    are_transforms_active,
    held_by_transforms,
    is_transformed,
    without_torch_function,
)
from shardwise.wrapper import Wrapper, wrap


def take_tensors() -> None:
    """Patch torch's transforms so that they wrap and unwrap distributed tensors as this file describes."""
    take_vmap(_without_older_vmap)
    take_jacfwd(_with_new_jacfwd)
    take_undefined_grad(lambda original: lambda: _done_to_locals(original()))
    take_transforms(
        _wrap_for_grad=_done_to_locals,
        _unwrap_for_grad=_done_to_locals,
        _add_batch_dim=_on_whole,
        _remove_batch_dim=_on_whole,
    )


def _done_to_locals(original: Callable[..., Any]) -> Callable[..., Any]:
    """A C++ function on a tensor, applied to the local tensors of a distributed one."""

    def each(tensor: torch.Tensor, *args: Any) -> Any:
        if not isinstance(tensor, Wrapper):
            return original(tensor, *args)
        comm, local = tensor._layout.mesh.comm, tensor._local
        return wrap(comm.rebuild(local, [original(value, *args) for value in comm.values(local)]), tensor._layout)

    return each


def _on_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, *args: original(turn_out(tensor) if isinstance(tensor, Wrapper) else tensor, *args)


def _without_older_vmap(older: Callable[..., Any]) -> Callable[..., Any]:
    """torch's older vmap supports neither moves nor local tensors with tangents: distributed tensors are mapped by one
    call per index."""

    def vmap(func: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0, *more: Any, **options: Any) -> Any:
        def mapped(*args: Any) -> Any:
            if not any(isinstance(x, Wrapper) for x in tree_leaves(args)):
                return older(func, in_dims, out_dims, *more, **options)(*args)
            return _one_by_one(func, in_dims, out_dims, args)

        return mapped

    return vmap


def _with_new_jacfwd(older: Callable[..., Any]) -> Callable[..., Any]:
    """torch's older jacfwd, which needs the older vmap; of distributed tensors, that of torch.func."""

    def jacfwd(func: Callable[..., Any], inputs: object, strict: bool = False, vectorize: bool = False) -> Any:
        if strict or not vectorize or not any(isinstance(x, Wrapper) for x in tree_leaves(inputs)):
            return older(func, inputs, strict, vectorize)
        if isinstance(inputs, tuple):
            return torch.func.jacfwd(func, tuple(range(len(inputs))))(*inputs)
        return torch.func.jacfwd(func)(inputs)

    return jacfwd


def _one_by_one(func: Callable[..., Any], in_dim: int, out_dim: int, args: tuple[Any, ...]) -> Any:
    """The result of vmap, by one call per index."""
    count = next(x for x in tree_leaves(args) if isinstance(x, torch.Tensor)).shape[in_dim]
    at = lambda i: tree_map_only(torch.Tensor, lambda x: x.select(in_dim, i), args)  # noqa: E731
    made = [func(*at(i)) for i in range(count)]
    return tree_map(lambda *each: None if each[0] is None else torch.stack(each, out_dim), *made)


def vmap_with_nones(func: Callable[..., Any]) -> Callable[..., Any]:
    """torch.vmap of a function of which some results may be None, as gradients may."""

    def mapped(*args: object) -> Any:
        kinds: list[Any] = []

        def tensors_of(*args: object) -> list[torch.Tensor]:
            flat, tree = tree_flatten(func(*args), is_leaf=lambda x: x is None)
            kinds[:] = [tree, [x is None for x in flat]]
            return [x for x in flat if x is not None]

        found = iter(torch.vmap(tensors_of)(*args))
        tree, is_none = kinds
        return tree_unflatten([None if none else next(found) for none in is_none], tree)

    return mapped


# -- calls -------------------------------------------------------------------------------------------------
def call_transformed(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Call a function through torch.func, which unwraps the arguments and comes back through `__torch_dispatch__`.
    NotImplemented where no argument is wrapped as a whole."""
    if not any(isinstance(x, torch.Tensor) and is_outside(x) for x in tree_leaves((args, kwargs))):
        return NotImplemented
    args, kwargs = tree_map_only(Wrapper, turn_out, (tuple(args), dict(kwargs or {})))
    with without_torch_function():
        return func(*args, **kwargs)


def is_outside(tensor: torch.Tensor) -> bool:
    """Whether transforms have wrapped a distributed tensor as a whole, or a plain one whose dim a vmap maps over."""
    if not is_transformed(tensor):
        return False
    held, is_batched = held_by_transforms(tensor)
    return is_batched or isinstance(held, Wrapper)


# -- inside out, and back ----------------------------------------------------------------------------------
def turn_in(value: torch.Tensor, mesh: Mesh) -> Wrapper:
    """A distributed tensor that transforms have wrapped, with the wrappers around its local tensors. A plain tensor
    becomes a Replicate one on `mesh`."""
    if isinstance(value, Wrapper):
        return value
    if not (is_transformed(value) and isinstance(held_by_transforms(value)[0], Wrapper)):
        return replicated_plain(value, mesh)
    call = _Turned()
    return call.tensor(_TurnIn.apply(call, value))


def turn_out(tensor: Wrapper) -> torch.Tensor:
    """A distributed tensor with the wrappers of its local tensors around the whole; itself, if those have none."""
    values = tensor._layout.mesh.comm.values(tensor._local)
    if not any(map(is_transformed, values)):
        return tensor
    call = _Turned()
    call.describe(tensor._layout, tensor._local)
    return _TurnOut.apply(call, *values)


class _Turned:
    """A distributed tensor without its local tensors."""

    layout: Layout
    structure: Structure

    def describe(self, layout: Layout, local: LocalValue) -> None:
        self.layout, self.structure = layout, layout.mesh.comm.structure(local)

    def tensor(self, values: Sequence[torch.Tensor], layout: Layout | None = None) -> Wrapper:
        return wrap(self.layout.mesh.comm.assemble(self.structure, values), layout or self.layout)

    def values(self, tensor: Wrapper) -> tuple[torch.Tensor, ...]:
        """The local tensors of another tensor of this layout."""
        local = tensor._local
        if tensor._layout.placements != self.layout.placements:
            there = tensor._layout.replace(placements=self.layout.placements)
            local = move(local, tensor._layout, there, Note("torch.func"))
        return self.layout.mesh.comm.pick(self.structure, local)


class _Turn(torch.autograd.Function):
    """Both directions: each is the other's derivative."""

    @classmethod
    def apply(cls, call: _Turned, *values: Any) -> Any:  # type: ignore[override]
        return super().apply(call, *values) if are_transforms_active() else cls.forward(call, *values)

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Any, ...], output: object) -> None:
        ctx.call = inputs[0]


class _TurnIn(_Turn):
    """The local tensors of a distributed one."""

    @staticmethod
    def forward(call: _Turned, tensor: Wrapper) -> Tensors:
        call.describe(tensor._layout, tensor._local)
        return tensor._layout.mesh.comm.values(tensor._local)

    @staticmethod
    def backward(ctx: Ctx, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, turn_out(ctx.call.tensor(grads, grad_layout(ctx.call.layout)))

    @staticmethod
    def jvp(ctx: Ctx, _: object, tangent: torch.Tensor) -> Tensors:
        return ctx.call.values(turn_in(tangent, ctx.call.layout.mesh))

    @staticmethod
    def vmap(
        info: VmapInfo, in_dims: tuple[int, ...], call: _Turned, tensor: torch.Tensor
    ) -> tuple[Tensors, tuple[int, ...]]:
        dim, inner = in_dims[1], turn_in(tensor, None)  # type: ignore[arg-type]
        here = inner._layout
        whole = here.replace(placements=[REPLICATE if p.is_shard(dim) else p for p in here.placements])
        local = move(inner._local, here, whole, Note("torch.vmap"))
        shape = (*here.shape[:dim], *here.shape[dim + 1 :])
        call.describe(whole.replace(shape=shape, placements=_shifted(whole.placements, dim, -1)), local)
        values = here.mesh.comm.values(local)
        return values, (dim,) * len(values)


class _TurnOut(_Turn):
    """A distributed tensor of its local tensors."""

    @staticmethod
    def forward(call: _Turned, *values: torch.Tensor) -> Wrapper:
        return call.tensor(values)

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layout, given = ctx.call.layout, turn_in(grad, ctx.call.layout.mesh)
        wanted = grad_layout(layout).replace(dtype=given._layout.dtype, stride=given._layout.stride)
        back = move(given._local, given._layout, wanted, Note("torch.func", backward=True), summed_axes(layout))
        return None, *layout.mesh.comm.pick_gradients(ctx.call.structure, back)

    @staticmethod
    def jvp(ctx: Ctx, _: object, *tangents: torch.Tensor) -> torch.Tensor:
        return turn_out(ctx.call.tensor(tangents))

    @staticmethod
    def vmap(
        info: VmapInfo, in_dims: tuple[int | None, ...], call: _Turned, *values: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        pairs = zip(values, in_dims[1:], strict=True)
        first = [v.expand(info.batch_size, *v.shape) if d is None else v.movedim(d, 0) for v, d in pairs]
        return turn_out(call.tensor(first, with_batch_dim(call.layout, info.batch_size))), 0


def with_batch_dim(layout: Layout, size: int) -> Layout:
    """The layout of `size` tensors of this layout, stacked on a new first dim."""
    return layout.replace(shape=(size, *layout.shape), placements=_shifted(layout.placements, 0, 1))


def _shifted(placements: Sequence[Placement], start: int, by: int) -> list[Placement]:
    """Placements of a tensor that has one dim more or less at `start`."""
    return [p.at(p.dim + by) if isinstance(p, Shard) and p.dim >= start else p for p in placements]
