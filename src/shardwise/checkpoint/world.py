"""The processes that save or load together: what they tell each other, and an error of one as an error of all."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwise.comm.group_calls import group_call
from shardwise.comm.messages import Along, along_group
from shardwise.errors import CheckpointError
from shardwise.sharded.groups import Group, all_gather_objects, as_group, ranks_of
from shardwise.torch_private.distributed import named_gloo_group

T = TypeVar("T")
_OP = "checkpoint"  # what the exchanges of its processes are called in errors
_side_groups: dict[int, tuple[Group, Group]] = {}  # of a group (kept alive with it): one of gloo for CPU memory


@dataclass(frozen=True)
class World:
    """Some processes. `ranks` are their global ranks; alone, a process is rank 0."""

    rank: int
    ranks: tuple[int, ...]
    group: Group | None

    @staticmethod
    def of(group: Group | None, *, own: bool = False) -> World:
        """The processes of a group, by default all of them. With `own` they talk over a group of their own, so that a
        thread may use it beside the program."""
        if group is None and not dist.is_initialized():
            return World(0, (0,), None)
        asked = as_group(group)
        ranks = tuple(ranks_of(asked))
        if dist.get_rank() not in ranks:
            raise CheckpointError(
                f"rank {dist.get_rank()} is not in the process group of ranks {list(ranks)}; call this on its ranks"
            )
        if len(ranks) == 1:
            return World(ranks[0], ranks, None)
        used = _beside(asked, ranks) if own or dist.get_backend(asked) != "gloo" else asked
        return World(dist.get_rank(), ranks, used)

    @property
    def is_first(self) -> bool:
        return self.rank == self.ranks[0]

    @property
    def size(self) -> int:
        return len(self.ranks)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in the order of `ranks`."""
        return [value] if self.group is None else all_gather_objects(value, self.group, _OP)

    def to_first(self, value: T) -> list[T]:
        """The values of all processes, on the first one; nothing on the others."""
        if self.group is None:
            return [value]
        told: list[T] = [value] * self.size if self.is_first else []
        with group_call(self.group, _OP, "gather"):
            dist.gather_object(value, told if self.is_first else None, dst=self.ranks[0], group=self.group)
        return told

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first process makes, on all; what it raises, too."""
        if self.group is None:
            return make()
        if not self.is_first:
            made, error = self._told(None)
            if error is not None:
                raise _of_rank(self.ranks[0], error)
            return made  # type: ignore[return-value]
        try:
            made = make()
        except Exception as error:
            self._told((None, as_error(error)))
            raise
        self._told((made, None))
        return made

    def _told(self, what: tuple[T | None, Exception | None] | None) -> tuple[T | None, Exception | None]:
        said = [what]
        with group_call(self.group, _OP, "broadcast"):
            dist.broadcast_object_list(said, src=self.ranks[0], group=self.group)
        assert said[0] is not None
        return said[0]

    def agree(self, error: Exception | None) -> None:
        """Raise on all processes if one of them has an error: each its own, the others what the first of those says."""
        self.raise_first(self.gather(None if error is None else as_error(error)), error)

    def raise_first(self, errors: list[Exception | None], own: Exception | None) -> None:
        """The same with the errors of all at hand."""
        if own is not None:
            raise own
        for rank, theirs in zip(self.ranks, errors, strict=True):
            if theirs is not None:
                raise _of_rank(rank, theirs)

    def all_well(self, well: bool) -> bool:
        """Whether all processes are well: one small message."""
        return bool(self.lowest([int(well)])[0])

    def lowest(self, numbers: list[int]) -> list[int]:
        """The lowest number of all processes at each place of a list: one small message."""
        if self.group is None:
            return numbers
        told = torch.tensor(numbers)
        with group_call(self.group, _OP, "all_reduce"):
            dist.all_reduce(told, dist.ReduceOp.MIN, group=self.group)
        return told.tolist()

    def along(self) -> Along:
        assert self.group is not None
        return along_group(self.group, torch.device("cpu"))


def _of_rank(rank: int, error: Exception) -> Exception:
    """The error of another process, which says whose it is."""
    return type(error)(f"rank {rank}: {error}")


def as_error(error: Exception) -> Exception:
    """An error that can travel to other processes."""
    return error if type(error) in (CheckpointError, TypeError, ValueError) else CheckpointError(_said(error))


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _beside(group: Group, ranks: tuple[int, ...]) -> Group:
    found = _side_groups.get(id(group))
    if found is None or found[0] is not group:
        name = all_gather_objects(f"shardwise-checkpoint-{uuid.uuid4().hex}", group, _OP)[0]
        made = named_gloo_group(list(ranks), name)
        found = _side_groups[id(group)] = (group, made)
    return found[1]
