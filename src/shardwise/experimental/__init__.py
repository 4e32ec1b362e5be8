"""Ways in and out of distributed tensors for code that is written for local ones."""

from shardwise.context import implicit_replication
from shardwise.experimental.local_map import local_map

__all__ = ["implicit_replication", "local_map"]
