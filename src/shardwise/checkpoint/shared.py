"""Memory that processes of one host share: what one has read, the others take from it without a message.

Each process has one piece of it without a name in any file system, so that nothing is left if the process is killed.
Processes in containers of their own, or of other hosts, cannot open it: they get messages.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import uuid
from pathlib import Path

import numpy as np
import torch

from shardwise.checkpoint.direct import FILLED
from shardwise.checkpoint.world import World
from shardwise.sharded.groups import Group

_TOKEN = 16  # bytes at the beginning by which a process knows that it has opened the right memory
_known: dict[int, tuple[Group, Sharing]] = {}  # by group, which is kept alive with it


class Sharing:
    """The shared memory of this process, and that of the others of its host."""

    def __init__(self, world: World) -> None:
        self.hosts: tuple[int, ...] = tuple(range(world.size))  # of each process: the number of its host
        self._handles: dict[int, int] = {}
        self._mapped: dict[int, torch.Tensor] = {}
        self._me, self._size = world.rank, 0
        token = uuid.uuid4().bytes
        handle = _made(token)
        told = world.gather((_host(), os.getpid(), handle, token))
        for rank, (host, pid, number, theirs) in zip(world.ranks, told, strict=True):
            if handle is not None and number is not None and host == _host():
                opened = handle if rank == world.rank else _opened(pid, number, theirs)
                if opened is not None:
                    self._handles[rank] = opened
        seen = world.gather(sorted(self._handles))
        groups = dict(zip(world.ranks, seen, strict=True))
        first = {rank: i for i, rank in enumerate(world.ranks)}
        if all(groups[other] == groups[rank] for rank in world.ranks for other in groups[rank]):
            self.hosts = tuple(first[(groups[rank] or [rank])[0]] for rank in world.ranks)

    @staticmethod
    def of(world: World) -> Sharing | None:
        """The shared memory of some processes; None where there is one alone."""
        if world.group is None:
            return None
        found = _known.get(id(world.group))
        if found is None or found[0] is not world.group:
            found = _known[id(world.group)] = (world.group, Sharing(world))
        return found[1]

    def arena(self, size: int) -> torch.Tensor:
        """This process's memory, of at least so many bytes."""
        handle = self._handles.get(self._me)
        if handle is None:
            return torch.empty(size, dtype=torch.uint8)
        if os.fstat(handle).st_size < mmap.PAGESIZE + size:
            os.ftruncate(handle, mmap.PAGESIZE + size)
        return self.of_peer(self._me)

    def of_peer(self, rank: int) -> torch.Tensor:
        """The memory of a process of this host, as long as it is now."""
        size = os.fstat(self._handles[rank]).st_size
        known = self._mapped.get(rank)
        if known is None or known.numel() != size - mmap.PAGESIZE:
            mapped = mmap.mmap(self._handles[rank], size, flags=mmap.MAP_SHARED | FILLED)
            whole = np.frombuffer(mapped, dtype=np.uint8)
            known = self._mapped[rank] = torch.from_numpy(whole[mmap.PAGESIZE :])
        return known

    def release(self) -> None:
        """Give the memory back. No process may be reading it any more."""
        self._mapped.clear()
        if self._me in self._handles:
            os.ftruncate(self._handles[self._me], mmap.PAGESIZE)


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"


def _made(token: bytes) -> int | None:
    if not hasattr(os, "memfd_create"):
        return None
    try:
        handle = os.memfd_create("shardwise checkpoint")
        os.ftruncate(handle, mmap.PAGESIZE)
        os.pwrite(handle, token, 0)
    except OSError:
        return None  # not allowed here: messages carry what it would have
    return handle


def _opened(pid: int, number: int, token: bytes) -> int | None:
    """The memory of another process; None where it cannot be seen from here."""
    with contextlib.suppress(OSError):
        handle = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        if os.pread(handle, _TOKEN, 0) == token:
            return handle
        os.close(handle)
    return None
