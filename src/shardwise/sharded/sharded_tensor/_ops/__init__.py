"""The names of torch.distributed._shard.sharded_tensor._ops: our functions as registered ops are called."""

from shardwise.sharded.sharded_tensor._ops import binary_cmp, init, misc_ops, tensor_ops
from shardwise.sharded.sharded_tensor._ops.binary_cmp import allclose, equal
from shardwise.sharded.sharded_tensor._ops.init import constant_, kaiming_uniform_, normal_, uniform_
from shardwise.sharded.sharding_spec.chunk_sharding_spec_ops.embedding import sharded_embedding
from shardwise.sharded.sharding_spec.chunk_sharding_spec_ops.embedding_bag import sharded_embedding_bag

__all__ = [
    "allclose",
    "binary_cmp",
    "constant_",
    "equal",
    "init",
    "kaiming_uniform_",
    "misc_ops",
    "normal_",
    "sharded_embedding",
    "sharded_embedding_bag",
    "tensor_ops",
    "uniform_",
]
