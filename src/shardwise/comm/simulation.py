"""N ranks in one process: the local value is a `RankTensor`, and collectives are plain functions over its tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import torch

import shardwise.comm.rank_surface  # noqa: F401  (what a RankTensor answers)
from shardwise.comm.base import Comm, Coords
from shardwise.comm.rank_tensor import PerRank, RankTensor, is_list_op, map_positions, map_ranks, unique
from shardwise.comm.reduction import reduce_parts
from shardwise.errors import LayoutError, MeshError
from shardwise.protocols import Structure
from shardwise.torch_private.tensors import storage_id

_MOST_SHOWN = 8  # elements of a tensor that an error shows
OnGroup = Callable[[list[torch.Tensor], list[Coords]], list[torch.Tensor]]  # values and coordinates of some ranks


class SimulatedComm(Comm):
    """All ranks of a simulated world, seen through the axes of one (sub-)mesh."""

    simulated = True

    def __init__(
        self, shape: tuple[int, ...], axis_names: tuple[str, ...], grid: Sequence[Coords], spectators: Sequence[Any]
    ) -> None:
        self.shape, self.axis_names = shape, axis_names
        self.grid = tuple(grid)  # coordinates of every simulated rank on the axes of this mesh
        # per rank: the rest of its coordinates, on axes that a sub-mesh does not have
        self.spectators = tuple(spectators)
        self._groups: dict[tuple[int, ...], list[list[int]]] = {}

    def coords_here(self) -> Sequence[Coords]:
        return self.grid

    def groups(self, axes: Sequence[int]) -> list[list[int]]:
        """The ranks that talk to each other along these axes, in the order of their coordinates."""
        key = tuple(axes)
        if key not in self._groups:
            found: dict[Any, list[int]] = {}
            for rank, coords in enumerate(self.grid):
                rest = tuple(c for a, c in enumerate(coords) if a not in key)
                found.setdefault((self.spectators[rank], rest), []).append(rank)
            self._groups[key] = [sorted(group, key=lambda rank: self.grid[rank]) for group in found.values()]
        return self._groups[key]

    def per_rank(self, of: Callable[[Coords], Any]) -> PerRank:
        return PerRank(of(coords) for coords in self.grid)

    def _keys(self, axes: Sequence[int]) -> list[tuple[Hashable, ...]]:
        """The keys of the ranks' calls: the group, and the coordinates on `axes`. Ranks with equal keys and equal
        values share a call."""
        ranks = zip(self.spectators, self.grid, strict=True)
        return [(spectator, *(coords[a] for a in axes)) for spectator, coords in ranks]

    def bind(self, func: Callable[..., Any], axes: Sequence[int] = ()) -> Callable[..., Any]:
        keys = self._keys(axes)
        if is_list_op(func):
            return lambda *args, **kwargs: map_positions(func, args, kwargs, keys)

        def on_all_ranks(*args: object, **kwargs: object) -> Any:
            return map_ranks(func, args, kwargs, keys)

        return on_all_ranks

    def bind_program(self, func: Callable[..., Any], axes: Sequence[int] = ()) -> Callable[..., Any]:
        keys = self._keys(axes)
        return lambda *args, **kwargs: map_ranks(func, args, kwargs, keys, watched=True)

    def values(self, local: RankTensor) -> tuple[torch.Tensor, ...]:
        return tuple(unique(local.ranks))

    def structure(self, local: RankTensor) -> tuple[int, ...]:
        index = {id(v): i for i, v in enumerate(unique(local.ranks))}
        return tuple(index[id(v)] for v in local.ranks)

    def assemble(self, structure: Structure, values: Sequence[torch.Tensor | None]) -> RankTensor:
        return RankTensor([values[i] for i in structure])  # type: ignore[misc]

    def pick(self, structure: Structure, local: RankTensor) -> tuple[torch.Tensor, ...]:
        holders = {i: rank for rank, i in reversed(list(enumerate(structure)))}
        return tuple(local.ranks[holders[i]] for i in sorted(holders))

    def pick_gradients(self, structure: Structure, local: RankTensor) -> tuple[torch.Tensor, ...]:
        grads, seen = list(self.pick(structure, local)), set()
        for i, grad in enumerate(grads):
            place = storage_id(grad), grad.storage_offset()
            if place in seen:
                grads[i] = grad.clone()
            seen.add(place)
        return tuple(grads)

    def whole(self, local: RankTensor) -> tuple[int, ...]:
        """The structure of a Replicate value for the program: one tensor, or one per group where the groups of a
        sub-mesh hold different ones."""
        if self._difference(local) is None:
            return (0,) * len(self.grid)
        numbers = {spectator: i for i, spectator in enumerate(dict.fromkeys(self.spectators))}
        return tuple(numbers[spectator] for spectator in self.spectators)

    def agreed(self, local: RankTensor, what: str) -> torch.Tensor:
        difference = self._difference(local)
        if difference is not None:
            coords, values = difference
            shown = [f"{value.tolist()}" for value in values if value.numel() <= _MOST_SHOWN]
            self._refuse(what, [f"different values at {coords}" + (": " if shown else "") + " and ".join(shown)])
        return self.first(local)

    def _difference(self, local: RankTensor) -> tuple[Coords, tuple[torch.Tensor, torch.Tensor]] | None:
        """Coordinates at which two groups of a sub-mesh hold different tensors, and those two; None if none do."""
        firsts: dict[Coords, torch.Tensor] = {}
        for coords, value in zip(self.grid, local.ranks, strict=True):
            if not _equal(firsts.setdefault(coords, value), value):
                return coords, (firsts[coords], value)
        return None

    def first(self, local: RankTensor) -> torch.Tensor:
        return local.ranks[0]

    def is_shared(self, value: torch.Tensor) -> bool:
        if not isinstance(value, RankTensor) or len(value.ranks) != len(self.grid):
            return False
        held = {(spectator, id(v)) for spectator, v in zip(self.spectators, value.ranks, strict=True)}
        return len(held) == len(set(self.spectators)) and len({(v.shape, v.stride()) for v in value.ranks}) == 1

    def _refuse(self, what: str, found: Sequence[object]) -> NoReturn:
        shown = ", ".join(map(str, found[:4])) + (", ..." if len(found) > 4 else "")
        raise LayoutError(
            f"{what}: the groups of the simulated sub-mesh {list(self.axis_names)} have {shown}, but a tensor on it "
            f"has one layout for all of them. Lay it out on the whole mesh, give every group the same, or run on "
            f"processes, where each group has a tensor of its own"
        )

    def same(self, one: RankTensor, other: RankTensor) -> bool:
        return all(a is b for a, b in zip(one.ranks, other.ranks, strict=True))

    def shared(self, value: torch.Tensor) -> RankTensor:
        views = {spectator: value.view_as(value) for spectator in self.spectators[1:]} | {self.spectators[0]: value}
        return RankTensor([views[spectator] for spectator in self.spectators])

    def at(self, local: RankTensor, coords: Coords) -> torch.Tensor:
        return local.ranks[self.grid.index(coords)]

    def adopt(self, local: torch.Tensor, axes: Sequence[int]) -> RankTensor:
        ranks = local.ranks if isinstance(local, RankTensor) else (local,) * len(self.grid)
        if len(ranks) != len(self.grid):
            raise MeshError(f"a RankTensor of {len(ranks)} ranks on a simulated mesh of {len(self.grid)}")
        views: dict[Any, torch.Tensor] = {}
        taken: set[int] = set()
        for value, coords, spectator in zip(ranks, self.grid, self.spectators, strict=True):
            key = (id(value), spectator, *(coords[a] for a in axes))
            if key not in views:
                views[key] = value if id(value) not in taken else value.view_as(value)
                taken.add(id(value))
        return RankTensor(
            [
                views[(id(v), s, *(c[a] for a in axes))]
                for v, c, s in zip(ranks, self.grid, self.spectators, strict=True)
            ]
        )

    def all_kinds(self, local: RankTensor) -> dict[Coords, tuple[str, tuple[int, ...]]]:
        found: dict[Coords, tuple[str, tuple[int, ...]]] = {}
        for coords, value in zip(self.grid, local.ranks, strict=True):
            kind = str(value.dtype), tuple(value.shape)
            if found.setdefault(coords, kind) != kind:
                self._refuse(f"local tensors of the ranks at {coords}", [found[coords], kind])
        return found

    def first_of_replicas(self, local: RankTensor, axes: Sequence[int]) -> RankTensor:
        values = list(local.ranks)
        for axis in axes:
            for group in self.groups((axis,)):
                for rank in group:
                    values[rank] = values[group[0]]
        return RankTensor(values)

    # -- collectives ----------------------------------------------------------------------------------------
    def per_group(self, func: OnGroup, local: RankTensor, axes: Sequence[int]) -> RankTensor:
        """Run `func(values, coordinates)` for each group of ranks along the axes. It returns what each rank of the
        group holds afterwards.

        Groups that hold the same objects share one call."""
        values = local.ranks
        out: list[Any] = [None] * len(values)
        shared: dict[Any, Any] = {}
        for group in self.groups(axes):
            key = tuple(id(values[rank]) for rank in group)
            if key not in shared:
                shared[key] = func([values[rank] for rank in group], [self.grid[rank] for rank in group])
            for rank, value in zip(group, shared[key], strict=True):
                out[rank] = value
        return RankTensor(out)

    def each(
        self, func: Callable[[torch.Tensor, Coords], torch.Tensor], local: RankTensor, axes: Sequence[int]
    ) -> RankTensor:
        return self.per_group(lambda values, coords: list(map(func, values, coords)), local, axes)

    def all_reduce(self, local: RankTensor, axes: Sequence[int], reduce_op: str) -> RankTensor:
        reduced = lambda values, coords: [reduce_parts([v.contiguous() for v in values], reduce_op)] * len(values)
        return self.per_group(reduced, local, axes)

    def stack(self, local: RankTensor, axes: Sequence[int]) -> RankTensor:
        return self.per_group(lambda values, coords: [torch.stack(values)] * len(values), local, axes)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers; NaN equals NaN. Tensors without values are equal."""
    if one is other or one.is_meta:
        return True
    with torch.no_grad():
        return one.shape == other.shape and bool(((one == other) | (one != one) & (other != other)).all())
