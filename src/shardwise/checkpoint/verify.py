"""Every byte of a checkpoint against its checksums."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise.checkpoint.source import Source
from shardwise.checkpoint.world import World


def check_blocks(source: Source, world: World, progress: Callable[[int], None] | None = None) -> None:
    """Read all blocks, shared out among the processes; raises on all of them if one is damaged."""
    error: Exception | None = None
    room = torch.empty(0, dtype=torch.uint8)
    number = 0
    try:
        for name in sorted(source.entries, key=source.order):
            for i in range(len(source.blocks(name))):
                number += 1
                if number % world.size == world.ranks.index(world.rank):
                    size = source.size(name, i)
                    if room.numel() < size:
                        room = torch.empty(size, dtype=torch.uint8)
                    source.read_block(name, i, room)
                    if progress is not None:
                        progress(size)
    except Exception as raised:
        error = raised
    world.agree(error)
