"""Random numbers for distributed tensors: new ones in a layout, or written into a tensor that is there."""

from __future__ import annotations

import zlib
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from shardwise.comm.base import Comm
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.context import relaxed
from shardwise.layout import Layout, Partial
from shardwise.layout.layout import dense_stride
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import Mesh
from shardwise.random import torch_stream
from shardwise.random.agreement import note_draw
from shardwise.random.distributions import Distribution
from shardwise.random.fill import fill_held, is_abstract
from shardwise.random.generator import TORCH, next_key, stream
from shardwise.strategy.memory import copied_stride
from shardwise.torch_private import is_recorded
from shardwise.wrapper import Wrapper, wrap


def drawn(layout: Layout, what: Distribution, generator: torch.Generator | None = None) -> Any:
    """A new tensor of this layout (Replicate where that is Partial) with numbers of this distribution."""
    whole = [REPLICATE if p.is_partial() else p for p in layout.placements]
    layout = layout.replace(placements=whole, stride=copied_stride(layout.shape, layout.stride))
    comm = layout.mesh.comm

    def empty(shape: tuple[int, ...]) -> torch.Tensor:
        stride = dense_stride(shape, layout.stride)
        return torch.empty_strided(shape, stride, dtype=layout.dtype, device=layout.device)

    local = comm.bind(empty, _split(layout))(comm.per_rank(layout.local_shape_at))
    fill_local(local, layout, what, generator)
    return wrap(local, layout)


def fill(x: Wrapper, what: Distribution, generator: torch.Generator | None = None) -> torch.Tensor:
    """Overwrite the values of `x`, and return it."""
    layout = x._layout
    if is_recorded(x) or layout.is_partial or stream() == TORCH:
        return x.copy_(drawn(layout, what, generator))
    fill_local(x._local, layout, what, generator)
    if not layout.mesh.comm.first(x._local).is_inference():  # those have no version
        torch.autograd.graph.increment_version(layout.mesh.comm.values(x._local))
    return x


def fill_local(local: Any, layout: Layout, what: Distribution, generator: torch.Generator | None = None) -> None:
    """Fill every rank's local tensor of a layout. All ranks take one key, whatever they hold."""
    comm = layout.mesh.comm
    first = comm.first(local)
    if is_abstract(first):
        return
    regions, split = comm.per_rank(layout.region), _split(layout)
    if stream() == TORCH:
        note_torch_draw(layout.mesh, generator)
        parts = torch_stream.chunks(layout.shape, layout.stride, layout.dtype, layout.device, what, generator)
        for start, numbers in parts:
            comm.bind(torch_stream.keep_part, split)(local, regions, layout.shape, start, numbers)
        return
    key = common_key(layout.mesh, generator)
    comm.bind(lambda local, region: fill_held(local, region, layout.shape, what, key), split)(local, regions)


def _split(layout: Layout) -> tuple[int, ...]:
    return tuple(axis for axis, p in enumerate(layout.placements) if not p.is_replicate())


# -- one key for all ranks -------------------------------------------------------------------------------------------
def common_key(mesh: Mesh, generator: torch.Generator | None = None) -> int:
    """The next key, the same on all ranks of a mesh. Ranks that are processes have a generator each, and compare their
    keys (`agreement.py`); ranks that are threads share one, and one of them draws."""
    comm = mesh.comm
    if comm.simulated or all(k == 1 for k in mesh.shape):
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
    if comm.simulated or all(k == 1 for k in mesh.shape) or _are_threads(comm):
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
