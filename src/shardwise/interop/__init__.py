"""Between this library's tensors and torch.distributed.tensor's, without a copy."""

from shardwise.interop.torch_dtensor import from_torch, to_torch

__all__ = ["from_torch", "to_torch"]
