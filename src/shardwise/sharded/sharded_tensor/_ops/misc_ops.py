"""The names of torch.distributed._shard.sharded_tensor._ops.misc_ops."""

from __future__ import annotations

from typing import Any

__all__ = ["tensor_has_compatible_shallow_copy_type"]


def tensor_has_compatible_shallow_copy_type(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> bool:
    """A sharded tensor cannot take the place of another tensor's memory."""
    return False
