"""The other stream, `use("torch")`: exactly the numbers plain torch draws on one device, in its order. Every rank draws
them all and keeps its part. On a CPU, where torch draws one number after the other, it does so a chunk at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.layout import contiguous_stride
from shardwise.layout.region import Region, region_shape
from shardwise.layout.split import count, intersect
from shardwise.random.distributions import Distribution

CHUNK = 1 << 20  # elements drawn at a time
_GROUP = 16  # torch's normal_ works on that many together
_ONE_BY_ONE = ("uniform_", "random_", "geometric_", "cauchy_")  # drawing a part and then the rest is drawing it all


def draw_whole(empty: torch.Tensor, what: Distribution, generator: torch.Generator | None = None) -> torch.Tensor:
    """What torch draws for a whole tensor."""
    name, *args = what.torch_call
    if name == "dropout":
        return F.dropout(empty.fill_(1), *args)
    return getattr(empty, name)(*args, generator=generator)


def chunks(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    what: Distribution,
    generator: torch.Generator | None = None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """The numbers of a whole tensor in stretches, each with the place of its first element in the flat tensor. A later
    stretch may overlap the end of an earlier one, and then counts."""
    n = math.prod(shape)

    def drawn(count: int) -> torch.Tensor:
        return draw_whole(torch.empty(count, dtype=dtype, device=device), what, generator)

    name = what.torch_call[0]
    plain = tuple(stride) == contiguous_stride(shape) and not dtype.is_complex and device.type == "cpu"
    if n <= CHUNK or not plain or name not in (*_ONE_BY_ONE, "normal_"):
        whole = draw_whole(torch.empty_strided(shape, stride, dtype=dtype, device=device), what, generator)
        yield 0, whole.reshape(-1)
        return
    if name == "normal_" and n % _GROUP and _lost_draws(dtype) is None:
        yield 0, drawn(n)
        return
    last = n if name in _ONE_BY_ONE else n - n % _GROUP
    for start in range(0, last, CHUNK):
        yield start, drawn(min(CHUNK, last - start))
    if last < n:  # the last sixteen are drawn anew; what torch drew for the incomplete group is lost
        for lost in _lost_draws(dtype) or ():
            torch.empty(n - last, dtype=lost).uniform_(generator=generator)
        yield n - _GROUP, drawn(_GROUP)


@functools.cache
def _lost_draws(dtype: torch.dtype) -> tuple[torch.dtype, ...] | None:
    """What this version of torch draws for the incomplete last group of `normal_` and then draws anew: numbers of the
    dtype, or nothing. Found by trying. None: neither, so that the numbers cannot be drawn a part at a time."""
    want = torch.Generator().manual_seed(0)
    whole = torch.empty(_GROUP + 1, dtype=dtype).normal_(generator=want)
    for lost in ((), (dtype,), (torch.float32,), (torch.float64,)):
        got = torch.Generator().manual_seed(0)
        torch.empty(_GROUP, dtype=dtype).normal_(generator=got)
        for kind in lost:
            torch.empty(1, dtype=kind).uniform_(generator=got)
        tail = torch.empty(_GROUP, dtype=dtype).normal_(generator=got)
        if torch.equal(whole[1:], tail) and torch.equal(want.get_state(), got.get_state()):
            return lost
    return None


def keep_part(local: torch.Tensor, region: Region, shape: Sequence[int], start: int, numbers: torch.Tensor) -> None:
    """Copy those numbers of a stretch that are in a rank's region into its local tensor. They are a stretch of that as
    well, since both are in the same order."""
    first, last = (held_before(region, shape, i) for i in (start, start + len(numbers)))
    if first == last:
        return
    places = np.unravel_index(np.arange(first, last), tuple(local.shape) or (1,))
    numbered = np.zeros(last - first, dtype=np.int64)
    for place, side, step in zip(places, region, contiguous_stride(shape)):
        held = np.concatenate([np.arange(a, b) for a, b in side])
        numbered += held[place] * step
    mine = numbers[torch.from_numpy(numbered - start).to(numbers.device)]
    if local.is_contiguous():
        local.view(-1)[first:last] = mine
    else:
        local[tuple(map(torch.from_numpy, places))] = mine


def held_before(region: Region, shape: Sequence[int], number: int) -> int:
    """How many elements of a region come before element `number` of the whole tensor.

    >>> held_before([((1, 3),), ((0, 2), (4, 5))], (3, 5), 7)
    2
    """
    sizes = region_shape(region)
    if number >= math.prod(shape):
        return math.prod(sizes)
    total = 0
    for dim, step in enumerate(contiguous_stride(shape)):
        index, number = divmod(number, step)
        total += count(intersect(region[dim], ((0, index),))) * math.prod(sizes[dim + 1 :])
        if not any(a <= index < b for a, b in region[dim]):
            return total
    return total
