"""Forward-mode differentiation: the local tensors of a distributed tensor carry the parts of its tangent."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.comm.record import Note
from shardwise.engine.transforms import turn_in, turn_out
from shardwise.errors import AutogradError, LayoutError, MeshError
from shardwise.layout.placement import REPLICATE
from shardwise.move import move
from shardwise.torch_private import tensors as private
from shardwise.torch_private.tensors import is_transformed, tracing_mode, without_torch_function
from shardwise.wrapper import Wrapper, wrap

_LINEAR = ("sum", "avg")  # reductions whose parts have parts of the tangent


def make_dual(tensor: torch.Tensor, tangent: torch.Tensor, level: int = 0) -> Any:
    """A tensor with this tangent, which is laid out like it."""
    if tracing_mode() is not None:
        raise AutogradError(
            "torch.func.linearize, or make_fx of forward-mode differentiation, of a distributed tensor is not "
            "supported: the graph would lose its tangent. Use torch.func.jvp"
        )
    if not isinstance(tensor, Wrapper):
        if not is_transformed(tensor):
            raise AutogradError(
                "make_dual: the tensor is a plain one and its tangent a DTensor; give tangent.full_tensor(), or make "
                "the tensor a DTensor with distribute_tensor"
            )
        with without_torch_function():
            return private.make_dual(tensor, turn_out(tangent), level=level)  # type: ignore[arg-type]
    primal = _with_linear_parts(tensor)
    layout, comm = primal._layout, primal._layout.mesh.comm
    given = turn_in(tangent, layout.mesh)
    if given._layout.mesh is not layout.mesh:
        raise MeshError(f"make_dual: the tangent is on {given._layout.mesh!r}, the tensor on {layout.mesh!r}")
    if given._layout.shape != layout.shape or given._layout.dtype != layout.dtype:
        raise LayoutError(
            f"make_dual: the tangent is of shape {given._layout.shape} and {given._layout.dtype}, the tensor of shape "
            f"{layout.shape} and {layout.dtype}; they must be the same"
        )
    wanted = given._layout.replace(placements=layout.placements)
    moved = move(given._local, given._layout, wanted, Note("make_dual"))
    pairs = zip(comm.values(primal._local), comm.pick(comm.structure(primal._local), moved), strict=True)
    duals = [private.make_dual(value, part, level=level) for value, part in pairs]
    return wrap(comm.rebuild(primal._local, duals), layout)


def unpack_dual(tensor: torch.Tensor, level: int = 0) -> tuple[Any, Any]:
    """The tensor without its tangent, and the tangent; None if it has none."""
    assert isinstance(tensor, Wrapper)
    tensor = _with_linear_parts(tensor)
    layout, comm = tensor._layout, tensor._layout.mesh.comm
    found = [private.unpack_dual(value, level=level) for value in comm.values(tensor._local)]
    rebuilt = lambda values: wrap(comm.rebuild(tensor._local, values), layout)
    primal = rebuilt([value for value, _ in found])
    if all(tangent is None for _, tangent in found):
        return primal, None
    return primal, rebuilt([torch.zeros_like(v) if tangent is None else tangent for v, tangent in found])


def _with_linear_parts(tensor: Wrapper) -> Wrapper:
    """The tensor with every reduction done whose parts have no tangents of their own (max, min, product)."""
    layout = tensor._layout
    pending = [a for a, p in enumerate(layout.placements) if p.is_partial() and not any(map(p.is_partial, _LINEAR))]
    if not pending:
        return tensor
    target = layout.placed(dict.fromkeys(pending, REPLICATE))
    return wrap(move(tensor._local, layout, target, Note("make_dual")), target)
