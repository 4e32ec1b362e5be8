"""`load`: from files into a state, in place. Each block is read once, and its parts go where they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shardwise.checkpoint.agreement import Agreed, agree
from shardwise.checkpoint.holders import Held, Side, check_all, held, side_of
from shardwise.checkpoint.loader import Loader
from shardwise.checkpoint.overlap import check_overlaps
from shardwise.checkpoint.plan import LoadPlan, plan
from shardwise.checkpoint.shared import Sharing
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.targets import Targets, fixed_value
from shardwise.checkpoint.tree import Flat, Json, Value
from shardwise.checkpoint.world import World, as_error
from shardwise.errors import CheckpointError
from shardwise.layout.tiles import Tiles
from shardwise.sharded.tensor import ShardedTensor
from shardwise.tensor import DTensor


@dataclass(frozen=True)
class Loaded:
    """What a load did.

    Attributes:
        step: The step that the checkpoint was saved with.
        missing: Names in `into` that the checkpoint does not have (with `strict=False`).
        unexpected: Names in the checkpoint that `into` does not have (with `strict=False`).
        bytes_read: Bytes that this process read from disk.
        plan: What it did, in integers.
        seconds: How long it took.
    """

    step: int | None
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_read: int
    plan: LoadPlan = field(repr=False)
    seconds: float = 0.0


class Prepared(NamedTuple):
    """A load that may begin: nothing was changed so far."""

    source: Source
    targets: Targets
    pieces: dict[str, list[Held]]  # the memory of the targets
    plan: LoadPlan
    missing: list[str]
    unexpected: list[str]
    sharing: Sharing | None


def prepare(
    source: Source,
    into: Value,
    world: World,
    *,
    strict: bool,
    memory: int,
    also: Mapping[str, Json],
    measure: bool = False,
) -> Prepared:
    """Compare names, shapes and dtypes on all processes, and make the plan. Raises on all of them alike.

    Args:
        also: Further arguments that must be the same everywhere.
        measure: Whether to measure what reading costs.
    """
    targets = Targets(source.entries, source.values)
    pieces: dict[str, list[Held]] = {}
    tied: dict[str, bool] = {}
    error: Exception | None = None
    try:
        _check_places(into)
        targets.collect(into, source.tree)
        check_all(targets.tensors, "loading")
        for name, tensor in targets.tensors.items():
            _check_fits(source, name, tensor)
        pieces = {name: held(tensor) for name, tensor in targets.tensors.items()}
        _check_tied(source, pieces)
        check_overlaps(pieces)
        tied = _tied(targets, pieces)
    except CheckpointError as raised:
        said = str(raised)
        error = raised if said.startswith(("load:", str(source.path))) else CheckpointError(f"{source.path}: {said}")
    except Exception as raised:
        error = raised
    same = {**also, "strict": strict, "memory": memory}
    mine = targets.missing, tied, sorted(targets.taken) if world.size > 1 else []
    agreed = agree(Flat(targets.tensors), world, values=False, also=same, error=error, told=mine)
    missing = _missing([(names, found) for names, found, _ in agreed.told])
    taken = targets.taken.union(*(names for *_, names in agreed.told))
    unexpected = [name for name in (*source.entries, *source.values) if name not in taken]
    if strict and (missing or unexpected):
        raise CheckpointError(_key_error(source, missing, unexpected))
    sharing, hosts = Sharing.of(world), None
    if sharing is not None:
        hosts = sharing.hosts
    several = hosts is not None and len(set(hosts)) > 1
    line = world.from_first(source.line) if measure or several else None
    sides = _sides(targets, agreed, world)
    made = plan(source, sides, world.ranks, world.rank, memory, hosts=hosts, storage=line)
    return Prepared(source, targets, pieces, made, missing, unexpected, sharing)


def _check_places(into: Value) -> None:
    name = fixed_value(into)
    if name is not None:
        what = f"the value {name!r} of `into`" if name else "`into`"
        raise CheckpointError(
            f"load: {what} cannot be replaced in place: it is in no dict and no list; give `into` as one of these"
        )


def _check_fits(source: Source, name: str, tensor: torch.Tensor) -> None:
    entry = source.entries[name]
    if tuple(tensor.shape) != entry.shape:
        raise CheckpointError(
            f"{source.path}: tensor {name!r} has shape {entry.shape}, `into` has {tuple(tensor.shape)} there; "
            f"a table of changes (map=) can split, join and transpose"
        )
    if tensor.dtype != entry.dtype and not source.cast(name, tensor.dtype):
        floats = tensor.dtype.is_floating_point and entry.dtype.is_floating_point
        how = "load into a tensor of that dtype"
        how = f"map=shardwise.checkpoint.Map.cast({tensor.dtype}) converts it" if floats else how
        raise CheckpointError(
            f"{source.path}: tensor {name!r} has dtype {entry.dtype}, `into` has {tensor.dtype} there; {how}"
        )


def _memory(pieces: Sequence[Held]) -> object:
    """Equal for tensors that are one piece of memory; falsy where this process has nothing of a tensor."""
    return tuple((tile, x.data_ptr(), x.stride(), x.dtype) for tile, x in pieces)


def _tied(targets: Targets, pieces: Mapping[str, Sequence[Held]]) -> dict[str, bool]:
    """For each tensor that the checkpoint does not have: whether it is one with another that is loaded, as the head of
    a model may be with its embedding, so that files have one of them. Those that are empty here are not known."""
    if not targets.absent:
        return {}
    known = {_memory(found) for found in pieces.values()}
    mine = {name: _memory(held(tensor)) for name, tensor in targets.absent.items()}
    return {name: memory in known for name, memory in mine.items() if memory}


def _missing(told: Sequence[tuple[Sequence[str], Mapping[str, bool]]]) -> list[str]:
    """The names that some process misses, less those that are one with another on all processes that can tell."""
    known = [tied for _, tied in told]
    names = dict.fromkeys(name for names, _ in told for name in names)
    have = {name: [tied[name] for tied in known if name in tied] for name in names}
    return [name for name, tied in have.items() if not (tied and all(tied))]


def _check_tied(source: Source, tensors: dict[str, list[Held]]) -> None:
    """Raise where two names are one piece of memory in `into`, but have different values in the checkpoint."""
    known: dict[object, str] = {}
    for name, pieces in tensors.items():
        memory = _memory(pieces)
        first = known.setdefault(memory, name) if memory else name
        if first != name and not source.same_values(first, name):
            raise CheckpointError(
                f"{source.path}: {first!r} and {name!r} are one tensor in `into`, but have different values in the "
                f"checkpoint; leave one of them out, and load with strict=False"
            )


def _key_error(source: Source, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    lines = [f"{source.path}: the names in the checkpoint and in `into` differ (strict=False loads what both have)"]
    for what, names in (("not in the checkpoint", missing), ("not in `into`", unexpected)):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            lines.append(f"  {what}: {', '.join(map(repr, names[:8]))}{more}")
    return "\n".join(lines)


def _sides(targets: Targets, agreed: Agreed, world: World) -> dict[str, Side]:
    """Who needs which tiles of each tensor. Where the processes' layouts differ, each tells its own."""
    sides: dict[str, Side] = {}
    known: dict[object, Side] = {}  # tensors of one layout share one
    for name, tensor in targets.tensors.items():
        kinds = agreed.tensors[name]
        if len(kinds) == 1:
            ranks = None if kinds[0][0].layout != "here" else tuple(kinds[0][1])
            key = _layout_key(tensor), ranks
            if key[0] is None or key not in known:
                known[key] = _side(tensor, ranks, world)
            sides[name] = known[key]
    return sides if agreed.same else _told(sides, targets, agreed, world)


def _layout_key(tensor: torch.Tensor) -> object:
    """Equal for tensors of the same tiles; None where that is not known."""
    if isinstance(tensor, DTensor):
        return None if tensor._layout.mesh.comm.simulated else tensor._layout
    return None if isinstance(tensor, ShardedTensor) else tuple(tensor.shape)


def _side(tensor: torch.Tensor, ranks: Sequence[int] | None, world: World) -> Side:
    """Who needs which tiles of a tensor; with `ranks` each of those needs what this process does."""
    own = side_of(tensor, world.rank)
    if ranks is None or list(ranks) == [world.rank]:
        return own
    return Side.joined([own._replace(ranks=own.ranks * 0 + rank) for rank in ranks], tensor.dim())


def _told(sides: dict[str, Side], targets: Targets, agreed: Agreed, world: World) -> dict[str, Side]:
    mine = {}
    for name, tensor in targets.tensors.items():
        if len(agreed.tensors[name]) > 1 or len(agreed.tensors[name][0][1]) < world.size:
            boxes = [piece.tile for piece in held(tensor)]
            ranks = torch.full((len(boxes),), world.rank, dtype=torch.int64).numpy()
            mine[name] = Side(ranks, Tiles.of(boxes, tensor.dim()))
    told: dict[str, list[Side]] = {}
    for theirs in world.gather(mine):
        for name, side in theirs.items():
            told.setdefault(name, []).append(side)
    joined = {name: Side.joined(found, len(agreed.tensors[name][0][0].shape)) for name, found in told.items()}
    return {name: joined[name] if name in joined else sides[name] for name in agreed.tensors}


# -- running it ------------------------------------------------------------------------------------------------
def run(prepared: Prepared, into: Value, world: World) -> None:
    """Read, exchange, write into the tensors, then put the values in. What goes wrong on one process is told to the
    others before the next step."""
    source, targets, pieces, made, *_, sharing = prepared
    room, loader, error = pieces, None, None
    try:
        room = _room_like(pieces) if made.staged else pieces
        loader = Loader(source, room, world, made, sharing)
    except Exception as raised:
        error = raised
    for reads in made.rounds:
        if loader is not None:
            error = loader.read_round(reads)
        loader = _stop_all(world, error, loader, made)
        try:
            with torch.no_grad():
                loader.take(reads)
        except Exception as raised:
            error = raised
        _stop_all(world, error, loader, made)  # from here on, what was read may be overwritten
    try:
        if sharing is not None:
            sharing.release()
        if error is None:
            if made.staged:
                _moved(room, pieces)
            targets.apply(into, source.tree)
    except Exception as raised:
        error = error or raised
    if not world.all_well(error is None):
        world.agree(error)


def _moved(room: dict[str, list[Held]], pieces: dict[str, list[Held]]) -> None:
    """Copy what was loaded to where it belongs."""
    with torch.no_grad():
        for name, found in pieces.items():
            for (_, values), (_, fresh) in zip(found, room[name], strict=True):
                values.copy_(fresh)


def _stop_all(world: World, error: Exception | None, loader: Loader | None, made: LoadPlan) -> Loader:
    """Raise on all processes if one of them has an error; where none has, each has a loader."""
    if world.all_well(error is None):
        assert loader is not None
        return loader
    told = world.gather((None if error is None else as_error(error), [] if loader is None else list(loader.begun)))
    begun = dict.fromkeys(name for _, names in told for name in names)
    if begun and not made.staged:
        error = None if error is None else CheckpointError(f"{as_error(error)}. {_changed(begun)}")
        told = [(e if e is None else CheckpointError(f"{e}. {_changed(begun)}"), names) for e, names in told]
    world.raise_first([e for e, _ in told], error)
    raise AssertionError("some process had an error")


def _room_like(pieces: dict[str, list[Held]]) -> dict[str, list[Held]]:
    return {name: [Held(tile, torch.empty_like(v)) for tile, v in found] for name, found in pieces.items()}


def _changed(names: dict[str, None]) -> str:
    shown = ", ".join(map(repr, list(names)[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"Of `into`, {len(names)} tensor(s) have new values already, wholly or in part: {shown}; a larger `memory` or "
        f"verify='full' would have left it as it was"
    )
