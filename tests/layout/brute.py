"""Layouts by brute force: the indices of every dim in lists, dealt out axis by axis. What the tests compare with."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from shardwise import Partial, Replicate, Shard, simulate
from shardwise.layout import Layout
from shardwise.mesh import as_mesh

Coords = tuple[int, ...]

KINDS = ("replicate", "chunk", "sizes", "pieces")


def deterministic(examples: int):
    """The same examples on every run, and no time limit on one of them."""
    return settings(
        derandomize=True,
        deadline=None,
        max_examples=examples,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def runs(indices) -> tuple[tuple[int, int], ...]:
    """A set of ints as sorted, merged intervals: (1, 2, 3, 7) -> ((1, 4), (7, 8))."""
    out: list[list[int]] = []
    for i in sorted(indices):
        if out and out[-1][1] == i:
            out[-1][1] = i + 1
        else:
            out.append([i, i + 1])
    return tuple((a, b) for a, b in out)


def spell(intervals) -> list[int]:
    """Every int of some intervals, in their order."""
    return [i for a, b in intervals for i in range(a, b)]


def grid(mesh_shape: Sequence[int]) -> list[Coords]:
    return list(itertools.product(*(range(k) for k in mesh_shape)))


def chunked(indices: list[int], parts: int) -> list[list[int]]:
    """torch.chunk, with empty lists where it returns fewer parts."""
    pieces = [part.tolist() for part in torch.tensor(indices, dtype=torch.int64).chunk(parts)]
    return pieces + [[]] * (parts - len(pieces))


@dataclass
class Dealt:
    """Placements, and by brute force what each coordinate tuple holds under them."""

    mesh_shape: tuple[int, ...]
    shape: tuple[int, ...]
    placements: list = field(default_factory=list)
    cutting: list[list[int]] = field(init=False)  # by dim: the axes that cut it
    parents: list[dict[Coords, list[int]]] = field(init=False)  # by dim, by coordinates on those axes: the indices

    def __post_init__(self):
        self.cutting = [[] for _ in self.shape]
        self.parents = [{(): list(range(n))} for n in self.shape]

    def keep(self, placement) -> None:
        """The next axis is Replicate or Partial."""
        self.placements.append(placement)

    def cut(self, dim: int, kind: str, rng: random.Random) -> None:
        """The next axis deals out `dim`: as chunks, as random sizes or as random pieces."""
        axis = len(self.placements)
        k = self.mesh_shape[axis]
        rows, children = [], {}
        for outer, held in self.parents[dim].items():
            owner = _owners(len(held), k, kind, rng)
            rows.append([[at for at, who in enumerate(owner) if who == i] for i in range(k)])
            for i in range(k):
                children[(*outer, i)] = [held[at] for at in rows[-1][i]]
        self.parents[dim] = children
        self.cutting[dim].append(axis)
        if kind == "chunk":
            self.placements.append(Shard(dim))
        elif kind == "sizes":
            sizes = tuple(tuple(len(part) for part in row) for row in rows)
            self.placements.append(Shard(dim, sizes=sizes[0] if len(sizes) == 1 else sizes))
        else:
            self.placements.append(Shard(dim, pieces=[[runs(part) for part in row] for row in rows]))

    def held(self, coords: Coords, dim: int) -> list[int]:
        return self.parents[dim][tuple(coords[a] for a in self.cutting[dim])]

    def local_shape(self, coords: Coords) -> tuple[int, ...]:
        return tuple(len(self.held(coords, dim)) for dim in range(len(self.shape)))

    def part(self, whole: torch.Tensor, coords: Coords) -> torch.Tensor:
        """What the rank at `coords` holds of a global value; differentiable."""
        for dim in range(whole.ndim):
            whole = whole.index_select(dim, torch.tensor(self.held(coords, dim), dtype=torch.int64))
        return whole

    def layout(self, dtype=torch.float64) -> Layout:
        return Layout.make(as_mesh(simulate(self.mesh_shape)), self.placements, self.shape, dtype)


def _owners(n: int, k: int, kind: str, rng: random.Random) -> list[int]:
    """Which coordinate gets each of n positions."""
    if kind == "chunk":
        return [i for i, part in enumerate(chunked(list(range(n)), k)) for _ in part]
    owners = [rng.randrange(k) for _ in range(n)]
    return sorted(owners) if kind == "sizes" else owners


def deal(rng, mesh_shape, shape, kinds=KINDS, partial_ops=()) -> Dealt:
    """Random placements for a mesh and a shape."""
    dealt = Dealt(tuple(mesh_shape), tuple(shape))
    choices = [*kinds, *(["partial"] if partial_ops else [])]
    for _ in mesh_shape:
        kind = rng.choice(choices)
        if kind == "partial":
            dealt.keep(Partial(rng.choice(partial_ops)))
        elif kind == "replicate" or not shape:
            dealt.keep(Replicate())
        else:
            dealt.cut(rng.randrange(len(shape)), kind, rng)
    return dealt


mesh_shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda ks: math.prod(ks) <= 12).map(tuple)
shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)
rngs = st.integers(0, 2**32 - 1).map(random.Random)
