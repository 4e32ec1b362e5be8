"""Gathering parameters and reducing gradients by functions of the program, by the signatures that FSDP2 gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.comm.capturing import tape_here, tapes
from shardwise.comm.record import Note
from shardwise.errors import MeshError
from shardwise.layout import Layout, Partial
from shardwise.move import start_move
from shardwise.parallel.data.layouts import DataMesh

Arriving = tuple[torch.Tensor, Callable[[], object]]  # what will have arrived, and what waits for it


class AllGather(Protocol):
    """Fills the output with the inputs of all ranks of a group, one after the other.

    It may have a method ``allocate(size, *, dtype, device)``, which makes the output; the input is a part of that."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None: ...


class ReduceScatter(Protocol):
    """Fills the output with this rank's part of the sum of all ranks' inputs.

    It may have a method ``allocate(size, *, dtype, device)``, which makes the input and the output."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None: ...


def gather_by(gather: AllGather, row: torch.Tensor, data: DataMesh) -> Arriving:
    """Begin to gather the rows of all ranks that have parts; gives a matrix."""
    _refuse_capture()
    matrix = allocated(gather, (data.parts * row.numel(),), row.dtype, row.device).view(data.parts, row.numel())
    mine = matrix[data.coords[0]].copy_(row)
    work = gather(output_tensor=matrix.view(-1), input_tensor=mine, group=_group(data), async_op=True)
    return matrix, _waiting(work)


def reduce_by(
    reduce: ReduceScatter, matrix: torch.Tensor, data: DataMesh, unreduced: Layout, reduced: Layout, note: Note
) -> Arriving:
    """Begin to sum a matrix over all ranks; gives this rank's row, as a matrix of one row."""
    _refuse_capture()
    row = allocated(reduce, (matrix.shape[1],), matrix.dtype, matrix.device)
    work = reduce(
        output_tensor=row, input_tensor=matrix.view(-1), group=_group(data), op=dist.ReduceOp.SUM, async_op=True
    )
    if len(data.mesh.shape) == 1:
        return row.unsqueeze(0), _waiting(work)
    _waiting(work)()  # the copies are summed afterwards, by the library
    pending = unreduced.replace(placements=data.placements(Partial(), reduced.placements[-1]))
    return start_move(row.unsqueeze(0), pending, reduced, note, owned=True)


def allocated(collective: object, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """New memory: by the collective's own `allocate`, if it has one."""
    allocate = getattr(collective, "allocate", None)
    make = torch.empty if allocate is None else allocate
    return make(size, dtype=dtype, device=device)


def check_collective(name: str, collective: object, data: DataMesh) -> None:
    """Refuse what cannot be called, and meshes without process groups."""
    if not callable(collective):
        raise TypeError(f"{name}: comm must be a function that communicates, got {collective!r}")
    if data.mesh.comm.simulated or data.mesh.comm.outlined:
        raise MeshError(
            f"{name}: {data.mesh!r} has no process group that the function could communicate in; call it under "
            f"torchrun alone, or leave it out here: the values are the same without"
        )


def _group(data: DataMesh) -> dist.ProcessGroup:
    source = data.mesh.source
    return source.get_group(source.ndim - 1)


def _waiting(work: dist.Work | None) -> Callable[[], object]:
    return work.wait if work is not None else lambda: None


def _refuse_capture() -> None:
    tape = tape_here() if tapes else None
    if tape is not None:
        tape.refuse("a collective of the program's own may do more than compute")
