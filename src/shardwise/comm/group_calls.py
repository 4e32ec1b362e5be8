"""Collectives of a whole process group that are no step of a move: what ranks tell each other to agree on something."""

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
    """Inside, this rank makes one collective of a group (None: the world's), for tensors of a device.

    All its ranks must have come to the same one before it begins: else its values would be mixed with another's. If
    one does not come, the error names it, the op and the collective.
    """
    along = along_group(dist.group.WORLD if group is None else group, torch.device(device))
    where = f"a group of {len(along.ranks)} ranks"
    with Guard(along, kind, where, f" on rank {dist.get_rank()}", Note(op)) as guard:
        guard.meet()
        yield
