"""Random numbers for distributed tensors: new ones in a layout, or written into a tensor that is there."""

from __future__ import annotations

import zlib
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from shardwise.comm.base import Comm
from shardwise.comm.capturing import tape_here, tapes
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.context import relaxed
from shardwise.layout import Layout, Partial
from shardwise.layout.placement import REPLICATE
from shardwise.layout.shapes import dense_stride, is_dense
from shardwise.mesh import Mesh
from shardwise.random import torch_stream
from shardwise.random.agreement import note_draw
from shardwise.random.distributions import Distribution
from shardwise.random.fill import fill_held
from shardwise.random.generator import TORCH, next_key, stream
from shardwise.strategy.memory import copied_stride
from shardwise.torch_private.autograd import is_recorded
from shardwise.torch_private.tensors import is_abstract
from shardwise.wrapper import Wrapper, after_fill, before_fill, wrap


def drawn(layout: Layout, what: Distribution, generator: torch.Generator | None = None, in_place: bool = False) -> Any:
    """A new tensor of this layout (Replicate where that is Partial) with numbers of this distribution; those that torch
    draws `in_place` into a tensor with the layout's strides, if it is said."""
    stride = layout.stride
    whole = [REPLICATE if p.is_partial() else p for p in layout.placements]
    layout = layout.replace(placements=whole, stride=copied_stride(layout.shape, layout.stride))
    comm = layout.mesh.comm

    def empty(shape: tuple[int, ...]) -> torch.Tensor:
        stride = dense_stride(shape, layout.stride)
        return torch.empty_strided(shape, stride, dtype=layout.dtype, device=layout.device)

    if comm.outside:  # the stream goes on as on the mesh's ranks
        _pass_by(layout, what, generator)
        return wrap(comm.shared(torch.empty(0 if layout.shape else (), dtype=layout.dtype)), layout)
    local = comm.bind(empty, _split(layout))(comm.per_rank(layout.local_shape_at))
    fill_local(local, layout, what, generator, stride if in_place else None)
    return wrap(local, layout)


def fill(x: Wrapper, what: Distribution, generator: torch.Generator | None = None) -> torch.Tensor:
    """Overwrite the values of `x`, and return it."""
    layout = x._layout
    if layout.mesh.comm.outside:
        _pass_by(layout, what, generator, in_place=True)
        return x
    if is_recorded(x) or layout.is_partial or stream() == TORCH:
        return x.copy_(drawn(layout, what, generator, in_place=True))
    for told in before_fill:
        told(x, f"{what.name}_")
    fill_local(x._local, layout, what, generator)
    if not layout.mesh.comm.first(x._local).is_inference():  # those have no version
        torch.autograd.graph.increment_version(layout.mesh.comm.values(x._local))
    for filled in after_fill:
        filled(x)
    return x


def fill_local(
    local: object,
    layout: Layout,
    what: Distribution,
    generator: torch.Generator | None = None,
    stride: tuple[int, ...] | None = None,
) -> None:
    """Fill every rank's local tensor of a layout. All ranks take one key, whatever they hold. `stride` is that of the
    tensor on one device, if it is not the layout's: torch draws other numbers where there are holes in memory."""
    comm = layout.mesh.comm
    first = comm.first(local)
    if is_abstract(first):
        return
    if tapes and (tape := tape_here()) is not None:
        if generator not in (None, torch.default_generator):
            tape.refuse(f"{what.name}: draws from a generator of its own")
        held, split = comm.structure(local), _split(layout)
        if stream() == TORCH:
            again = lambda *values: fill_local(comm.assemble(held, values), layout, what, generator, stride)  # noqa: E731
            tape.fill(what.name, None, again, comm.values(local))
            return

        def put(key: int, *values: torch.Tensor) -> None:
            numbers = lambda local, region: fill_held(local, region, layout.shape, what, key)  # noqa: E731
            comm.bind(numbers, split)(comm.assemble(held, values), comm.per_rank(layout.region))

        tape.fill(what.name, lambda: common_key(layout.mesh, generator), put, comm.values(local))
        return
    regions, split = comm.per_rank(layout.region), _split(layout)
    if stream() == TORCH:
        note_torch_draw(layout.mesh, generator)
        stride = layout.stride if stride is None else _like_in_memory(layout.shape, stride)
        parts = torch_stream.chunks(layout.shape, stride, layout.dtype, layout.device, what, generator)
        for start, numbers in parts:
            comm.bind(torch_stream.keep_part, split)(local, regions, layout.shape, start, numbers)
        return
    key = common_key(layout.mesh, generator)
    comm.bind(lambda local, region: fill_held(local, region, layout.shape, what, key), split)(local, regions)


def _pass_by(layout: Layout, what: Distribution, generator: torch.Generator | None, in_place: bool = False) -> None:
    """What a rank outside of the mesh does with a draw: its generator goes on as those of the mesh's ranks do."""
    if stream() != TORCH:
        next_key(generator)
        return
    stride = _like_in_memory(layout.shape, layout.stride) if in_place else layout.stride
    for _ in torch_stream.chunks(layout.shape, stride, layout.dtype, layout.device, what, generator):
        pass


def _like_in_memory(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in the same order, with holes where there are some, but never large ones."""
    return stride if is_dense(shape, stride) else tuple(2 * step for step in dense_stride(shape, stride))


def _split(layout: Layout) -> tuple[int, ...]:
    return tuple(axis for axis, p in enumerate(layout.placements) if not p.is_replicate())


# -- one key for all ranks -------------------------------------------------------------------------------------------
def common_key(mesh: Mesh, generator: torch.Generator | None = None) -> int:
    """The next key, the same on all ranks of a mesh. Ranks that are processes have a generator each, and compare their
    keys (`agreement.py`); ranks that are threads share one, and one of them draws."""
    comm = mesh.comm
    if tapes and (tape := tape_here()) is not None:
        tape.refuse("a random op draws a key for numbers that are not the library's own")
    if comm.simulated or comm.outlined or comm.outside or all(k == 1 for k in mesh.shape):
        return next_key(generator)
    if _are_threads(comm):
        key = next_key(generator) if not any(comm.coords) else 0
        return _summed(mesh, key)
    key = next_key(generator)
    note_draw(mesh, key)
    return key


def note_torch_draw(mesh: Mesh, generator: torch.Generator | None) -> None:
    """Take note of a draw from torch's own stream: of the state of its generator."""
    comm = mesh.comm
    if comm.simulated or comm.outlined or comm.outside or all(k == 1 for k in mesh.shape) or _are_threads(comm):
        return
    generator = torch.default_generator if generator is None else generator
    note_draw(mesh, zlib.crc32(generator.get_state().numpy().tobytes()))


def _are_threads(comm: Comm) -> TypeGuard[ProcessGroupComm]:
    return isinstance(comm, ProcessGroupComm) and dist.get_backend(comm.group(0)) == "threaded"


def _summed(mesh: Mesh, key: int) -> int:
    layout = Layout.make(mesh, [Partial("sum")] * len(mesh.shape), (1,), torch.int64)
    local = torch.tensor([key - (key >> 63 << 64)], dtype=torch.int64, device=mesh.device)
    with relaxed(), torch.no_grad():
        return int(wrap(mesh.comm.shared(local), layout).full_tensor()) % (1 << 64)
