"""The names of torch.distributed._shard.sharded_tensor.shard."""

from shardwise.sharded.metadata import ShardMetadata
from shardwise.sharded.shard import Shard

__all__ = ["Shard", "ShardMetadata"]
