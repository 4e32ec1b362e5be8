"""Random numbers for distributed tensors: new ones in a layout, or written into a tensor that is there."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from shardwise.comm.base import Coords
from shardwise.context import relaxed
from shardwise.errors import CommError
from shardwise.layout import Layout, Partial
from shardwise.layout.layout import dense_stride
from shardwise.layout.placement import REPLICATE
from shardwise.random import torch_stream
from shardwise.random.boxes import Intervals
from shardwise.random.distributions import Distribution
from shardwise.random.fill import fill_held, is_abstract
from shardwise.random.generator import TORCH, next_key, stream
from shardwise.wrapper import wrap


def drawn(layout: Layout, what: Distribution, generator: torch.Generator | None = None) -> Any:
    """A new tensor of this layout (Replicate where that is Partial) with numbers of this distribution."""
    whole = [REPLICATE if p.is_partial() else p for p in layout.placements]
    layout = layout.replace(placements=whole, stride=dense_stride(layout.shape, layout.stride))
    comm = layout.mesh.comm

    def empty(shape: tuple[int, ...]) -> torch.Tensor:
        stride = dense_stride(shape, layout.stride)
        return torch.empty_strided(shape, stride, dtype=layout.dtype, device=layout.device)

    local = comm.bind(empty, _split(layout))(comm.per_rank(layout.local_shape_at))
    fill_local(local, layout, what, generator)
    return wrap(local, layout)


def fill(x: Any, what: Distribution, generator: torch.Generator | None = None) -> Any:
    """`x` with its values overwritten."""
    layout = x._layout
    recorded = torch.is_grad_enabled() and x.requires_grad
    if recorded or layout.is_partial or stream() == TORCH:
        return x.copy_(drawn(layout, what, generator))
    fill_local(x._local, layout, what, generator)
    if not layout.mesh.comm.first(x._local).is_inference():  # those have no version
        torch.autograd.graph.increment_version(layout.mesh.comm.values(x._local))
    return x


def fill_local(local: Any, layout: Layout, what: Distribution, generator: torch.Generator | None = None) -> None:
    """Every rank's local tensor of a layout filled; all ranks take one key, whatever they hold."""
    comm = layout.mesh.comm
    first = comm.first(local)
    if is_abstract(first):
        return
    sides, split = comm.per_rank(lambda coords: held_sides(layout, coords)), _split(layout)
    if stream() == TORCH:
        parts = torch_stream.chunks(layout.shape, layout.stride, layout.dtype, layout.device, what, generator)
        for start, numbers in parts:
            comm.bind(torch_stream.keep_part, split)(local, sides, layout.shape, start, numbers)
        return
    key = common_key(layout.mesh, generator)
    comm.bind(lambda local, sides: fill_held(local, sides, layout.shape, what, key), split)(local, sides)


def held_sides(layout: Layout, coords: Coords) -> tuple[Intervals, ...]:
    """The indices of every dim that the rank at `coords` holds."""
    return tuple(layout.held(dim, coords) for dim in range(layout.ndim))


def _split(layout: Layout) -> tuple[int, ...]:
    return tuple(axis for axis, p in enumerate(layout.placements) if not p.is_replicate())


# -- one key for all ranks -------------------------------------------------------------------------------------------
_checked: weakref.WeakSet[Any] = weakref.WeakSet()  # meshes whose ranks were seen to agree


def common_key(mesh: Any, generator: torch.Generator | None = None) -> int:
    """The next key, the same on all ranks of a mesh. Ranks that are processes have a generator each, and the first time
    they compare their keys; ranks that are threads share one, and one of them draws."""
    comm = mesh.comm
    if comm.simulated or all(k == 1 for k in mesh.shape):
        return next_key(generator)
    if torch.distributed.get_backend(comm.group(0)) == "threaded":
        key = next_key(generator) if not any(comm.coords) else 0
        return _reduced(mesh, [_signed(key)], "sum")[0] % (1 << 64)
    key = next_key(generator)
    if mesh not in _checked:
        most, least = _reduced(mesh, [_signed(key), ~_signed(key)], "max")
        if most != ~least:
            raise CommError(
                f"the ranks of {mesh!r} would draw different random numbers: their generators are in different states "
                f"(seed here: {torch.initial_seed() if generator is None else generator.initial_seed()}). Seed all "
                f"ranks alike with shardwise.manual_seed(seed), and draw what differs between ranks with a generator "
                f"of its own or inside shardwise.random.fork()"
            )
        _checked.add(mesh)
    return key


def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


def _reduced(mesh: Any, values: list[int], op: str) -> list[int]:
    layout = Layout.make(mesh, [Partial(op)] * len(mesh.shape), (len(values),), torch.int64)
    local = torch.tensor(values, dtype=torch.int64, device=mesh.device)
    with relaxed(), torch.no_grad():
        return wrap(mesh.comm.shared(local), layout).full_tensor().tolist()
