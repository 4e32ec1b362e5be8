"""What all processes save or load: the union of what each has, the same on all of them, or an error that says where
they differ."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.checkpoint.holders import Kind, kinds_of
from shardwise.checkpoint.tree import Flat, Json, Node
from shardwise.checkpoint.world import World, as_error
from shardwise.drawing import rank_names
from shardwise.errors import CheckpointError

Kinds: TypeAlias = dict[str, Kind]


@dataclass(frozen=True)
class Agreed:
    """The tensors of all processes, by name: each kind that some process has, with those processes."""

    tensors: dict[str, list[tuple[Kind, list[int]]]]
    values: dict[str, Json]
    tree: Node
    same: bool  # whether all processes have the same
    told: list[Json]  # what each process had to tell


def agree(
    flat: Flat, world: World, *, values: bool, also: Json = None, error: Exception | None = None, told: Json = None
) -> Agreed:
    """Compare what the processes have. With `values`, those of plain tensors and the values too.

    Where all have the same, they exchange a few bytes each, once.

    Args:
        also: What must be the same everywhere.
        error: What went wrong here so far: it is raised on all processes.
        told: What this process has to tell the others beside.

    Raises:
        CheckpointError: On all processes, if a name has other values, another shape or another dtype somewhere.
    """
    mine: Kinds = {}
    try:
        compared = values and world.size > 1
        found = flat.tensors if error is None else {}
        mine = kinds_of(found, values=compared)
    except Exception as raised:  # told to the others, so that they do not wait
        error = raised
    digest = hashlib.sha1(json.dumps([list(mine.items()), flat.tree, also]).encode()).hexdigest()
    everyone = world.gather((None if error is None else as_error(error), digest, told))
    world.raise_first([theirs for theirs, *_ in everyone], error)
    beside = [extra for *_, extra in everyone]
    if len({theirs for _, theirs, _ in everyone}) == 1:
        alike = {name: [(kind, list(world.ranks))] for name, kind in mine.items()}
        return Agreed(alike, flat.values, flat.tree, True, beside)
    all_of = world.gather((mine, flat.values if values else dict.fromkeys(flat.values), flat.tree, also))
    if any(other != all_of[0][3] for *_, other in all_of):
        given: dict[str, list[int]] = {}
        for rank, (*_, other) in zip(world.ranks, all_of, strict=True):
            given.setdefault(repr(other), []).append(rank)
        few_first = sorted(given.items(), key=lambda item: len(item[1]))
        words = "; ".join(f"{rank_names(ranks)} gave {other}" for other, ranks in few_first)
        raise CheckpointError(f"the arguments differ between ranks: {words}")
    tensors: dict[str, list[tuple[Kind, list[int]]]] = {}
    said: dict[str, tuple[int, Json]] = {}
    tree: Node | None = None
    for rank, (kinds, objects, node, _) in zip(world.ranks, all_of, strict=True):
        for name, kind in kinds.items():
            _join(tensors.setdefault(name, []), name, kind, rank)
        for name, value in objects.items():
            first, before = said.setdefault(name, (rank, value))
            if before != value:
                raise _differ(name, f"{before!r} on rank {first} and {value!r} on rank {rank}")
        tree = node if tree is None else merged(tree, node, "") if values else tree
    return Agreed(tensors, {name: value for name, (_, value) in said.items()}, tree or {}, False, beside)


def _join(kinds: list[tuple[Kind, list[int]]], name: str, kind: Kind, rank: int) -> None:
    for other, ranks in kinds:
        if other == kind:
            ranks.append(rank)
            return
        for what, one, two in (("dtype", other.dtype, kind.dtype), ("shape", other.shape, kind.shape)):
            if one != two:
                raise CheckpointError(f"tensor {name!r}: {what} {one} on rank {ranks[0]} and {two} on rank {rank}")
        if other.layout == kind.layout == "here":
            raise _differ(name, f"the plain tensors of ranks {ranks[0]} and {rank} have other values")
    kinds.append((kind, [rank]))


def _differ(name: str, how: str) -> CheckpointError:
    return CheckpointError(
        f"{name!r} differs between ranks: {how}; what belongs to one rank goes under a key of its own, as "
        f"{{f'rank {{rank}}': ...}}"
    )


def merged(one: Node, other: Node, name: str) -> Node:
    """One tree with what both have."""
    ((kind, inside),), ((other_kind, others),) = one.items(), other.items()
    if kind != other_kind:
        raise _differ(name, f"a {kind} on one and a {other_kind} on another")
    if kind == "state":
        return {kind: merged(inside, others, name)}
    if kind == "dict":
        children = {json.dumps(key): (key, child) for key, child in inside}
        for key, child in others:
            text = json.dumps(key)
            before = children.get(text)
            children[text] = (key, child if before is None else merged(before[1], child, f"{name}.{key}"))
        return {kind: [[key, child] for key, child in children.values()]}
    if kind in ("list", "tuple"):
        if len(inside) != len(others):
            raise _differ(name, f"{len(inside)} items on one and {len(others)} on another")
        return {kind: [merged(a, b, f"{name}.{i}") for i, (a, b) in enumerate(zip(inside, others))]}
    return one
