"""`move_state_dict`: all tensors of a state dict to another mesh, in a few large exchanges, not one per tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.comm.record import Note
from shardwise.errors import MoveError
from shardwise.layout import Layout, Placement, as_placements
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import Mesh, UserMesh, as_mesh
from shardwise.move.across import plan_across
from shardwise.move.bucket import Parcel, exchange_parcels
from shardwise.tensor import DTensor
from shardwise.wrapper import wrap

AnyPlacements = Sequence[Any]  # ours or torch's
Places = Mapping[str, AnyPlacements] | Callable[[str, DTensor], AnyPlacements | None] | None


def move_state_dict(
    state_dict: Mapping[str, Any], device_mesh: UserMesh, placements: Places = None, *, bucket_bytes: int = 1 << 28
) -> dict[str, Any]:
    """A copy of a state dict whose DTensors live on another mesh. Everything else in it stays the same object.

    Every rank of either mesh calls it. A rank that is in the new mesh only has its tensors as `DTensor.outside`.

    Args:
        state_dict: Tensors by name; mappings, lists and tuples in it are walked through.
        device_mesh: The mesh to move to.
        placements: For a name (those of nested tensors are joined by dots) its placements, as a mapping or as a
            function of name and tensor. Where it has none, a tensor keeps its placements if both meshes have the same
            number of axes, and is replicated otherwise.
        bucket_bytes: Tensors travel together, up to so many bytes per rank at a time.

    Returns:
        A new dict of the same structure.

    Raises:
        MoveError: An argument is of the wrong kind.
    """
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes <= 0:
        raise MoveError(f"move_state_dict: bucket_bytes must be an int > 0, got {bucket_bytes!r}")
    if not (placements is None or callable(placements) or isinstance(placements, Mapping)):
        raise MoveError(
            f"move_state_dict: placements must be a mapping of names to placements, or a function of name and tensor; "
            f"got {placements!r}"
        )
    mesh = as_mesh(device_mesh, outside=True)
    found: dict[str, DTensor] = {}
    _walk(state_dict, "", lambda name, tensor: found.setdefault(name, tensor))
    targets = {name: _target(name, tensor, mesh, placements) for name, tensor in found.items()}
    moved = _together(found, targets, bucket_bytes)
    return _walk(state_dict, "", lambda name, tensor: moved[name])


def _walk(value: object, name: str, visit: Callable[[str, DTensor], Any]) -> Any:
    if isinstance(value, DTensor):
        return visit(name, value)
    join = lambda key: f"{name}.{key}" if name else str(key)  # noqa: E731
    if isinstance(value, Mapping):
        return {key: _walk(item, join(key), visit) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_walk(item, join(i), visit) for i, item in enumerate(value))
    return value


def _target(name: str, tensor: DTensor, mesh: Mesh, placements: Places) -> Layout:
    here = tensor._layout
    asked = placements(name, tensor) if callable(placements) else (placements or {}).get(name)
    if asked is not None:
        places: Sequence[Placement] = as_placements(asked)
    elif len(here.placements) == len(mesh.shape) and not here.is_partial:
        places = [type(p)(p.dim) if p.is_shard() else p for p in here.placements]  # type: ignore[attr-defined, call-arg]
    else:
        places = (REPLICATE,) * len(mesh.shape)
    return Layout.make(mesh, places, here.shape, here.dtype, device=mesh.device)


def _together(tensors: dict[str, DTensor], targets: dict[str, Layout], bucket_bytes: int) -> dict[str, DTensor]:
    moved: dict[str, DTensor] = {}
    parcels: dict[str, Parcel] = {}
    for name, tensor in tensors.items():
        here, there = tensor._layout, targets[name]
        pending = here.is_partial or there.is_partial
        if here.mesh is there.mesh or pending or here.mesh.comm.simulated:
            moved[name] = tensor.detach().redistribute(there.mesh.source, there.placements)  # type: ignore[attr-defined]
        else:
            plan = plan_across(here, there)
            parcels[name] = plan.exchange, tensor._local.detach()
    arrived = exchange_parcels(list(parcels.values()), bucket_bytes, Note("move_state_dict"))
    for name, local in zip(parcels, arrived, strict=True):
        moved[name] = wrap(local, targets[name])
    return moved
