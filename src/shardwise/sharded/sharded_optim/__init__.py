"""The names of torch.distributed._shard.sharded_optim."""

from shardwise.sharded.optim import ShardedOptimizer, named_params_with_sharded_tensor
from shardwise.sharded.sharded_optim import api
from shardwise.sharded.tensor import ShardedTensor

__all__ = ["api", "ShardedOptimizer", "ShardedTensor", "named_params_with_sharded_tensor"]
