"""What `print` shows of a distributed tensor: its values once, abbreviated as torch does it, then where they live.

Nothing is communicated. Only the elements that are printed are looked at: the corners of a large tensor, put together
from the ranks that hold them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from shardwise.comm.base import Comm
from shardwise.comm.shown import Wanted, numbers_of, picked, readable
from shardwise.drawing import rank_names
from shardwise.errors import AutogradError
from shardwise.layout import Layout, Partial, Placement
from shardwise.layout.holders import holders_of
from shardwise.layout.split import Intervals, positions
from shardwise.layout.tiles import Tile
from shardwise.protocols import LocalValue
from shardwise.torch_private.tensors import is_abstract, is_transformed, print_limits
from shardwise.wrapper import Wrapper

_MOST_LETTERS = 160  # of one placement


def text_of(tensor: Wrapper, requires_grad: bool) -> str:
    """What `repr` gives."""
    layout = tensor._layout
    before = "Parameter containing:\n" if getattr(tensor, "_is_param", False) else ""
    indent = " " * len("DTensor(")
    try:
        values = _values(tensor, layout, len(indent))
    except AutogradError as error:  # its memory was given back
        values = str(error)
    facts = [
        f"shape={layout.shape}",
        f"dtype={layout.dtype}",
        f"placements=[{places_of(layout)}], mesh={layout.mesh!r}",
    ]
    if layout.device.type != "cpu":
        facts.append(f"device={str(layout.device)!r}")
    if requires_grad:
        facts.append("requires_grad=True")
    return f"{before}DTensor({values},\n{indent}{_folded(facts, ', ', len(indent))})"


def _folded(parts: Sequence[str], between: str, indent: int) -> str:
    """Parts in lines as long as `torch.set_printoptions(linewidth=...)` says; a part is not taken apart."""
    lines, width = [parts[0]], print_limits()[2] - indent - 1
    for part in parts[1:]:
        if len(lines[-1]) + len(between) + len(part) <= width:
            lines[-1] += between + part
        else:
            lines.append(part)
    return f"{between.rstrip()}\n{' ' * indent}".join(lines)


def places_of(layout: Layout) -> str:
    """The placements, each of bounded length."""
    return ", ".join(map(_short, layout.placements))


def _short(placement: Placement) -> str:
    said = repr(placement)
    return said if len(said) <= _MOST_LETTERS else f"{said[:_MOST_LETTERS]}...)"


def _values(tensor: Wrapper, layout: Layout, indent: int) -> str:
    comm: Comm = layout.mesh.comm
    if comm.outside:
        return f"nothing here: this rank is outside of the mesh of {rank_names(layout.mesh.ranks)}"
    coming = tensor.__dict__.get("_coming")
    if coming is not None and coming.failed:
        return "the move that was to bring the values failed; using them says why"
    if coming is not None:
        return "the values are on their way here; the first use of them, or .wait(), waits"
    if is_abstract(comm.first(tensor._local)):  # on meta, or on an outlined mesh
        return "..."
    pending = [a for a, p in enumerate(layout.placements) if p.is_partial() and layout.mesh.shape[a] > 1]
    is_whole = layout.is_plain or (comm.simulated and not pending)
    if is_whole:
        text = numbers_of(layout.shape, lambda wanted: _gathered(comm, tensor._local, layout, wanted), indent)
        said = _group(comm, tensor._local, layout)
    else:
        local = comm.first(tensor._local)
        text = numbers_of(tuple(local.shape), lambda wanted: picked(local, wanted), indent)
        rank, box = _place(layout, comm.coords_here()[0])
        said = f"rank {rank} holds {box or 'the whole'}"
        if pending:
            said = _folded([*_pending(layout, pending, rank, box), ".full_tensor() gives the value"], " ", indent)
    return f"{text},\n{' ' * indent}{said}" if said else text


def _group(comm: Comm, local: object, layout: Layout) -> str:
    """Of which ranks a tensor on a simulated sub-mesh is shown, where each group of ranks has one of its own."""
    places, size = comm.coords_here(), len(layout.mesh.ranks)
    if not comm.simulated or len(places) == size:
        return ""
    values: dict[Sequence[int], torch.Tensor] = {}
    ranks: tuple[torch.Tensor, ...] = local.ranks  # type: ignore[attr-defined]
    if all(values.setdefault(coords, value) is value for coords, value in zip(places, ranks, strict=True)):
        return ""
    others = len(places) // size - 1
    return (
        f"the values of {rank_names(layout.mesh.ranks)}; "
        f"{'the other group' if others == 1 else f'the other {others} groups'} of this sub-mesh may hold others"
    )


def _pending(layout: Layout, axes: Sequence[int], rank: int, box: str) -> tuple[str, str]:
    """What a part of a reduction is, in pieces that fit into a line."""
    names = " and ".join(repr(layout.mesh.axis_names[a]) for a in axes)
    parts = 1
    for axis in axes:
        parts *= layout.mesh.shape[axis]
    placement = layout.placements[axes[0]]
    op = placement.reduce_op if isinstance(placement, Partial) else "sum"
    where = f" at {box}" if box else ""
    return f"rank {rank}'s part{where}", f"of a pending {op} over {names} ({parts} parts);"


def _place(layout: Layout, coords: Sequence[int]) -> tuple[int, str]:
    """A rank and which elements it holds; no words for a tensor of one value."""
    rank = layout.mesh.ranks[_row_major(coords, layout.mesh.shape)]
    if not layout.ndim:
        return rank, ""
    tiles = layout.tiles_at(coords)
    if not all(layout.local_shape(rank)):
        return rank, "no elements"
    return rank, " and ".join(map(_box, tiles[:3])) + (f" and {len(tiles) - 3} more" if len(tiles) > 3 else "")


def _box(tile: Tile) -> str:
    sides = zip(tile.offsets, tile.sizes, strict=True)
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in sides) + "]"


def _row_major(coords: Sequence[int], shape: Sequence[int]) -> int:
    index = 0
    for c, k in zip(coords, shape, strict=True):
        index = index * k + c
    return index


# -- the numbers -------------------------------------------------------------------------------------------
def _gathered(comm: Comm, local: LocalValue, layout: Layout, wanted: Wanted) -> torch.Tensor:
    """The wanted elements of a tensor whose ranks are all here, or all hold the whole."""
    first = comm.first(local)
    if layout.is_plain or is_transformed(first):
        return picked(first, wanted)
    ranks: tuple[torch.Tensor, ...] = local.ranks  # type: ignore[attr-defined]
    where = {coords: i for i, coords in reversed(list(enumerate(comm.coords_here())))}
    spots = [holders_of(layout, dim, held, {}) for dim, held in enumerate(wanted)]
    base = [0] * len(layout.mesh.shape)

    def build(dim: int, coords: list[int], slices: list[tuple[Intervals, Intervals]]) -> torch.Tensor:
        if dim == layout.ndim:
            return _cut(ranks[where[tuple(coords)]], slices)
        parts = []
        for spot, common in spots[dim]:
            there = list(coords)
            for axis, coord in spot:
                there[axis] = coord
            parts.append(build(dim + 1, there, [*slices, (layout.held(dim, there), common)]))
        return _in_order(parts, dim, [common for _, common in spots[dim]])

    return build(0, base, [])


def _cut(local: torch.Tensor, slices: Sequence[tuple[Intervals, Intervals]]) -> torch.Tensor:
    local = readable(local)
    for dim, (held, common) in enumerate(slices):
        if held != common:
            inside = positions(held, common)
            local = torch.cat([local.narrow(dim, a, b - a) for a, b in inside], dim)
    return local


def _in_order(parts: Sequence[torch.Tensor], dim: int, sets: Sequence[Intervals]) -> torch.Tensor:
    """Parts with these indices of a dim as one tensor, in the order of the indices."""
    if len(parts) == 1:
        return parts[0]
    joined = torch.cat(list(parts), dim)
    runs = list(itertools.chain(*sets))
    if all(before[1] <= after[0] for before, after in itertools.pairwise(runs)):
        return joined
    indices = [i for a, b in runs for i in range(a, b)]
    order = sorted(range(len(indices)), key=indices.__getitem__)
    return joined.index_select(dim, torch.tensor(order, device=joined.device))
