"""How the set of indices that a rank holds of a dim changes where an op renames, cuts or merges indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.layout.split import Intervals, intersect, normalize, repeat, shift

MOST_PIECES = 4096  # a split with more intervals per rank than this is gathered instead

SetMap = Callable[[Intervals], Intervals | None]  # None where the op cannot say it of this set
Range = tuple[int, int, int]  # start, stop, step


def unchanged(held: Intervals) -> Intervals:
    return held


@dataclass(frozen=True)
class Carried:
    """Where the cut of one input dim goes: a dim of the output, and what becomes of a held set."""

    dim: int
    change: SetMap = unchanged

    def fits(self, sets: set[Intervals]) -> bool:
        """Whether every one of these sets can go there."""
        changed = map(self.change, sets)  # one after another: most that do not fit show it at the first set
        return all(c is not None and len(c) <= MOST_PIECES for c in changed)


def sliced(start: int, stop: int, step: int) -> SetMap:
    """Where the indices start, start+step, ... < stop of a held set go."""

    def change(held: Intervals) -> Intervals | None:
        if step != 1 and len(held) > 1:
            return None  # the picked indices are not evenly spaced in what a rank holds
        kept = shift(intersect(held, normalize([(start, stop)])), -start)
        return normalize((-(-a // step), -(-b // step)) for a, b in kept)

    return change


def flipped(n: int) -> SetMap:
    return lambda held: normalize((n - b, n - a) for a, b in held)


def rolled(n: int, by: int) -> SetMap:
    """Indices go `by` up, those at the end to the front."""
    return lambda held: intersect(normalize((*shift(held, by), *shift(held, by - n))), ((0, n),))


def regrouped(sizes_in: Sequence[int], dim: int, sizes_out: Sequence[int]) -> list[Carried]:
    """For a reshape: the output dims that may take the cut of input dim `dim`, best first. The held set, in units of
    what stands to the right of the output dim, must be whole units; a larger output dim repeats it, a smaller one must
    find the same set in each of its blocks."""
    n, right = sizes_in[dim], math.prod(sizes_in[dim + 1 :])
    if 0 in sizes_in:
        return []
    ways: list[tuple[int, Carried]] = []
    for target, size in enumerate(sizes_out):
        right_out = math.prod(sizes_out[target + 1 :])
        if right_out % right and right % right_out or n * right % right_out:
            continue
        change, space = _rescaled(right, right_out), n * right // right_out
        if size % space == 0:
            times = size // space
            ways.append((times, Carried(target, _then(change, repeated(space, times)))))
        elif space % size == 0 and size > 1:
            ways.append((1, Carried(target, _then(change, _periodic(size, space // size)))))
    return [way for _, way in sorted(ways, key=lambda w: w[0])]


def repeated(space: int, times: int) -> SetMap:
    return lambda held: None if len(held) * times > MOST_PIECES else repeat(held, space, times)


def _rescaled(times: int, by: int) -> SetMap:
    """Indices times `times` / `by`, where all of them come out whole."""

    def change(held: Intervals) -> Intervals | None:
        scaled = [(divmod(a * times, by), divmod(b * times, by)) for a, b in held]
        return None if any(a[1] or b[1] for a, b in scaled) else tuple((a[0], b[0]) for a, b in scaled)

    return change


def _then(first: SetMap, second: SetMap) -> SetMap:
    def change(held: Intervals) -> Intervals | None:
        middle = first(held)
        return None if middle is None else second(middle)

    return change


def _periodic(period: int, times: int) -> SetMap:
    """The set within one block, if every block has the same."""

    def change(held: Intervals) -> Intervals | None:
        block = intersect(held, ((0, period),))
        return block if repeat(block, period, times) == held else None

    return change
