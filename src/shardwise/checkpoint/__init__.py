"""Distributed tensors in torch.distributed.checkpoint."""

from shardwise.checkpoint.protocol import chunk_list, tensor_shard, write_items

__all__ = ["chunk_list", "tensor_shard", "write_items"]
