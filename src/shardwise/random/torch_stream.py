"""The other stream, `use("torch")`: exactly the numbers plain torch draws on one device, in its order. Every rank draws
them all and keeps its part. On a CPU, where torch draws one number after the other, it does so a chunk at a time."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.layout import contiguous_stride
from shardwise.random.boxes import Intervals
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
    last = n if name in _ONE_BY_ONE else n - n % _GROUP
    for start in range(0, last, CHUNK):
        yield start, drawn(min(CHUNK, last - start))
    if last < n:  # the last sixteen are drawn anew; what torch drew for the incomplete group is lost
        if dtype.itemsize >= 4:
            torch.empty(n - last, dtype=dtype).uniform_(generator=generator)
        yield n - _GROUP, drawn(_GROUP)


def keep_part(
    local: torch.Tensor, sides: Sequence[Intervals], shape: Sequence[int], start: int, numbers: torch.Tensor
) -> None:
    """Copy those numbers of a stretch that a rank holds, by its indices of each dim, into its local tensor. They are a
    stretch of that as well, since both are in the same order."""
    first, last = (held_before(sides, shape, i) for i in (start, start + len(numbers)))
    if first == last:
        return
    places = np.unravel_index(np.arange(first, last), tuple(local.shape) or (1,))
    numbered = np.zeros(last - first, dtype=np.int64)
    for place, side, step in zip(places, sides, contiguous_stride(shape)):
        held = np.concatenate([np.arange(a, b) for a, b in side])
        numbered += held[place] * step
    mine = numbers[torch.from_numpy(numbered - start).to(numbers.device)]
    if local.is_contiguous():
        local.view(-1)[first:last] = mine
    else:
        local[tuple(map(torch.from_numpy, places))] = mine


def held_before(sides: Sequence[Intervals], shape: Sequence[int], number: int) -> int:
    """How many elements that a rank holds come before element `number` of the whole tensor.

    >>> held_before([((1, 3),), ((0, 2), (4, 5))], (3, 5), 7)
    2
    """
    sizes = [sum(b - a for a, b in side) for side in sides]
    if number >= math.prod(shape):
        return math.prod(sizes)
    total = 0
    for dim, step in enumerate(contiguous_stride(shape)):
        index, number = divmod(number, step)
        below, inside = _count_below(sides[dim], index)
        total += below * math.prod(sizes[dim + 1 :])
        if not inside:
            return total
    return total


def _count_below(side: Intervals, index: int) -> tuple[int, bool]:
    before = bisect.bisect_right([a for a, _ in side], index)
    below = sum(min(b, index) - a for a, b in side[:before])
    return below, before > 0 and index < side[before - 1][1]
