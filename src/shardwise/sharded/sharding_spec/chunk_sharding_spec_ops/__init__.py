"""The names of torch.distributed._shard.sharding_spec.chunk_sharding_spec_ops: look-ups in sharded tables."""

from shardwise.sharded.sharding_spec.chunk_sharding_spec_ops import embedding, embedding_bag

__all__ = ["embedding", "embedding_bag"]
