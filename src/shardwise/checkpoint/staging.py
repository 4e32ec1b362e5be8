"""Copies of values, for a save that goes on later. Memory that lies together is copied in one run.

Tensors that were made one after the other mostly lie so, some bytes apart. A run that is larger than the processor's
cache is copied past it: in little more than half the time that copies of its tensors take, one by one.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from shardwise.checkpoint.holders import Held, lies_together
from shardwise.checkpoint.jobs import Task

_ALIGNED = 64


class _Run(NamedTuple):
    """Addresses of memory, and where in the room the copy of the first one goes."""

    first: int
    last: int
    start: int


class Staging:
    """Where copies of the values of some tasks go in one piece of memory, of `size` bytes."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks, self._runs, at = tasks, list[_Run](), 0
        values = [values for task in tasks for _, values in task.pieces]
        for first, last in _together(_memory(x) for x in values if _is_run(x)):
            at += (first - at) % _ALIGNED  # what is aligned stays so
            self._runs.append(_Run(first, last, at))
            at += last - first
        self._starts: list[int] = []  # of the copy of each of the values
        for x in values:
            if _is_run(x):
                run = self._runs[bisect.bisect_right(self._runs, x.data_ptr(), key=lambda run: run.first) - 1]
                self._starts.append(x.data_ptr() - run.first + run.start)
            else:
                self._starts.append(at + -at % _ALIGNED)
                at = self._starts[-1] + x.numel() * x.element_size()
        self.size = at + _ALIGNED

    def fill(self, room: torch.Tensor) -> list[Task]:
        """The same tasks with copies of the values, in `room` (bytes)."""
        for first, last, start in self._runs:
            ctypes.memmove(room.data_ptr() + start, first, last - first)
        starts = iter(self._starts)
        return [task._replace(pieces=[_copied(x, next(starts), room) for x in task.pieces]) for task in self.tasks]


def _copied(piece: Held, start: int, room: torch.Tensor) -> Held:
    tile, values = piece
    copy = room[start : start + values.numel() * values.element_size()].view(values.dtype).view(values.shape)
    return Held(tile, copy if _is_run(values) else copy.copy_(values))


def _is_run(values: torch.Tensor) -> bool:
    return lies_together(values) and values.numel() > 0 and values.data_ptr() % values.element_size() == 0


def _memory(values: torch.Tensor) -> tuple[int, int]:
    first = values.data_ptr()
    return first, first + values.numel() * values.element_size()


def _together(memories: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pieces of memory, those put together between which there is no page that neither of them is in: such a page may
    be nobody's, and must not be read."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(memories):
        if found and first // mmap.PAGESIZE <= (found[-1][1] - 1) // mmap.PAGESIZE + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found
