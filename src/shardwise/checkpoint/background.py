"""Saves that go on beside the program: it waits while memory is copied, and a thread writes the copy."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import NoReturn

import numpy as np
import torch

from shardwise.checkpoint import write
from shardwise.checkpoint.staging import Staging
from shardwise.checkpoint.world import World
from shardwise.checkpoint.write import Attempt
from shardwise.errors import CheckpointError

STAGED_BYTES = 8 << 30
_LARGE_PAGE = 2 << 20


class SaveHandle:
    """A save that is under way. `wait()` returns once it is on the disk, or raises what went wrong."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._told = False

    def __repr__(self) -> str:
        how = "under way" if not self.done() else "there" if self._error is None else "failed"
        return f"SaveHandle({self.path!r}, {how})"

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is there.

        Args:
            timeout: How many seconds to wait; by default as long as it takes.

        Raises:
            CheckpointError: It could not be written, or `timeout` seconds were not enough.
        """
        if not self._ended.wait(timeout):
            raise CheckpointError(f"{self.path}: the save did not end within {timeout} s")
        self.check()

    def done(self) -> bool:
        """Return whether the save has ended, well or not."""
        return self._ended.is_set()

    def is_untold(self) -> bool:
        """Return whether the save has failed and nobody was told."""
        return self._ended.is_set() and self._error is not None and not self._told

    def check(self) -> None:
        """Say what went wrong, once; do nothing if nothing did.

        Raises:
            CheckpointError: The save has failed, and nobody was told.
        """
        if self.is_untold():
            self._told = True
            raise CheckpointError(f"the asynchronous save to {self.path} failed: {self._error}") from self._error

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._ended.set()


def ended(path: str) -> SaveHandle:
    """The handle of a save that is there already."""
    handle = SaveHandle(path)
    handle._end(None)
    return handle


class _Writer:
    """One thread that does the saves of this process in their order, and the memory they are copied to."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[SaveHandle, Callable[[], None]]] = SimpleQueue()
        self.handles: list[SaveHandle] = []
        self.free: list[torch.Tensor] = []  # memory of earlier saves, to be used again
        self.used = 0
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def submit(self, attempt: Attempt, world: World, most: int, then: Callable[[], None] | None) -> SaveHandle:
        """Copy what is to be written, and have the thread write it. What goes wrong here goes to the thread too, which
        tells the other processes: this call returns on all of them."""
        handle = SaveHandle(str(attempt.path))
        room, make = self._staged(attempt, most)
        self.handles.append(handle)

        def save() -> None:
            try:
                # nobody writes before all have their copies: that would take processors from those that copy
                world.all_well(True)
                write.run(make(), world)
                if then is not None:
                    world.from_first(then)
            finally:
                if room is not None:
                    self._give(room, most)

        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._run, name="shardwise checkpoint", daemon=True)
            self.thread.start()
        self.queue.put((handle, save))
        return handle

    def _staged(self, attempt: Attempt, most: int) -> tuple[torch.Tensor | None, Callable[[], Attempt]]:
        """Memory with copies of what is to be written, and what makes the attempt to write them, in the thread.
        Nothing of the program's own tensors is kept."""
        path, room = attempt.path, None
        try:
            draft = attempt.checked()
            staging = Staging(draft.tasks)
            room = self._take(staging.size, most)
            staged = staging.fill(room)
        except Exception as error:
            return room, partial(Attempt, path, None, error)
        rest = replace(draft, tasks=[])
        return room, partial(Attempt.of, path, lambda: replace(rest, tasks=staged.tasks()))

    def _run(self) -> None:
        while True:
            handle, save = self.queue.get()
            try:
                save()
            except BaseException as error:  # raised by the next call of the program
                handle._end(error)
            else:
                handle._end(None)

    def _take(self, size: int, most: int) -> torch.Tensor:
        """Memory for a copy; waits while those under way take too much. Memory in use and memory that is kept are never
        more than `most` together, unless one copy alone is."""
        with self.changed:
            self.changed.wait_for(lambda: self.used == 0 or self.used + size <= most)
            limit = max(most, self.used + size)
            fitting = [room for room in self.free if room.numel() >= size and self.used + room.numel() <= limit]
            self.free.clear()
            found = fitting[0] if fitting else staging_room(size)
            self.used += found.numel()
        return found

    def _give(self, room: torch.Tensor, most: int) -> None:
        with self.changed:
            self.used -= room.numel()
            # one is kept: the next save is likely of the same size
            self.free = [room] if self.used + room.numel() <= most else []
            self.changed.notify_all()

    def has_failed(self) -> bool:
        """Whether a save has failed that nobody was told of; those that ended well are forgotten."""
        self.handles = [handle for handle in self.handles if not handle.done() or handle.is_untold()]
        return any(handle.is_untold() for handle in self.handles)

    def settle(self) -> None:
        """Wait until all have ended, well or not."""
        for handle in list(self.handles):
            handle._ended.wait()

    def wait(self) -> None:
        """Wait for all. Raises what went wrong in the first that failed; the next call raises that of the next one."""
        self.settle()
        failed = [handle for handle in self.handles if handle.is_untold()]
        self.handles = failed[1:]
        for handle in failed[:1]:
            handle.check()

    def forget(self) -> None:
        """Begin anew in a forked process: it has no thread that would end the saves of its parent."""
        self.__init__()  # type: ignore[misc]


def staging_room(size: int) -> torch.Tensor:
    """Memory of so many bytes in large pages where the system has them: made in less time, and quicker to fill."""
    if size < _LARGE_PAGE or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(size, dtype=torch.uint8)
    room = mmap.mmap(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without them
        room.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(room, dtype=np.uint8)
    first = -whole.ctypes.data % _LARGE_PAGE
    return torch.from_numpy(whole[first : first + size])


_writer = _Writer()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_writer.forget)


def start(attempt: Attempt, world: World, most: int, then: Callable[[], None] | None = None) -> SaveHandle:
    """Copy what this process has to write, and write it in a thread.

    Args:
        then: What the first process does once the checkpoint is there; an error of it is one of the save, on all.
    """
    return _writer.submit(attempt, world, most, then)


def has_failed() -> bool:
    """Whether an earlier save has failed on this process, and nobody was told."""
    return _writer.has_failed()


def under_way() -> list[str]:
    """Where this process is saving to now."""
    return [handle.path for handle in _writer.handles if not handle.done()]


def raise_earlier() -> NoReturn:
    """Raise what went wrong in an earlier save, once it has ended here too. All processes call it if one has failed."""
    _writer.wait()
    raise CheckpointError("an earlier asynchronous save failed on another rank")


def check_earlier(world: World) -> None:
    """Raise what went wrong in an earlier save: on all processes alike, though it may not have ended on all yet."""
    if not world.all_well(not has_failed()):
        raise_earlier()


def settle() -> None:
    """Wait until all saves of this process have ended, well or not: `has_failed` and `check_earlier` say which."""
    _writer.settle()


def wait_for_all(world: World) -> None:
    """Wait until all saves have ended. Every process calls it; all raise if a save has failed on one of them."""
    settle()
    check_earlier(world)


@atexit.register
def _finish() -> None:
    """A program that ends normally keeps its last save."""
    _writer.wait()
