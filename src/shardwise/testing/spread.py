"""Laying a plain tensor out in every way there is: uneven and empty shards, parts of every reduction."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from shardwise.argument_types import MeshArgument
from shardwise.comm.rank_tensor import RankTensor
from shardwise.layout import Layout, Partial, Placement, Replicate, Shard
from shardwise.layout.placement import check_reductions
from shardwise.layout.shapes import dense_stride
from shardwise.mesh import as_mesh
from shardwise.move.pack import take
from shardwise.tensor import DTensor


def spread_out(
    x: torch.Tensor,
    mesh: MeshArgument,
    placements: Sequence[Placement],
    seed: int = 0,
    requires_grad: bool = False,
    holes: bool = False,
) -> DTensor:
    """A tensor laid out, for tests: Partial layouts too, in parts that are no multiples of each other.

    Args:
        x: The whole tensor.
        mesh: The mesh; on one of processes, every rank makes this call.
        placements: One per mesh axis. The parts of a Partial axis are uneven and of both signs; they reduce to `x`
            exactly where the values of `x` have bits to spare (see `with_spare_bits`).
        seed: Chooses the parts.
        requires_grad: Whether autograd records what is done with it.
        holes: Whether local tensors use every other element of their memory.

    Returns:
        A leaf tensor.
    """
    inner = as_mesh(mesh)
    layout = Layout.make(inner, placements, tuple(x.shape), x.dtype)
    at = functools.cache(Parts(x, layout, seed, holes).at)  # ranks on a Replicate axis share one tensor
    replicate = [p.is_replicate() for p in layout.placements]
    spots = map(inner.coords, inner.ranks) if inner.comm.simulated else [inner.comm.coords_here()[0]]
    held = [at(tuple(0 if r else c for r, c in zip(replicate, coords, strict=True))) for coords in spots]
    if requires_grad and Partial("product") in layout.placements:  # its factors have gradients, the product has none
        for factor in held:
            factor.requires_grad_()
    local = RankTensor(held) if inner.comm.simulated else held[0]
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
        for share, i in zip(self.shares, coords, strict=True):
            x = x if share is None else share(x, i)
        for dim, held in enumerate(self.layout.region(coords)):
            if held != ((0, x.shape[dim]),):
                x = take(x, dim, held)
        return with_holes(x) if self.holes else x.clone()


# -- shares: how one tensor becomes the parts of a reduction -----------------------------------------------------
Share = Callable[[torch.Tensor, int], torch.Tensor]


def is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _sum(generator: random.Random, size: int, x: torch.Tensor) -> Share:
    """Shares of both signs that add up to one and differ per element: parts that are multiples of the tensor would not
    show that a rule is wrong. They are quarters, so that few bits are lost. A zero is shared as 1 - 1."""
    step = 4 if is_float(x.dtype) else 1
    noise = torch.Generator().manual_seed(generator.randrange(2**31))
    parts = [torch.randint(-2 * step, 2 * step + 1, x.shape, generator=noise) for _ in range(size - 1)]
    shares = [(part / step if is_float(x.dtype) else part).to(x.device) for part in parts]
    rest = sum(shares)

    def share(x: torch.Tensor, i: int) -> torch.Tensor:
        zero = x == 0
        whole = torch.where(zero, torch.ones_like(x), x)
        last = torch.where(zero, 0 - whole * rest, whole * (1 - rest))
        return (last if i == size - 1 else whole * shares[i]).to(x.dtype)

    return share


def _avg(generator: random.Random, size: int, x: torch.Tensor) -> Share:
    share = _sum(generator, size, x)
    return lambda x, i: share(x, i) * size


def _product(generator: random.Random, size: int, x: torch.Tensor) -> Share:
    powers = [generator.choice([-1, 0, 1]) if is_float(x.dtype) else 0 for _ in range(size)]
    signs = [generator.choice([-1, 1]) if is_float(x.dtype) else 1 for _ in range(size)]
    whole = generator.randrange(size)
    rest = [s * 2.0**p for s, p in zip(signs, powers, strict=True)]
    others = math.prod(value for i, value in enumerate(rest) if i != whole)
    return lambda x, i: torch.full_like(x, rest[i]) if i != whole else x / others if is_float(x.dtype) else x


def _extreme(sign: int, generator: random.Random, size: int, x: torch.Tensor) -> Share:
    """Every element has its value on one coordinate and a lesser one (or greater, for min) on the others."""
    low = [generator.choice([1, 2, 3]) for _ in range(size)]
    owner = torch.arange(x.numel(), device=x.device).view(x.shape) % size
    if x.dtype is torch.bool:
        return lambda x, i: torch.where(owner == i, x, torch.full_like(x, sign < 0))
    return lambda x, i: torch.where(owner == i, x, _beyond(x, -sign * low[i]))


def _beyond(x: torch.Tensor, by: int) -> torch.Tensor:
    if is_float(x.dtype):
        return x + by
    limits = torch.iinfo(x.dtype)
    return torch.where(x > limits.min + 3, x + by, x) if by < 0 else torch.where(x < limits.max - 3, x + by, x)


def _bitwise(op: str, generator: random.Random, size: int, x: torch.Tensor) -> Share:
    count = torch.arange(x.numel(), device=x.device).view(x.shape) + generator.randrange(7)
    noise = [(count * (i + 1) % (i + 3)).to(x.dtype) for i in range(size - 1)]

    def share(x: torch.Tensor, i: int) -> torch.Tensor:
        if i < size - 1:
            return noise[i] if op == "bxor" else x & noise[i] if op == "bor" else x | noise[i]
        return functools.reduce(torch.bitwise_xor, noise, x) if op == "bxor" else x

    return share


_SHARES: dict[str, Callable[[random.Random, int, torch.Tensor], Share]] = {
    "sum": _sum,
    "avg": _avg,
    "product": _product,
    "max": functools.partial(_extreme, 1),
    "min": functools.partial(_extreme, -1),
    **{op: functools.partial(_bitwise, op) for op in ("bor", "band", "bxor")},
}
_NARROWER = {torch.float64: torch.float32, torch.float32: torch.bfloat16}


def with_spare_bits(x: torch.Tensor) -> torch.Tensor:
    """`x`, rounded to numbers whose shares add up exactly."""
    if x.dtype.is_complex:
        return torch.complex(with_spare_bits(x.real), with_spare_bits(x.imag)) if x.dtype != torch.complex32 else x
    return x.to(_NARROWER[x.dtype]).to(x.dtype) if x.dtype in _NARROWER else x


def with_holes(t: torch.Tensor) -> torch.Tensor:
    """The same values in every other element of a memory twice as large."""
    return torch.stack([t.detach(), torch.zeros_like(t)], -1)[..., 0]


def with_holes_between(t: torch.Tensor) -> torch.Tensor:
    """The same values as a part of a tensor that is larger in every dim, in the same order of memory."""
    sizes = [n + 1 for n in t.shape]
    larger = torch.empty_strided(sizes, dense_stride(sizes, t.stride()), dtype=t.dtype, device=t.device).zero_()
    return larger[tuple(slice(0, n) for n in t.shape)].copy_(t.detach())


def stored_alike(t: torch.Tensor) -> torch.Tensor:
    """The same values in new memory of the same strides, holes and repeated elements included, from its start on."""
    reach = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    memory = t.detach().as_strided((reach,), (1,)).clone()
    return memory.as_strided(t.shape, t.stride())


def reversed_in_memory(t: torch.Tensor) -> torch.Tensor:
    """The same values with the first dim as the innermost in memory."""
    order = range(t.dim())[::-1]
    return t.detach().permute(*order).contiguous().permute(*order) if t.dim() > 1 else t


def channels_last(t: torch.Tensor) -> torch.Tensor:
    """The same values with channels as the innermost dim in memory, of tensors that may be images or volumes."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.detach().contiguous(memory_format=formats[t.dim()]) if t.dim() in formats else t


def repeated_in_memory(t: torch.Tensor) -> torch.Tensor:
    """The first slice along the first dim in place of all: one in memory, of stride 0."""
    return t.detach()[:1].expand_as(t) if t.dim() and t.shape[0] > 1 else t


# -- which layouts -----------------------------------------------------------------------------------------------
def random_sizes(n: int, parts: int, generator: random.Random) -> tuple[int, ...]:
    """`parts` sizes >= 0 that add up to n; some are likely to be 0."""
    cuts = sorted(generator.randint(0, n) for _ in range(parts - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True))


def reductions_of(dtype: torch.dtype) -> list[str]:
    """The reductions that a Partial of this dtype may have, sum first."""
    found = []
    for op in _SHARES:
        with contextlib.suppress(ValueError):
            check_reductions([Partial(op)], dtype)
            found.append(op)
    return [op for op in found if dtype is not torch.bool or op not in ("sum", "avg", "product")]


def can_add(dtype: torch.dtype) -> bool:
    """Whether torch has a sum of this dtype whose result has the same dtype."""
    eight_bits = dtype.is_floating_point and dtype.itemsize == 1
    return not eight_bits and dtype not in (torch.bool, torch.uint16, torch.uint32, torch.uint64)


def reductions_for(x: torch.Tensor) -> list[str]:
    """The same for one tensor: infinite values cannot be shared in a sum, and a NaN maximum has no gradient."""
    found = reductions_of(x.dtype)
    if not can_add(x.dtype) and x.dtype is not torch.bool:
        return []
    if x.dtype in (torch.bfloat16, torch.float16):  # their shares would not add up to x
        return ["max", "min"] if bool(x.isfinite().all()) else []
    if not is_float(x.dtype) or bool(x.isfinite().all()):
        return found
    return [op for op in found if op in (("sum",) if x.isnan().any() and not x.isinf().any() else ("max", "min"))]


def placements_for(
    x: torch.Tensor, size: int, generator: random.Random, reductions: Sequence[str] = ("sum",)
) -> list[Placement]:
    """Every kind of placement that an axis of `size` ranks can have for this tensor."""
    out: list[Placement] = [Replicate()]
    for dim, n in enumerate(x.shape):
        out += [Shard(dim), Shard(dim, sizes=random_sizes(n, size, generator))] if size > 1 else [Shard(dim)]
    return out + [Partial(op) for op in reductions]


def random_placements(
    x: torch.Tensor, mesh_shape: Sequence[int], generator: random.Random, reductions: Sequence[str] = ("sum",)
) -> list[Placement]:
    """Random placements for one tensor; sizes are explicit only where no other axis cuts the same dim, and all Partial
    axes have the same reduction."""
    places: list[Placement] = []
    for size in mesh_shape:
        used = {p.dim for p in places if isinstance(p, Shard)}
        pending = {p for p in places if isinstance(p, Partial)}
        options = [
            p
            for p in placements_for(x, size, generator, reductions)
            if not (isinstance(p, Shard) and p.pieces is not None and p.dim in used)
            and not (isinstance(p, Partial) and pending and p not in pending)
        ]
        places.append(generator.choice(options))
    return places


Combination = tuple[tuple[Placement, ...], ...]  # per tensor, one placement per axis


def combinations(
    tensors: Sequence[torch.Tensor],
    mesh_shape: tuple[int, ...],
    limit: int,
    seed: object,
    reductions: bool | Collection[str] = True,
) -> Iterator[Combination]:
    """At most `limit` layouts of several tensors: on one axis first every placement of each tensor while the others are
    replicated or cut in the same way, then a sample of the rest that `seed` chooses. No combination comes twice."""
    generator = random.Random(f"{seed} {mesh_shape}")
    wanted = _SHARES.keys() if reductions is True else reductions or ()
    allowed = [[op for op in reductions_for(t) if op in wanted] for t in tensors]
    systematic = _systematic(tensors, mesh_shape[0], generator, allowed) if len(mesh_shape) == 1 else []
    if len(systematic) > limit:  # what is left out differs from sample to sample
        generator.shuffle(systematic)
    sampled = (
        tuple(tuple(random_placements(t, mesh_shape, generator, ops)) for t, ops in zip(tensors, allowed, strict=True))
        for _ in range(4 * limit)
    )
    seen: set[str] = set()
    for chosen in itertools.chain(systematic[: limit * 2 // 3 if len(tensors) > 1 else limit], sampled):
        if len(seen) == limit:
            return
        if str(chosen) not in seen:
            seen.add(str(chosen))
            yield chosen


def _systematic(
    tensors: Sequence[torch.Tensor], size: int, generator: random.Random, reductions: Sequence[Sequence[str]]
) -> list[Combination]:
    """On an axis of `size` ranks: every placement of each tensor alone, every dim of all tensors at once."""
    whole = (Replicate(),)
    found: list[Combination] = []
    for i, t in enumerate(tensors):
        for place in placements_for(t, size, generator, reductions[i]):
            found.append(tuple((place,) if j == i else whole for j in range(len(tensors))))
    for dim in range(max((t.dim() for t in tensors), default=0)):
        for back in (False, True):  # the same dim counted from the front, or from the back
            dims = [(t.dim(), t.dim() - 1 - dim if back else dim) for t in tensors]
            found.append(tuple((Shard(d),) if 0 <= d < ndim else whole for ndim, d in dims))
    return found
