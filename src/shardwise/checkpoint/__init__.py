"""Distributed tensors in torch.distributed.checkpoint."""

from shardwise.checkpoint_protocol import chunk_list, tensor_shard, write_items

__all__ = ["chunk_list", "tensor_shard", "write_items"]
