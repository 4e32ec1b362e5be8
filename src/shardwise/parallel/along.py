"""One axis of a mesh: where a style cuts. It brings tensors in, moves them along the axis, and lets them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from shardwise.api import distribute_tensor
from shardwise.boundary import enter, leave
from shardwise.comm.record import Note
from shardwise.engine.reduce_to_parts import note_gathered
from shardwise.errors import LayoutError, MeshError
from shardwise.layout import Layout as TensorLayout
from shardwise.layout import Placement, Shard
from shardwise.layout.placement import REPLICATE, as_placement
from shardwise.mesh import Mesh, as_mesh
from shardwise.move import move, plan_steps
from shardwise.parallel.siblings import entered_once
from shardwise.tensor import DTensor
from shardwise.wrapper import wrap

# What a style is told of a tensor: its placement on the style's axis, or placements by the names of axes.
Layout = Placement | Mapping[str, Placement]
_NOTE = Note("redistribute")


def as_layout(value: Any, name: str) -> Layout:
    """A layout that a user gave as the argument `name`, in our placements."""
    if isinstance(value, Mapping):
        return {axis: as_placement(place, f"{name}[{axis!r}]") for axis, place in value.items()}
    return as_placement(value, name)


class Along:
    """A mesh and the number of the axis that a style works on."""

    def __init__(self, mesh: Mesh, axis: int) -> None:
        self.mesh, self.axis = mesh, axis
        self._known: dict[Any, Any] = {}  # layouts of plain tensors
        self._moves: dict[Any, Any] = {}  # where tensors of a layout go; None stays

    @staticmethod
    def of(device_mesh: Any, axis: int | str | None) -> Along:
        mesh = as_mesh(device_mesh)
        if axis is not None:
            return Along(mesh, mesh.axis(axis))
        if len(mesh.shape) != 1:
            last = mesh.axis_names[-1]
            raise MeshError(
                f"device_mesh: {mesh!r} has several axes; say which one the plan cuts, as axis={last!r}, or give a "
                f"mesh of that axis alone, device_mesh[{last!r}]"
            )
        return Along(mesh, 0)

    @property
    def alone(self) -> bool:
        """Whether the mesh has no other axis."""
        return len(self.mesh.shape) == 1

    def places(self, layout: Layout, others: tuple[Placement, ...] | None = None) -> tuple[Placement, ...]:
        """Placements for all axes: those of the layout, and `others` (or Replicate) where it says nothing."""
        found = list(others if others is not None else (REPLICATE,) * len(self.mesh.shape))
        if not isinstance(layout, Mapping):
            found[self.axis] = layout
            return tuple(found)
        for name, place in layout.items():
            found[self.mesh.axis(name)] = place
        return tuple(found)

    def enter(self, x: Any, layout: Layout, whole: Mapping[int, int] | None = None, watched: bool = True) -> DTensor:
        """A tensor on the mesh: one that is there as it is, a plain one as what each rank holds under `layout`.

        `whole` gives the global size of cut dims where it is known, so that the ranks need not tell each other. What
        nobody will have `watched` by hooks needs no node of its own in the graph."""
        if isinstance(x, DTensor):
            if x._layout.mesh is not self.mesh:
                axis = self.mesh.axis_names[self.axis]
                raise MeshError(
                    f"a tensor on {x._layout.mesh!r} meets a module parallelized over {self.mesh!r}; use the mesh of "
                    f"the tensors, parallelize_module(module, mesh, plan, axis={axis!r})"
                )
            return x
        key = None if self.mesh.comm.simulated else (x.shape, x.stride(), x.dtype, x.device, _key(layout))
        known = self._known.get(key)
        if known is not None:
            return enter(x, known) if watched or x.grad_fn is None else wrap(x, known)
        places = self.places(layout)
        mine = getattr(x, "ranks", (x,))[0].shape  # simulated ranks may differ where a dim is cut
        cut = {p.dim % len(mine) for p in places if isinstance(p, Shard) and -len(mine) <= p.dim < len(mine)}
        known = {dim % len(mine): size for dim, size in (whole or {}).items() if -len(mine) <= dim < len(mine)}
        shape = [known.get(d, n) for d, n in enumerate(mine)] if cut and cut <= known.keys() else None
        laid = DTensor.from_local(x, self.mesh, places, shape=shape)
        if key is not None and (shape or not cut):  # else the sizes that other ranks hold may change from call to call
            _remember(self._known, key, laid._layout)
        return laid

    def enter_once(self, x: Any, layout: Layout, whole: Mapping[int, int]) -> DTensor:
        """The same for modules that do not write to their input: those that get one plain tensor share what it is on
        the mesh, and one reduction of its gradient."""
        if isinstance(x, DTensor):
            return self.enter(x, layout)
        key = (self.mesh, self.axis, _key(layout), tuple(whole.items()))
        return entered_once(x, key, lambda x: self.enter(x, layout, whole, watched=False))

    def move(self, x: DTensor, layout: Layout, given: Any = None) -> DTensor:
        """The tensor laid out so; axes that the layout does not speak of stay as they are. What they cut of the leading
        dims of `given`, the module's input, they cut of this: a batch stays cut, also where it was cheaper to gather it
        than a parameter which those axes cut.

        A plain Shard(dim) asks for no particular sizes: a tensor that is cut along dim already stays, however it is."""
        before = given._layout if isinstance(given, DTensor) and not self.alone else None
        key = (x._layout, before, _key(layout))
        if key not in self._moves:
            asked = self.places(layout, x.placements if before is None else self._as_before(x._layout, before))
            settled = tuple(_unless_cut(want, have, x.dim()) for want, have in zip(asked, x.placements))
            _remember(self._moves, key, None if settled == x.placements else _target(x._layout, settled))
        target = self._moves[key]
        if target is None:
            return x
        if x.placements[self.axis].is_shard() and target.placements[self.axis].is_replicate() and _has_version(x):
            return _gathered_once(x, target, self.axis)
        return _moved(x, target)

    def _as_before(self, output: Any, given: Any) -> tuple[Placement, ...]:
        number = given.dtype.is_floating_point or given.dtype.is_complex  # else ids, which get a dim more
        leading = min(len(given.shape), len(output.shape)) - number
        return tuple(
            came if axis != self.axis and isinstance(came, Shard) and came.dim < leading else have
            for axis, (have, came) in enumerate(zip(output.placements, given.placements))
        )

    def leave(self, x: DTensor) -> torch.Tensor:
        """The local tensor. What simulated ranks hold alike is one tensor, and a plain one if all do: a plain parameter
        that meets it gets its gradient once, as on every process."""
        comm = self.mesh.comm
        if not comm.simulated:
            return x._local if type(x._local) is torch.Tensor and x._local.grad_fn is not None else x.to_local()
        if not all(p.is_replicate() for p in x.placements):
            return x.to_local()
        return x.full_tensor() if len(set(comm.spectators)) == 1 else leave(x)  # type: ignore[attr-defined]

    def lay_out(self, param: torch.Tensor, placement: Placement, source: int | None) -> DTensor:
        """A parameter or buffer with this placement on the axis; one that is distributed keeps its other axes."""
        if not isinstance(param, DTensor):
            return distribute_tensor(param.detach(), self.mesh, self.places(placement), src_data_rank=source)
        if param._layout.mesh is not self.mesh:
            raise MeshError(
                f"a parameter lies on {param._layout.mesh!r}, its module is parallelized over {self.mesh!r}"
            )
        value: Any = param.detach()
        return value.redistribute(placements=self.places(placement, param.placements))

    def __deepcopy__(self, memo: Any) -> Along:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Along, (self.mesh, self.axis)


def _has_version(x: DTensor) -> bool:
    """Whether a tensor can tell that it has been written to; one made in inference mode cannot."""
    return not x._layout.mesh.comm.first(x._local).is_inference()


def _target(layout: TensorLayout, places: tuple[Placement, ...]) -> TensorLayout:
    target = layout.replace(placements=places)
    return target.replace(stride=None) if plan_steps(layout, target) else target  # what has not moved is as it was


def _moved(x: DTensor, target: TensorLayout) -> DTensor:
    """x.redistribute, with the layout that it comes to known beforehand."""
    return wrap(move(x._local, x._layout, target, _NOTE), target)


def _gathered_once(x: DTensor, target: TensorLayout, axis: int) -> DTensor:
    """The tensor made whole, kept on it: query, key and value projections of one input share the gathering, and the
    one of their gradients."""
    if x._spreads is None:
        x._spreads = {}
    key, now = ("moved", target, torch.is_grad_enabled()), (x._local, x._version)
    found = x._spreads.get(key)
    if found is None or found[0] is not now[0] or found[1] != now[1]:
        found = x._spreads[key] = (*now, _moved(x, target))
        note_gathered(x, found[2], axis)
    return found[2]


def _key(layout: Layout) -> Any:
    return layout if isinstance(layout, Placement) else tuple(layout.items())


def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    if len(table) >= 1024:
        table.clear()
    table[key] = value


def _unless_cut(want: Placement, have: Placement, ndim: int) -> Placement:
    if (
        isinstance(want, Shard)
        and want.pieces is None
        and isinstance(have, Shard)
        and want.dim % max(ndim, 1) == have.dim
    ):
        return have
    return want


def refuse(x: Any, what: str) -> NoReturn:
    """Only tensors can be laid out."""
    raise LayoutError(f"{what} is a {type(x).__name__}, not a tensor; give it the layout None")
