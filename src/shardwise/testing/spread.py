"""Laying a plain tensor out in every way there is: uneven and empty shards, parts of every reduction."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise.comm.simulation import RankTensor
from shardwise.layout import Layout, Partial, Placement, Replicate, Shard
from shardwise.layout.placement import check_reductions
from shardwise.mesh import as_mesh
from shardwise.move.pack import take
from shardwise.tensor import DTensor


def spread_out(
    x: torch.Tensor,
    mesh: Any,
    placements: Sequence[Placement],
    seed: int = 0,
    requires_grad: bool = False,
    holes: bool = False,
) -> DTensor:
    """`x` laid out; the parts of a Partial axis are uneven, of both signs, and reduce to `x` exactly where x has bits
    to spare (see `with_spare_bits`)."""
    inner = as_mesh(mesh)
    layout = Layout.make(inner, placements, tuple(x.shape), x.dtype)
    parts = Parts(x, layout, seed, holes)
    if inner.comm.simulated:
        cache: dict[Any, torch.Tensor] = {}  # ranks on a Replicate axis share one tensor

        def at(rank: int) -> torch.Tensor:
            coords = inner.coords(rank)
            key = tuple(None if p.is_replicate() else c for p, c in zip(layout.placements, coords, strict=True))
            if key not in cache:
                cache[key] = parts.at(coords)
            return cache[key]

        local: torch.Tensor = RankTensor([at(rank) for rank in inner.ranks])
    else:
        local = parts.at(inner.comm.played()[0])
    result = DTensor.from_local(local, mesh, placements, shape=x.shape, stride=x.stride())
    return result.requires_grad_() if requires_grad else result


class Parts:
    """What each rank holds of one tensor."""

    def __init__(self, x: torch.Tensor, layout: Layout, seed: int, holes: bool = False) -> None:
        self.x, self.layout, self.holes = x.detach(), layout, holes
        self.shares = [
            _SHARES[p.reduce_op](random.Random(f"{seed} {axis}"), size, x) if isinstance(p, Partial) else None
            for axis, (p, size) in enumerate(zip(layout.placements, layout.mesh.shape, strict=True))
        ]

    def at(self, coords: Sequence[int]) -> torch.Tensor:
        x = self.x
        for axis, share in enumerate(self.shares):
            if share is not None:
                x = share(x, coords[axis])
        for dim in range(x.dim()):
            held = self.layout.held(dim, coords)
            if held != ((0, x.shape[dim]),):
                x = take(x, dim, held)
        return with_holes(x) if self.holes else x.clone()


# -- shares: how one tensor becomes the parts of a reduction -----------------------------------------------------
Share = Callable[[torch.Tensor, int], torch.Tensor]


def _is_float(x: torch.Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def _sum(generator: random.Random, size: int, x: torch.Tensor) -> Share:
    """Shares of both signs that add up to one, others for each element: what holds for multiples of a tensor only must
    not pass for linear. They are quarters, so that few bits are lost. A zero is shared as if it were one less one."""
    step = 4 if _is_float(x) else 1
    noise = torch.Generator().manual_seed(generator.randrange(2**31))
    parts = [torch.randint(-2 * step, 2 * step + 1, x.shape, generator=noise) for _ in range(size - 1)]
    shares = [(part / step if _is_float(x) else part).to(x.device) for part in parts]
    rest = sum(shares)

    def share(x: torch.Tensor, i: int) -> torch.Tensor:
        zero = x == 0
        whole = torch.where(zero, torch.ones_like(x), x)
        last = torch.where(zero, -whole * rest, whole * (1 - rest))
        return (last if i == size - 1 else whole * shares[i]).to(x.dtype)

    return share


def _avg(generator: random.Random, size: int, x: torch.Tensor) -> Share:
    share = _sum(generator, size, x)
    return lambda x, i: share(x, i) * size


def _product(generator: random.Random, size: int, x: torch.Tensor) -> Share:
    powers = [generator.choice([-1, 0, 1]) if _is_float(x) else 0 for _ in range(size)]
    signs = [generator.choice([-1, 1]) if _is_float(x) else 1 for _ in range(size)]
    whole = generator.randrange(size)
    rest = [s * 2.0**p for s, p in zip(signs, powers, strict=True)]
    others = 1.0
    for i, value in enumerate(rest):
        others *= value if i != whole else 1.0
    return lambda x, i: x / others if i == whole and _is_float(x) else x if i == whole else torch.full_like(x, rest[i])


def _extreme(sign: int) -> Callable[[random.Random, int, torch.Tensor], Share]:
    def shares(generator: random.Random, size: int, x: torch.Tensor) -> Share:
        """Every element is whole on one coordinate; the others lie beyond it."""
        low = [generator.choice([1, 2, 3]) for _ in range(size)]
        owner = torch.arange(x.numel(), device=x.device).view(x.shape) % size
        if x.dtype is torch.bool:
            return lambda x, i: torch.where(owner == i, x, torch.full_like(x, sign < 0))

        def share(x: torch.Tensor, i: int) -> torch.Tensor:
            return torch.where(owner == i, x, _beyond(x, -sign * low[i]))

        return share

    return shares


def _beyond(x: torch.Tensor, by: int) -> torch.Tensor:
    if _is_float(x):
        return x + by
    limits = torch.iinfo(x.dtype)
    return torch.where(x > limits.min + 3, x + by, x) if by < 0 else torch.where(x < limits.max - 3, x + by, x)


def _bitwise(op: str) -> Callable[[random.Random, int, torch.Tensor], Share]:
    def shares(generator: random.Random, size: int, x: torch.Tensor) -> Share:
        count = torch.arange(x.numel(), device=x.device).view(x.shape) + generator.randrange(7)
        noise = [(count * (i + 1) % (i + 3)).to(x.dtype) for i in range(size - 1)]

        def share(x: torch.Tensor, i: int) -> torch.Tensor:
            if i < size - 1:
                return noise[i] if op == "bxor" else x & noise[i] if op == "bor" else x | noise[i]
            return functools.reduce(torch.bitwise_xor, noise, x) if op == "bxor" else x

        return share

    return shares


_SHARES: dict[str, Callable[[random.Random, int, torch.Tensor], Share]] = {
    "sum": _sum,
    "avg": _avg,
    "product": _product,
    "max": _extreme(1),
    "min": _extreme(-1),
    "bor": _bitwise("bor"),
    "band": _bitwise("band"),
    "bxor": _bitwise("bxor"),
}


_NARROWER = {torch.float64: torch.float32, torch.float32: torch.bfloat16}


def with_spare_bits(x: torch.Tensor) -> torch.Tensor:
    """The number nearest to `x` among those whose shares add up exactly."""
    if x.dtype.is_complex:
        return torch.complex(with_spare_bits(x.real), with_spare_bits(x.imag)) if x.dtype != torch.complex32 else x
    return x.to(_NARROWER[x.dtype]).to(x.dtype) if x.dtype in _NARROWER else x


def with_holes(t: torch.Tensor) -> torch.Tensor:
    """The same values in every other place of a memory twice as large."""
    return torch.stack([t.detach(), torch.zeros_like(t)], -1)[..., 0]


# -- which layouts -----------------------------------------------------------------------------------------------
def random_sizes(n: int, parts: int, generator: random.Random) -> tuple[int, ...]:
    """`parts` sizes >= 0 that add up to n, empty ones likely."""
    cuts = sorted(generator.randint(0, n) for _ in range(parts - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True))


def reductions_of(dtype: torch.dtype) -> list[str]:
    """The reductions a Partial of this dtype may have, sum first."""
    found = []
    for op in ("sum", "avg", "product", "max", "min", "bor", "band", "bxor"):
        if dtype is torch.bool and op not in ("max", "min", "bor", "band", "bxor"):
            continue
        try:
            check_reductions([Partial(op)], dtype)
        except ValueError:
            continue
        found.append(op)
    return found


def can_add(dtype: torch.dtype) -> bool:
    """Whether torch has a sum of this dtype that is of this dtype."""
    eight_bits = dtype.is_floating_point and dtype.itemsize == 1
    return not eight_bits and dtype not in (torch.bool, torch.uint16, torch.uint32, torch.uint64)


def _reductions_for(x: torch.Tensor) -> list[str]:
    """The same for one tensor: shares of an infinite value have no sum, and a maximum that is NaN has no gradient."""
    found = reductions_of(x.dtype)
    if not can_add(x.dtype) and x.dtype is not torch.bool:
        return []
    if x.dtype in (torch.bfloat16, torch.float16):  # their shares would not add up to x
        return ["max", "min"] if bool(x.isfinite().all()) else []
    if not _is_float(x) or bool(x.isfinite().all()):
        return found
    return [op for op in found if op in (("sum",) if x.isnan().any() and not x.isinf().any() else ("max", "min"))]


def placements_for(
    x: torch.Tensor, size: int, generator: random.Random, reductions: Sequence[str] = ("sum",)
) -> list[Placement]:
    """Every kind of placement one axis of `size` ranks can give this tensor."""
    out: list[Placement] = [Replicate()]
    for dim in range(x.dim()):
        out.append(Shard(dim))
        if size > 1:
            out.append(Shard(dim, sizes=random_sizes(x.shape[dim], size, generator)))
    return out + [Partial(op) for op in reductions]


def random_placements(
    x: torch.Tensor, mesh_shape: Sequence[int], generator: random.Random, reductions: Sequence[str] = ("sum",)
) -> list[Placement]:
    """Random placements for one tensor; sizes are explicit only where nothing else cuts the same dim, and all Partial
    axes reduce alike."""
    places: list[Placement] = []
    for size in mesh_shape:
        options = placements_for(x, size, generator, reductions)
        used = {p.dim for p in places if isinstance(p, Shard)}
        pending = {p for p in places if isinstance(p, Partial)}
        options = [
            p
            for p in options
            if not (isinstance(p, Shard) and p.pieces is not None and p.dim in used)
            and not (isinstance(p, Partial) and pending and p not in pending)
        ]
        places.append(generator.choice(options))
    return places


Combination = tuple[tuple[Placement, ...], ...]  # for each tensor, one placement an axis


def combinations(
    tensors: Sequence[torch.Tensor], mesh_shape: tuple[int, ...], limit: int, seed: Any, reductions: bool = True
) -> Iterator[Combination]:
    """Layouts of several tensors: on one axis first every placement of each tensor while the others are replicated or
    cut alike, then a deterministic sample of the rest. No combination comes twice."""
    generator = random.Random(f"{seed} {mesh_shape}")
    allowed = [_reductions_for(t) if reductions else [] for t in tensors]
    seen: set[Any] = set()
    whole = (Replicate(),) * len(mesh_shape)
    systematic: list[Combination] = []
    if len(mesh_shape) == 1:
        for i, t in enumerate(tensors):
            for place in placements_for(t, mesh_shape[0], generator, allowed[i]):
                systematic.append(tuple((place,) if j == i else whole for j in range(len(tensors))))
        for dim in range(max((t.dim() for t in tensors), default=0)):
            for back in (False, True):  # the same dim counted from the front, or from the back
                places = [t.dim() - 1 - dim if back else dim for t in tensors]
                systematic.append(
                    tuple((Shard(d),) if 0 <= d < t.dim() else whole for t, d in zip(tensors, places, strict=True))
                )
        if len(systematic) > limit:  # what is left out differs from sample to sample
            generator.shuffle(systematic)
    tries = 0
    for chosen in systematic[: limit * 2 // 3 if len(tensors) > 1 else limit]:
        if str(chosen) not in seen:
            seen.add(str(chosen))
            yield chosen
    while len(seen) < limit and tries < 4 * limit:
        tries += 1
        chosen = tuple(
            tuple(random_placements(t, mesh_shape, generator, ops)) for t, ops in zip(tensors, allowed, strict=True)
        )
        if str(chosen) not in seen:
            seen.add(str(chosen))
            yield chosen
