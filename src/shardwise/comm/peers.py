"""Who is lost, once a collective has failed. Every rank signs in with its host and process; one that fails says so.

A peer whose process is gone and that did not say so is the one that died; without such a one, those of the collective
that say nothing are the ones that do not answer.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from shardwise.torch_private import default_store

PATIENCE_SECONDS = 2.0  # for the others to notice as well: a process is gone a little after its connections are
_OF_PEERS = re.compile(r"connection|timed? ?out|peer|network|socket|remote process", re.IGNORECASE)


def sign_in() -> None:
    """Let the others know which process this rank is."""
    store = _store()
    if store is not None:
        store.set(_key(dist.get_rank(), "is"), f"{socket.gethostname()} {os.getpid()}")


def who_is_lost(error: Exception, ranks: Iterable[int]) -> str:
    """What to add to the text of a failed collective of these ranks: nothing if it does not look like a lost peer."""
    store = _store()
    if store is None or not (isinstance(error, dist.DistError) or _OF_PEERS.search(str(error))):
        return ""
    me, everyone = dist.get_rank(), range(dist.get_world_size())
    try:
        store.set(_key(me, "failed"), "")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            dead = [rank for rank in everyone if rank != me and _is_dead(store, rank)]
            first = [rank for rank in dead if not store.check([_key(rank, "failed")])]
            if first or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        silent = [rank for rank in ranks if rank != me and not store.check([_key(rank, "failed")])]
    except RuntimeError:
        return "; the store of the process group is lost as well: the process that holds it, often rank 0, has died"
    if first or dead:
        return f"; {_ranks(first or dead)} died"
    return f"; {_ranks(silent)} did not answer" if silent else ""


def _is_dead(store: Any, rank: int) -> bool:
    """Whether the process of a rank on this host is gone; of other hosts nothing is known."""
    if not store.check([_key(rank, "is")]):
        return False
    host, pid = store.get(_key(rank, "is")).decode().split()
    return host == socket.gethostname() and not _runs(int(pid))


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"  # a zombie waits for its parent only
    except FileNotFoundError:
        if os.path.exists("/proc/self/stat"):
            return False
    try:  # no /proc on this system
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _key(rank: int, what: str) -> str:
    return f"shardwise/peers/{rank}/{what}"


def _store() -> Any:
    """Where ranks leave word for each other; a fake group, which plays ranks that there are not, has none."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    return default_store()
