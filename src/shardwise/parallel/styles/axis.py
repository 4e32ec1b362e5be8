"""The mesh axis that a style works on. It makes DTensors of plain tensors, moves them along the axis, and takes the
local tensors out again."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from shardwise.api import distribute_tensor
from shardwise.boundary import enter, leave
from shardwise.comm.record import Note
from shardwise.engine.reduce_to_parts import note_gathered
from shardwise.errors import MeshError
from shardwise.layout import Layout, Placement, Shard
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import DeviceMesh, Mesh, SimulatedMesh, as_mesh
from shardwise.move import move, plan_steps
from shardwise.parallel.styles.remembered import distributed_once, known_layout, remember_layout, unless_cut
from shardwise.sizes import exchange_kinds, layout_of_locals
from shardwise.tensor import DTensor
from shardwise.torch_private.tensors import is_plain
from shardwise.wrapper import wrap

Placing = Placement | Mapping[str, Placement]  # on the style's axis, or by the names of axes
Sizes = Mapping[int, int] | None  # global sizes of dims that are known
_NOTE = Note("redistribute")


class StyleAxis:
    """A mesh and the number of the axis that a style works on."""

    def __init__(self, mesh: Mesh, number: int) -> None:
        self.mesh, self.number = mesh, number
        self._layouts: dict[Hashable, Layout] = {}  # of plain tensors
        self._targets: dict[Hashable, Layout | None] = {}  # where tensors of a layout go; None where they stay

    @staticmethod
    def of(device_mesh: DeviceMesh | SimulatedMesh | Mesh | None, axis: int | str | None) -> StyleAxis:
        """The axis of that name or number; None for the only one there is."""
        mesh = as_mesh(device_mesh, outside=True)
        if axis is not None:
            return StyleAxis(mesh, mesh.axis(axis))
        if len(mesh.shape) != 1:
            last = mesh.axis_names[-1]
            raise MeshError(
                f"device_mesh: {mesh!r} has several axes; say which one the plan cuts, as axis={last!r}, or give a "
                f"mesh of that axis alone, device_mesh[{last!r}]"
            )
        return StyleAxis(mesh, 0)

    @property
    def is_only_axis(self) -> bool:
        return len(self.mesh.shape) == 1

    def placements(self, placing: Placing, others: tuple[Placement, ...] | None = None) -> tuple[Placement, ...]:
        """Placements for all axes: those of `placing`, and `others` (or Replicate) where it says nothing."""
        found = list(others if others is not None else (REPLICATE,) * len(self.mesh.shape))
        if isinstance(placing, Mapping):
            for name, place in placing.items():
                found[self.mesh.axis(name)] = place
        else:
            found[self.number] = placing
        return tuple(found)

    # -- onto the mesh --------------------------------------------------------------------------------------
    def distributed(
        self,
        x: torch.Tensor,
        placing: Placing,
        whole: Sizes = None,
        *,
        watched: bool = True,
        known_as: torch.Tensor | None = None,
    ) -> DTensor:
        """A DTensor of `x`: `x` itself if it is one, else the tensor of which each rank holds `x` under `placing`.

        `whole` has the global sizes of cut dims that are known. If `watched`, hooks may be put on the result: it gets a
        node of its own in the graph. `known_as`, where `x` is another form of it, is what the layout is known for."""
        if isinstance(x, DTensor):
            if x._layout.mesh is not self.mesh:
                axis = self.mesh.axis_names[self.number]
                raise MeshError(
                    f"a tensor on {x._layout.mesh!r} meets a module parallelized over {self.mesh!r}; use the mesh of "
                    f"the tensors, parallelize_module(module, mesh, plan, axis={axis!r})"
                )
            return x
        if self.mesh.comm.simulated or self.mesh.comm.outside:
            places = self.placements(placing)
            first = getattr(x, "ranks", (x,))[0]
            return DTensor.from_local(x, self.mesh, places, shape=_global_shape(first, places, whole))
        key = (x.shape, x.stride(), x.dtype, x.device, _placing_key(placing))
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layout_of(x, placing, whole, key, x if known_as is None else known_as)
        return enter(x, layout) if watched or x.grad_fn is None else wrap(x, layout)

    def _layout_of(
        self, x: torch.Tensor, placing: Placing, whole: Sizes, key: tuple[Hashable, ...], known_as: torch.Tensor
    ) -> Layout:
        """The layout of a plain tensor: derived where that is possible, else agreed on by all ranks (see `sizes`)."""
        places = self.placements(placing)
        shape = _global_shape(x, places, whole)
        is_cut = any(isinstance(p, Shard) and k > 1 for p, k in zip(places, self.mesh.shape, strict=True))
        if shape is not None or not is_cut:
            return _remember(self._layouts, key, layout_of_locals(x, self.mesh, places, shape)[1])
        known = known_layout(known_as, places, self.mesh)
        if known is not None:
            return known
        kinds = exchange_kinds(x, self.mesh)
        agreed = (*key, tuple(kinds.values()))
        if agreed not in self._layouts:
            _remember(self._layouts, agreed, layout_of_locals(x, self.mesh, places, kinds=kinds)[1])
        layout = self._layouts[agreed]
        remember_layout(known_as, layout)
        return layout

    def distributed_once(self, x: torch.Tensor, placing: Placing, whole: Mapping[int, int]) -> DTensor:
        """`distributed`, for modules that do not write to their input: those that get the same plain tensor share the
        DTensor, and one reduction of its gradient."""
        if isinstance(x, DTensor):
            return self.distributed(x, placing)
        key = (self.mesh, self.number, _placing_key(placing), tuple(whole.items()))
        make = functools.partial(self.distributed, placing=placing, whole=whole, watched=False, known_as=x)
        return distributed_once(x, key, make)

    def lay_out(self, param: torch.Tensor, placement: Placement, source: int | None) -> DTensor:
        """A parameter or buffer with this placement on the axis; a DTensor keeps those on the other axes."""
        if not isinstance(param, DTensor):
            return distribute_tensor(param.detach(), self.mesh, self.placements(placement), src_data_rank=source)
        if param._layout.mesh is not self.mesh:
            raise MeshError(
                f"a parameter lies on {param._layout.mesh!r}, its module is parallelized over {self.mesh!r}"
            )
        value: Any = param.detach()
        return value.redistribute(placements=self.placements(placement, param.placements))

    # -- along it -------------------------------------------------------------------------------------------
    def move(self, x: DTensor, placing: Placing, like: Any = None) -> DTensor:
        """The tensor laid out so; axes that `placing` does not speak of, or that cut the dim it asks for, stay.

        `like` is the input of the module whose output `x` is. What the other axes cut of its leading dims they cut of
        `x`: a batch stays cut, also where it was cheaper to gather it than a parameter which those axes cut."""
        before = like._layout if isinstance(like, DTensor) and not self.is_only_axis else None
        key = (x._layout, before, _placing_key(placing))
        if key not in self._targets:
            asked = self.placements(placing, x.placements if before is None else self._cut_like(x._layout, before))
            settled = tuple(unless_cut(want, have, x.dim()) for want, have in zip(asked, x.placements))
            made = x._layout.replace(placements=settled)
            if plan_steps(x._layout, made):
                made = made.replace(stride=None)  # what has not moved is as it was
            _remember(self._targets, key, None if settled == x.placements else made)
        target = self._targets[key]
        if target is None:
            return x
        is_gathered = x.placements[self.number].is_shard() and target.placements[self.number].is_replicate()
        # a tensor made in inference mode cannot tell that it has been written to
        if is_gathered and not self.mesh.comm.first(x._local).is_inference():
            return _gathered_once(x, target, self.number)
        return _moved(x, target)

    def _cut_like(self, output: Layout, given: Layout) -> tuple[Placement, ...]:
        """The placements of `output`, with those of `given` on other axes that cut a dim which both have."""
        number = given.dtype.is_floating_point or given.dtype.is_complex  # else ids, which get one dim more
        leading = min(len(given.shape), len(output.shape)) - number
        return tuple(
            came if axis != self.number and isinstance(came, Shard) and came.dim < leading else have
            for axis, (have, came) in enumerate(zip(output.placements, given.placements))
        )

    # -- and out again --------------------------------------------------------------------------------------
    def handed_over(self, x: DTensor, use_local: bool | None) -> torch.Tensor:
        """What the program gets of a tensor: the local one if `use_local`; by default, where there is no other axis. On
        a rank outside of the mesh, which holds nothing, always `x`: it knows its sizes, so the program can go on."""
        if self.mesh.comm.outside:
            return x
        return self._local_of(x) if (self.is_only_axis if use_local is None else use_local) else x

    def _local_of(self, x: DTensor) -> torch.Tensor:
        """The local tensor. What simulated ranks hold alike is one tensor, and a plain one if all do: a plain parameter
        that meets it gets its gradient once, as on every process."""
        comm = self.mesh.comm
        if not comm.simulated:
            local = x._local if is_plain(x._local) and x._local.grad_fn is not None else x.to_local()
            if any(isinstance(p, Shard) for p in x.placements):
                remember_layout(local, x._layout)
            return local
        if not all(p.is_replicate() for p in x.placements):
            return x.to_local()
        return x.full_tensor() if len(set(comm.spectators)) == 1 else leave(x)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, object]) -> StyleAxis:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return StyleAxis, (self.mesh, self.number)


# -- plain tensors -----------------------------------------------------------------------------------------
def _placing_key(placing: Placing) -> Hashable:
    return placing if isinstance(placing, Placement) else tuple(placing.items())


def _global_shape(x: torch.Tensor, places: tuple[Placement, ...], whole: Sizes) -> list[int] | None:
    """The global shape, where something is cut and the sizes of all cut dims are known."""
    cut = {p.dim % x.ndim for p in places if isinstance(p, Shard) and -x.ndim <= p.dim < x.ndim}
    known = {dim % x.ndim: size for dim, size in (whole or {}).items() if -x.ndim <= dim < x.ndim}
    return [known.get(d, n) for d, n in enumerate(x.shape)] if cut and cut <= known.keys() else None


# -- moves -------------------------------------------------------------------------------------------------
def _moved(x: DTensor, target: Layout) -> DTensor:
    """x.redistribute, with the layout that it comes to known beforehand."""
    return wrap(move(x._local, x._layout, target, _NOTE), target)


def _gathered_once(x: DTensor, target: Layout, axis: int) -> DTensor:
    """The tensor made whole, and kept on it: query, key and value projections of one input share the gathering, and
    that of their gradients."""
    if x._spreads is None:
        x._spreads = {}
    key, now = ("moved", target, torch.is_grad_enabled()), (x._local, x._version)
    found = x._spreads.get(key)
    if found is None or found[0] is not now[0] or found[1] != now[1]:
        found = x._spreads[key] = (*now, _moved(x, target))
        note_gathered(x, found[2], (axis,), for_calls=True)
    return found[2]


def _remember(table: dict[Hashable, Any], key: Hashable, value: Any) -> Any:
    if len(table) >= 1024:
        table.clear()
    table[key] = value
    return value
