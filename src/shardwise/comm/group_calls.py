"""Collectives of a whole process group that are no step of a move, in which ranks agree on something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from shardwise.comm.calls import Group
from shardwise.comm.guard import Guard
from shardwise.comm.messages import along_group
from shardwise.comm.record import Note


@contextmanager
def group_call(group: Group | None, op: str, kind: str, device: str = "cpu") -> Iterator[None]:
    """The context of one collective of a group (None: the world), for tensors of a device.

    It begins once all ranks of the group have reached the same collective; otherwise values of two collectives could be
    mixed. If a rank does not come, the error names it, the op and the collective.
    """
    along = along_group(dist.group.WORLD if group is None else group, torch.device(device))
    where = f"a group of {len(along.ranks)} ranks"
    with Guard(along, kind, where, f" on rank {dist.get_rank()}", Note(op)) as guard:
        guard.meet()
        yield
