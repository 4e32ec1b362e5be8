"""Saves that go on beside the program: it waits while memory is copied, and a thread writes the copy."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NoReturn

import numpy as np
import torch

from shardwise.checkpoint import write
from shardwise.checkpoint.jobs import nbytes
from shardwise.checkpoint.world import World
from shardwise.checkpoint.write import Draft
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
        self._lock, self._followed = threading.Lock(), False
        self._after: list[Callable[[], None]] = []

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

    def then(self, action: Callable[[], None]) -> None:
        """Have the writing thread do something once the checkpoint is there.

        Args:
            action: What it does; called at once where the checkpoint is there already.
        """
        with self._lock:
            if not self._followed:
                self._after.append(action)
                return
        action()  # it is there already

    def _follow(self) -> None:
        with self._lock:
            self._followed = True
        for action in self._after:
            action()

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._ended.set()


class _Writer:
    """One thread that does the saves of this process in their order, and the memory they are copied to."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[SaveHandle, Callable[[], None]]] = SimpleQueue()
        self.handles: list[SaveHandle] = []
        self.free: list[torch.Tensor] = []  # memory of earlier saves, to be used again
        self.used = 0
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def submit(self, draft: Draft, world: World, most: int) -> SaveHandle:
        size, handle = nbytes(draft.tasks) + 64, SaveHandle(str(draft.path))
        room = self._take(size, most)
        copied = draft.staged(room)
        self.handles.append(handle)

        def save() -> None:
            try:
                write.run(copied, world)
                handle._follow()
            finally:
                self._give(room)

        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._run, name="shardwise checkpoint", daemon=True)
            self.thread.start()
        self.queue.put((handle, save))
        return handle

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
        """Memory for a copy; waits while those under way take too much."""
        with self.changed:
            self.changed.wait_for(lambda: self.used == 0 or self.used + size <= most)
            found = min((room for room in self.free if room.numel() >= size), key=torch.Tensor.numel, default=None)
            if found is not None:
                self.free = [room for room in self.free if room is not found]
            else:
                self.free.clear()
                found = staging_room(size)
            self.used += found.numel()
        return found

    def _give(self, room: torch.Tensor) -> None:
        with self.changed:
            self.used -= room.numel()
            self.free = [room]  # one is kept: the next save is likely of the same size
            self.changed.notify_all()

    def has_failed(self) -> bool:
        """Whether a save has failed that nobody was told of; those that ended well are forgotten."""
        self.handles = [handle for handle in self.handles if not handle.done() or handle.is_untold()]
        return any(handle.is_untold() for handle in self.handles)

    def wait(self) -> None:
        """Wait for all. Raises what went wrong in the first that failed; the next call raises that of the next one."""
        for handle in list(self.handles):
            handle._ended.wait()
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


def start(draft: Draft, world: World, most: int = STAGED_BYTES) -> SaveHandle:
    """Copy what this process has to write, and write it in a thread."""
    return _writer.submit(draft, world, most)


def has_failed() -> bool:
    """Whether an earlier save has failed on this process, and nobody was told."""
    return _writer.has_failed()


def raise_earlier() -> NoReturn:
    """Raise what went wrong in an earlier save, once it has ended here too. All processes call it if one has failed."""
    _writer.wait()
    raise CheckpointError("an earlier asynchronous save failed on another rank")


def check_earlier(world: World) -> None:
    """Raise what went wrong in an earlier save: on all processes alike, though it may not have ended on all yet."""
    if not world.all_well(not has_failed()):
        raise_earlier()


def wait_for_all() -> None:
    """Wait until all saves of this process have ended; raises what went wrong in one of them."""
    _writer.wait()


@atexit.register
def _finish() -> None:
    """A program that ends normally keeps its last save."""
    _writer.wait()
