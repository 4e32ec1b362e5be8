"""input_reshard: what a module keeps of its replicated inputs for the backward pass is kept in parts."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.comm.record import Note
from shardwise.errors import LayoutError
from shardwise.layout import Shard
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import DeviceMesh, SimulatedMesh
from shardwise.move import move
from shardwise.parallel.styles.axis import StyleAxis
from shardwise.tensor import DTensor
from shardwise.torch_private.tensors import address_of, is_plain


def input_reshard(
    module: nn.Module,
    tp_device_mesh: DeviceMesh | SimulatedMesh,
    input_reshard_dim: int | None = None,
    *,
    axis: int | str | None = None,
) -> nn.Module:
    """Let each rank keep only its part of a module's replicated inputs for the backward pass, and gather them again
    there.

    It saves memory if nobody else keeps the inputs. Plain inputs are taken to be alike on all ranks.

    Args:
        module: gets hooks, in place.
        tp_device_mesh: the mesh.
        input_reshard_dim: the dim along which each rank keeps its part; None changes nothing.
        axis: the mesh axis; needed where the mesh has several.

    Returns:
        The module itself.

    Raises:
        LayoutError: `input_reshard_dim` is not an int.
        MeshError: the mesh has several axes and `axis` does not say which.
    """
    if input_reshard_dim is None:
        return module
    if not isinstance(input_reshard_dim, int) or isinstance(input_reshard_dim, bool):
        raise LayoutError(f"input_reshard_dim: expected an int or None, got {input_reshard_dim!r}")
    keeping = _Keeping(StyleAxis.of(tp_device_mesh, axis), input_reshard_dim)
    module.register_forward_pre_hook(keeping.start, with_kwargs=True, prepend=True)
    module.register_forward_hook(keeping.stop, always_call=True)
    return module


class _Keeping:
    """The hooks on one module. `running` has one entry for each forward under way, one inside another."""

    def __init__(self, axis: StyleAxis, dim: int) -> None:
        self.axis, self.dim = axis, dim
        self.running: list[saved_tensors_hooks] = []

    def start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs: Inputs = {}
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Tensor) and torch.is_grad_enabled():
                self._note(x, inputs)
        hooks = saved_tensors_hooks(functools.partial(_pack, inputs), _unpack)
        hooks.__enter__()
        self.running.append(hooks)

    def _note(self, x: torch.Tensor, inputs: Inputs) -> None:
        laid = self.axis.distributed(x.detach(), REPLICATE)
        held = laid.placements[self.axis.number]
        if not held.is_replicate() or not laid.numel() or not -laid.dim() <= self.dim < laid.dim():
            return
        parts = _Parts(laid, self.axis, self.dim)
        for i, value in enumerate(self.axis.mesh.comm.values(laid._local)):
            if value.is_contiguous() and value.numel():
                inputs[address_of(value)] = (parts, i)

    def stop(self, *args: object) -> None:
        if self.running:
            self.running.pop().__exit__(None, None, None)

    def __deepcopy__(self, memo: dict[int, object]) -> _Keeping:
        return _Keeping(self.axis, self.dim)


class _Parts:
    """An input, cut into parts when autograd first saves it, and gathered when autograd first asks for it."""

    def __init__(self, x: DTensor, axis: StyleAxis, dim: int) -> None:
        self.x: DTensor | None = x
        self.axis, self.dim = axis, dim
        self.numel = axis.mesh.comm.first(x._local).numel()

    def keep(self) -> None:
        if self.x is not None:
            cut = self.x.redistribute(placements=self.axis.placements(Shard(self.dim), self.x.placements))
            self.parts: Any = cut.clone(memory_format=torch.contiguous_format)  # not a view of the whole
            self.x = None

    @functools.cached_property
    def values(self) -> list[torch.Tensor]:
        here = self.parts._layout
        whole = here.replace(placements=self.axis.placements(REPLICATE, here.placements), stride=None)
        local = move(self.parts._local, here, whole, Note("input_reshard", backward=True))
        return [v.contiguous() for v in self.axis.mesh.comm.values(local)]


class _Saved(NamedTuple):
    """What autograd keeps for a tensor that is a view of an input in parts."""

    parts: _Parts
    i: int
    shape: torch.Size


Inputs = dict[object, tuple[_Parts, int]]  # by address: an input, and which of its values lies there


def _pack(inputs: Inputs, value: torch.Tensor) -> torch.Tensor | _Saved:
    parts, i = inputs.get(address_of(value), (None, 0)) if is_plain(value) else (None, 0)
    if parts is None or value.numel() != parts.numel or not value.is_contiguous():
        return value
    with torch.no_grad():
        parts.keep()
    return _Saved(parts, i, value.shape)


def _unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
    if not isinstance(saved, _Saved):
        return saved
    with torch.no_grad():
        return saved.parts.values[saved.i].view(saved.shape)
