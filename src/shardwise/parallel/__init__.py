"""Ways to run a model on a mesh, made of layouts."""

from shardwise.parallel.context import (
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    sequence_exchange,
    set_rotate_method,
    zigzag,
)

__all__ = [
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "sequence_exchange",
    "set_rotate_method",
    "zigzag",
]
