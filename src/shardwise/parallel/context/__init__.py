"""Context parallelism: the sequence cut over a mesh axis, and attention exact all the same.

Attention itself needs nothing from here: scaled_dot_product_attention of DTensors whose sequence is cut, in whatever
pieces, leaves the queries where they are (`shardwise.attention`). Here is the split that gives all ranks the same work
under a causal mask with ways into it and back (`buffers`), and PyTorch's context manager (`manager`).
"""

from shardwise.attention.sequence import sequence_exchange
from shardwise.parallel.context.buffers import context_parallel_shard, context_parallel_unshard, zigzag
from shardwise.parallel.context.manager import context_parallel, set_rotate_method

__all__ = [
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "sequence_exchange",
    "set_rotate_method",
    "zigzag",
]
