"""Ways in and out of distributed tensors for code that is written for local ones, and rules for ops of your own."""

from shardwise.context import implicit_replication
from shardwise.experimental.local_map import local_map
from shardwise.experimental.register_sharding import register_sharding
from shardwise.parallel.context import context_parallel

__all__ = ["context_parallel", "implicit_replication", "local_map", "register_sharding"]
