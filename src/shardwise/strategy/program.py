"""What the programs of ops are made of: local work on what the ranks hold, and on what they ask the others for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from shardwise.comm.base import Comm, Coords
from shardwise.comm.bridge import beside, constant_of, share
from shardwise.comm.outside import held_of
from shardwise.comm.record import Note
from shardwise.context import is_strict, refuse_in_program, running_op
from shardwise.layout import Layout, Partial, Shard
from shardwise.layout.nesting import parent_sets
from shardwise.layout.placement import REPLICATE
from shardwise.layout.split import Intervals, count
from shardwise.move import plan_steps
from shardwise.move.pack import take
from shardwise.move.run import run_steps
from shardwise.move.window import Needs, windows_of
from shardwise.protocols import LocalValue
from shardwise.strategy.empty_ranks import imitating, is_empty_here_alone, rank_to_imitate
from shardwise.torch_private.autograd import is_recorded, is_transforming
from shardwise.torch_private.tensors import is_any_autocast_enabled
from shardwise.wrapper import Wrapper, wrap

# A distributed tensor as programs use it: torch's methods, `redistribute`, `_layout` and `_local`. DTensor is above.
Tensor: TypeAlias = Any


class Windowed:
    """A tensor of which every rank gets the indices `needs[dim](coords)` of some dims, cut or not: with halos."""

    def __init__(self, tensor: Tensor, needs: dict[int, Needs]) -> None:
        self.tensor, self.needs = tensor, needs


def run_local(
    func: Callable[..., Any],
    operands: Sequence[object],
    outputs: Layout | Sequence[Layout],
    value_at: Callable[[Coords], Any] | None = None,
) -> Any:
    """What `func` makes of the values that each rank holds, as distributed tensors of the layouts `outputs`, which are
    the caller's promise.

    Operands are tensors, `Windowed` ones, or anything else, which is passed on as it is; the last argument of `func` is
    `value_at` of a rank's coordinates, if given. Where an axis splits the work (an operand or a result is not Replicate
    there), the operands that are Replicate are spread: their gradients add up."""
    wanted = [outputs] if isinstance(outputs, Layout) else list(outputs)
    tensors = [op.tensor if isinstance(op, Windowed) else op for op in operands]
    layouts = [t._layout for t in tensors if isinstance(t, Wrapper)]
    mesh = wanted[0].mesh
    along = zip(*(layout.placements for layout in (*layouts, *wanted)))
    split = tuple(axis for axis, places in enumerate(along) if not all(p.is_replicate() for p in places))
    if mesh.comm.outside:
        held = [t._local for t in tensors if isinstance(t, Wrapper)]
        made = tuple(wrap(held_of(layout, held), layout) for layout in wanted)
        return made[0] if isinstance(outputs, Layout) else made
    values = [_local(op, split) for op in operands]
    if value_at is not None:
        values.append(mesh.comm.per_rank(value_at))
    if not mesh.comm.simulated:
        func = _imitating(func, operands, [*layouts, *wanted], value_at)
    result = mesh.comm.bind(func, split)(*values)
    if isinstance(outputs, Layout):
        return _wrapped(result, outputs, split)
    return tuple(_wrapped(local, layout, split) for local, layout in zip(result, wanted, strict=True))


def _imitating(
    func: Callable[..., Any],
    operands: Sequence[object],
    layouts: Sequence[Layout],
    value_at: Callable[[Coords], Any] | None,
) -> Callable[..., Any]:
    """`func`; on a rank without elements of tensors with these layouts, one that imitates a rank that has some."""
    tried, key = layouts[0].mesh.tried, (running_op(), *layouts)
    if key not in tried:
        tried.add(key, (rank_to_imitate(layouts) if is_empty_here_alone(layouts) else None, []))
    coords, asked = tried[key]
    if coords is None:
        return func
    shapes = [_shape_at(op, coords) for op in operands if isinstance(op, (torch.Tensor, Windowed))]
    return imitating(func, shapes, () if value_at is None else (value_at(coords),), asked=asked)


def _shape_at(operand: torch.Tensor | Windowed, coords: Coords) -> tuple[int, ...]:
    """The sizes of what the rank at `coords` gets of an operand."""
    if not isinstance(operand, Windowed):
        return operand._layout.local_shape_at(coords) if isinstance(operand, Wrapper) else tuple(operand.shape)
    held = operand.tensor._layout.local_shape_at(coords)
    return tuple(count(operand.needs[d](coords)) if d in operand.needs else n for d, n in enumerate(held))


def _wrapped(local: torch.Tensor, layout: Layout, split: tuple[int, ...]) -> Tensor:
    """A result with its layout. Under autocast the local result knows the dtype. Replicas that were computed along the
    axes `split` become one: as two tensors, each would send a gradient to the other operand of the next call."""
    comm = layout.mesh.comm
    if is_any_autocast_enabled():
        layout = layout.replace(dtype=comm.first(local).dtype)
    replicas = [axis for axis in split if layout.placements[axis].is_replicate()]
    if replicas and comm.simulated:
        local = _one_of_replicas(comm, local, replicas)
    return wrap(local, layout)


def _one_of_replicas(comm: Comm, local: LocalValue, axes: Sequence[int]) -> LocalValue:
    if is_transforming():
        return share(comm, local, axes)
    if not any(value.requires_grad for value in comm.values(local)):
        return comm.first_of_replicas(local, axes)
    shared = share(comm, local, axes)  # views made by a Function, which cannot be written
    return comm.rebuild(shared, [torch.ops.aten._unsafe_view(value, value.shape) for value in comm.values(shared)])


def _local(operand: Any, split: tuple[int, ...]) -> Any:
    """What `func` gets of an operand: spread along `split`, with the indices it asks for."""
    windowed = isinstance(operand, Windowed)
    tensor = operand.tensor if windowed else operand
    if not isinstance(tensor, Wrapper):
        return tensor
    layout, comm = tensor._layout, tensor._layout.mesh.comm
    note = Note(running_op() or "window")
    spread = tuple(axis for axis in split if layout.placements[axis].is_replicate())
    local = run_steps(comm, plan_steps(layout, layout, spread), tensor._local, note)
    if not windowed:
        return local
    windows = windows_of(layout, tuple(operand.needs.items()))
    if windows.steps and is_strict():
        refuse_in_program(note.op, layout, f"windows along dims {sorted(operand.needs)}")
    for dim in windows.held_whole:
        local = comm.bind(take, split)(local, dim, comm.per_rank(operand.needs[dim]))
    return run_steps(comm, windows.steps, local, note)


def whole(x: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    """`x` with these dims (None: all) gathered and nothing pending."""
    gone = lambda p: p.is_partial() or (p.is_shard() and (dims is None or p.dim in dims))
    return x.redistribute(placements=[REPLICATE if gone(p) else p for p in x._layout.placements])


def reduced(x: Tensor) -> Tensor:
    """`x` with nothing pending, cut as it was."""
    return whole(x, ())


def unfinished(x: Tensor) -> Tensor:
    """`x` with what is pending taken for finished: for ops that look at its shape and not at its values."""
    layout = x._layout
    places = [REPLICATE if p.is_partial() else p for p in layout.placements]
    pending = [axis for axis, p in enumerate(layout.placements) if p.is_partial()]
    return wrap(share(layout.mesh.comm, x.detach()._local, pending), layout.replace(placements=places))


def needs_grad(*tensors: Tensor) -> bool:
    """Whether the program must be differentiable."""
    return any(map(is_recorded, tensors))


def constant(value: Tensor, sources: Sequence[Tensor], missing: str = "") -> Tensor:
    """A result that requires grad as in torch, though it does not change with the op's operands; their gradients are
    zeros. Where torch has no derivative for the op, `missing` is its name: a backward pass raises torch's error."""
    if not needs_grad(*sources):
        return value
    return run_local(lambda v, *held: constant_of(v, held, missing), [value, *sources], value._layout)


def of_one_list(results: Sequence[Tensor]) -> list[Tensor]:
    """The results of one call on lists: as in torch, where one of them requires grad, all do."""
    sources = [y._layout.mesh.comm.first(y._local) for y in results if y.requires_grad]
    if not sources or is_transforming():
        return list(results)

    def alike(y: Tensor) -> Tensor:
        if y.requires_grad or not (y.dtype.is_floating_point or y.dtype.is_complex):
            return y
        comm, local = y._layout.mesh.comm, y._local
        return wrap(comm.rebuild(local, [beside(v, sources) for v in comm.values(local)]), y._layout)

    return [alike(y) for y in results]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of values of `dtype` are taken in: float32 for halves."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def without_dims(layout: Layout, dims: Sequence[int], keepdim: bool, reduce_op: str = "sum") -> Layout:
    """The layout of what ranks make of their parts by reducing these dims: pending along the axes that cut them."""
    left = [d for d in range(layout.ndim) if keepdim or d not in dims]
    shape = tuple(1 if d in dims else layout.shape[d] for d in left)
    kept = lambda p: p.at(left.index(p.dim)) if isinstance(p, Shard) else p
    places = [Partial(reduce_op) if any(map(p.is_shard, dims)) else kept(p) for p in layout.placements]
    return layout.replace(shape=shape, stride=None, placements=places)


def padded(x: torch.Tensor, sides: Mapping[int, tuple[int, int]], value: float = 0) -> torch.Tensor:
    """`x` with rows before and after what it has of some dims; less rows where negative."""
    return F.pad(x, [n for d in reversed(range(x.dim())) for n in sides.get(d, (0, 0))], value=value) if sides else x


def indices(held: Intervals, device: torch.device | None = None) -> torch.Tensor:
    """The indices of a set, in order."""
    return torch.cat([torch.arange(a, b, device=device) for a, b in ((0, 0), *held)])


def leaves_empty(layout: Layout) -> bool:
    """Whether some rank holds nothing, which many kernels refuse."""
    return any(() in parent_sets(layout.mesh, layout.placements, d, n) for d, n in enumerate(layout.shape))
