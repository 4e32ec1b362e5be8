"""The names of torch.distributed._shard.sharded_optim.api."""

from shardwise.sharded.optim import ShardedOptimizer
from shardwise.sharded.tensor import ShardedTensor

__all__ = ["ShardedOptimizer", "ShardedTensor"]
