"""An exchange of flat buffers among some ranks, begun and waited for later.

Where the ranks have a process group it is one all-to-all. Ranks along several axes of a mesh that is not the whole
world have none, and making one takes all ranks of the world, so they send to each other directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def world_of(ranks: Sequence[int], like: Any = None) -> Any:
    """The world's group where these are all ranks of it (and its backend is that of the group `like`), else None."""
    world = dist.group.WORLD
    same = like is None or dist.get_backend(like) == dist.get_backend(world)
    return world if same and len(ranks) == dist.get_world_size() else None


def start_swap(
    received: torch.Tensor,
    sizes: Sequence[int],
    packed: torch.Tensor,
    counts: Sequence[int],
    ranks: Sequence[int],
    group: Any,
) -> Any:
    """Begin to send `packed`, cut into `counts`, to `ranks` (in the order of `group`, if there is one), and to fill
    `received`, cut into `sizes`, from them. What this returns can be waited for."""
    if group is not None:
        return dist.all_to_all_single(received, packed, list(sizes), list(counts), group=group, async_op=True)
    me, requests = dist.get_rank(), []
    for rank, into, out in zip(ranks, received.split(list(sizes)), packed.split(list(counts)), strict=True):
        if rank == me:
            into.copy_(out)
            continue
        if out.numel():
            requests.append(dist.P2POp(dist.isend, out, rank))
        if into.numel():
            requests.append(dist.P2POp(dist.irecv, into, rank))
    return _All(dist.batch_isend_irecv(requests) if requests else [])


class _All:
    """Several works as one."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()
