"""One rank of a fault, and what can happen to it."""

from __future__ import annotations

import datetime
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from os import _exit as exit_at_once
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from shardwise import DTensor, init_device_mesh

TIMEOUT_SECONDS = 12.0  # of the groups, where nobody says anything else


class WrongValueError(AssertionError):
    """A rank got another value than plain torch."""


class Injected(ValueError):
    """The error that a faulty rank raises."""


@dataclass
class Scene:
    """One rank of one fault."""

    rank: int
    size: int
    faulty_rank: int
    folder: Path
    seed: int
    port: int  # of the store
    timeout: float = TIMEOUT_SECONDS  # of the groups, in seconds
    _worlds: Iterator[int] = field(default_factory=count)

    @property
    def faulty(self) -> bool:
        return self.rank == self.faulty_rank

    def join(self) -> None:
        """Make a world of the ranks; a new one each time."""
        timeout = datetime.timedelta(seconds=self.timeout)
        everyones = dist.TCPStore("127.0.0.1", self.port, timeout=timeout)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"{self.folder.name}/{next(self._worlds)}", everyones),
            rank=self.rank,
            world_size=self.size,
            timeout=timeout,
        )
        dist.barrier()  # no fault before all are there

    def mesh(self) -> dist.device_mesh.DeviceMesh:
        return init_device_mesh("cpu", (self.size,), mesh_dim_names=("dp",))

    def tensor(self, rows: int = 8, columns: int = 4, number: int = 0) -> torch.Tensor:
        """A tensor that all ranks know."""
        generator = torch.Generator().manual_seed(self.seed * 100 + number)
        return torch.randn(rows, columns, generator=generator)

    def check(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise if a value is not plain torch's."""
        value = found.full_tensor() if isinstance(found, DTensor) else found
        if value.shape != expected.shape or not torch.allclose(value, expected.to(value.dtype), atol=1e-5):
            raise WrongValueError(f"rank {self.rank} has {value.tolist()} instead of {expected.tolist()}")


# -- what happens to a rank --------------------------------------------------------------------------------
def raises() -> NoReturn:
    raise Injected("injected")


def exits() -> NoReturn:
    exit_at_once(3)


def quits() -> NoReturn:
    sys.exit(3)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def has_no_memory() -> NoReturn:
    raise torch.OutOfMemoryError("injected: tried to allocate 1.00 TiB")


Happens = Callable[[], None]
HAPPENS: dict[str, Happens] = {
    "raises": raises, "exits": exits, "quits": quits, "is killed": is_killed, "is stopped": is_stopped,
    "has no memory": has_no_memory,
}  # fmt: skip
