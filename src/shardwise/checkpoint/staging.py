"""Copies of values, for a save that goes on later. Memory that lies together is copied in one run.

Tensors that were made one after the other mostly lie so, some bytes apart. A run that is larger than the processor's
cache is copied past it: in little more than half the time that copies of its tensors take, one by one.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import mmap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from shardwise.checkpoint.holders import Held, lies_together
from shardwise.checkpoint.jobs import Task
from shardwise.layout.tiles import Tile

_ALIGNED = 64
_AT_ONCE = 512 << 10  # bytes of a call: the C library copies longer ones by instructions that take a fifth longer


class _Run(NamedTuple):
    """Addresses of memory, and where in the room the copy of the first one goes."""

    first: int
    last: int
    start: int


class Staging:
    """Where copies of the values of some tasks go in one piece of memory, of `size` bytes."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks, self._runs, at = tasks, list[_Run](), 0
        self._values = [values for task in tasks for _, values in task.pieces]
        memories = [_memory(x) if _is_run(x) else None for x in self._values]
        for first, last in _together(memory for memory in memories if memory is not None):
            at += (first - at) % _ALIGNED  # what is aligned stays so
            self._runs.append(_Run(first, last, at))
            at += last - first
        self._starts: list[int] = []  # of the copy of each of the values
        self._alone: list[int] = []  # those that are in no run
        for i, (x, memory) in enumerate(zip(self._values, memories)):
            if memory is not None:
                run = self._runs[bisect.bisect_right(self._runs, memory[0], key=lambda run: run.first) - 1]
                self._starts.append(memory[0] - run.first + run.start)
            else:
                self._alone.append(i)
                self._starts.append(at + -at % _ALIGNED)
                at = self._starts[-1] + x.numel() * x.element_size()
        self.size = at + _ALIGNED

    def fill(self, room: torch.Tensor) -> Staged:
        """Copy the values to `room` (bytes)."""
        for first, last, start in self._runs:
            for at in range(0, last - first, _AT_ONCE):
                ctypes.memmove(room.data_ptr() + start + at, first + at, min(_AT_ONCE, last - first - at))
        for i in self._alone:
            x = self._values[i]
            _copy(room, self._starts[i], x.dtype, x.shape).copy_(x)
        starts = iter(self._starts)
        tasks = [(task._replace(pieces=[]), [(tile, next(starts)) for tile, _ in task.pieces]) for task in self._tasks]
        return Staged(room, tasks)


class Staged(NamedTuple):
    """Copies of values in one piece of memory: where that of each tile begins. It keeps nothing of what was copied."""

    room: torch.Tensor
    places: list[tuple[Task, list[tuple[Tile, int]]]]

    def tasks(self) -> list[Task]:
        """The tasks, with the copies as values: made when they are needed, while the program goes on."""
        return [
            task._replace(
                pieces=[Held(tile, _copy(self.room, at, task.entry.dtype, tile.sizes)) for tile, at in places]
            )
            for task, places in self.places
        ]


def _copy(room: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    return room[start : start + size].view(dtype).view(tuple(shape))


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
