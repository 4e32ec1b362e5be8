"""An exchange of flat buffers among some ranks, begun and waited for later.

Where the ranks have a process group it is one all-to-all. Ranks along several axes of a mesh that is not the whole
world have none, and making one takes all ranks of the world, so they send to each other directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_TAG = 0x5DA7  # of our messages: a program's own, on the same group, are not mistaken for them
Ends = Sequence[tuple[int, torch.Tensor]]  # global ranks and what goes to or comes from them


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
        return start_all_to_all(received, list(sizes), packed, list(counts), group)
    me = dist.get_rank()
    into, out = (dict(zip(ranks, x.split(list(n)), strict=True)) for x, n in ((received, sizes), (packed, counts)))
    if me in into:
        into.pop(me).copy_(out.pop(me))
    return start_sends(list(out.items()), list(into.items()))


def start_all_to_all(
    received: torch.Tensor, sizes: list[int], packed: torch.Tensor, counts: list[int], group: Any
) -> Any:
    return dist.all_to_all_single(received, packed, sizes, counts, group=group, async_op=True)


def start_sends(out: Ends, into: Ends, group: Any = None) -> Any:
    """Begin to send and to receive from rank to rank; both sides name each other in the same order."""
    requests = [dist.P2POp(dist.isend, x, rank, group, _TAG) for rank, x in out if x.numel()]
    requests += [dist.P2POp(dist.irecv, x, rank, group, _TAG) for rank, x in into if x.numel()]
    return _All(dist.batch_isend_irecv(requests) if requests else [])


class _All:
    """Several works as one. They are waited for even where nobody asks for what they bring: a message that is not taken
    would be the next one's."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        works, self.works = self.works, []
        for work in works:
            work.wait()

    def __del__(self) -> None:
        self.wait()
