"""Ways to run a model on a mesh, made of layouts."""

from shardwise.parallel.context import (
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    sequence_exchange,
    set_rotate_method,
    zigzag,
)
from shardwise.parallel.expert import (
    MixtureOfExperts,
    Routed,
    balance_loss,
    combine,
    dispatch,
    grouped_linear,
    top_k,
)

__all__ = [
    "MixtureOfExperts",
    "Routed",
    "balance_loss",
    "combine",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "dispatch",
    "grouped_linear",
    "sequence_exchange",
    "set_rotate_method",
    "top_k",
    "zigzag",
]
