"""Moves by brute force: what each rank must hold before and after, as plain differentiable functions of one tensor."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from shardwise import DTensor, Partial, RankTensor, Replicate, simulate
from tests.layout.brute import Coords, Dealt, grid

REDUCE = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "product": lambda parts: parts.prod(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}
# The kinds of placement an axis can have; "sizes" and "pieces" draw theirs from the case's generator.
PLAIN = ("R", "S0", "S1")
UNEVEN = ("S0 sizes", "S1 pieces")
PARTIALS = ("P sum", "P avg", "P max", "P min", "P product")


def placed(mesh_shape, shape, kinds, seed=0) -> Dealt:
    """The placements that `kinds` spell, one an axis: "R", "S0", "S1 sizes", "P max", ..."""
    rng = random.Random(seed)
    dealt = Dealt(tuple(mesh_shape), tuple(shape))
    for kind in kinds:
        name, _, detail = kind.partition(" ")
        if name == "R":
            dealt.keep(Replicate())
        elif name == "P":
            dealt.keep(Partial(detail))
        else:
            dealt.cut(int(name[1:]), detail or "chunk", rng)
    return dealt


@dataclass
class Source:
    """A laid-out value as a function of the plain tensor `root`: each rank's local, and the whole."""

    root: torch.Tensor
    whole: torch.Tensor
    local: dict[Coords, torch.Tensor]

    def on(self, dealt: Dealt, mesh=None) -> DTensor:
        """As a DTensor on a simulated mesh."""
        ranks = RankTensor([self.local[coords] for coords in grid(dealt.mesh_shape)])
        return DTensor.from_local(ranks, mesh or simulate(dealt.mesh_shape), dealt.placements, shape=dealt.shape)


def source(dealt: Dealt, dtype=torch.float64, requires_grad=False, seed=0, own=False) -> Source:
    """Random values under a layout. Ranks that differ in Replicate axes only share a tensor, unless `own` is set."""
    gen = torch.Generator().manual_seed(seed)
    root = values(dealt.shape, dtype, gen).requires_grad_(requires_grad)
    axes = [axis for axis, p in enumerate(dealt.placements) if p.is_partial()]
    sizes = [dealt.mesh_shape[axis] for axis in axes]
    if axes:
        scale, offset = values((*sizes, *dealt.shape), dtype, gen), values((*sizes, *dealt.shape), dtype, gen)
        parts = root * scale + offset if dtype != torch.bool else root ^ scale
    else:
        parts = root
    local: dict[Coords, torch.Tensor] = {}
    for coords in grid(dealt.mesh_shape):
        first = tuple(0 if p.is_replicate() else i for i, p in zip(coords, dealt.placements, strict=True))
        if own or first == coords:
            local[coords] = dealt.part(parts[tuple(coords[axis] for axis in axes)], coords)
        else:
            local[coords] = local[first]
    return Source(root, reduced(parts, dealt), local)


def values(shape, dtype, gen) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=gen).bool()
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=gen)
    if dtype.is_floating_point:
        return (torch.rand(shape, dtype=torch.float64, generator=gen) + 0.5).to(dtype)
    return torch.randint(0, 4, shape, generator=gen).to(dtype)


def reduced(parts: torch.Tensor, dealt: Dealt) -> torch.Tensor:
    """The value, from a tensor with one leading dim for each Partial axis."""
    for placement in (p for p in dealt.placements if p.is_partial()):
        parts = REDUCE[placement.reduce_op](parts).to(parts.dtype)
    return parts


def check_holds(locals_by_rank, dealt: Dealt, whole: torch.Tensor, **tolerance) -> None:
    """Every rank holds its part of `whole`; where axes are Partial, its parts reduce to it."""
    axes = [axis for axis, p in enumerate(dealt.placements) if p.is_partial()]
    by_coords = dict(zip(grid(dealt.mesh_shape), locals_by_rank, strict=True))
    for coords in by_coords:
        assert tuple(by_coords[coords].shape) == dealt.local_shape(coords)
        if any(coords[axis] for axis in axes):
            continue
        parts = torch.stack([by_coords[c] for c in grid(dealt.mesh_shape) if _agree(c, coords, axes)])
        parts = parts.view((*(dealt.mesh_shape[axis] for axis in axes), *parts.shape[1:]))
        torch.testing.assert_close(reduced(parts, dealt), dealt.part(whole, coords), **tolerance)


def _agree(one: Coords, other: Coords, apart_from) -> bool:
    return all(i == j for axis, (i, j) in enumerate(zip(one, other, strict=True)) if axis not in apart_from)


# -- real processes: this rank's side of a move ------------------------------------------------------------
@dataclass
class Parts:
    """All parts of a laid-out value in one leaf: a leading dim for each Partial axis, then the global shape."""

    dealt: Dealt
    every: torch.Tensor

    def whole(self) -> torch.Tensor:
        return reduced(self.every, self.dealt)

    def at(self, coords: Coords, of: torch.Tensor | None = None) -> torch.Tensor:
        """What the rank at `coords` holds of `of`, a tensor like `every`."""
        axes = [axis for axis, p in enumerate(self.dealt.placements) if p.is_partial()]
        of = self.every.detach() if of is None else of
        return self.dealt.part(of[tuple(coords[axis] for axis in axes)], coords).contiguous()


def all_parts(dealt: Dealt, dtype=torch.float64, seed=0) -> Parts:
    sizes = [dealt.mesh_shape[axis] for axis, p in enumerate(dealt.placements) if p.is_partial()]
    return Parts(dealt, values((*sizes, *dealt.shape), dtype, torch.Generator().manual_seed(seed)))
