"""The names of torch.distributed._shard.sharded_tensor._ops.binary_cmp: comparing whole tensors."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.sharded.ops import compare
from shardwise.sharded.tensor import ShardedTensor

__all__ = ["ShardedTensor", "_communicate_result", "allclose", "binary_cmp", "equal"]

_COMPARE = {torch.equal: compare.equal, torch.allclose: compare.allclose}


def _communicate_result(result: Any, pg: Any) -> bool:
    """Whether the result is true on every rank of the group."""
    return compare.everywhere(bool(result), pg)


def binary_cmp(cmp_fun: Any, types: Any, args: Any, kwargs: Any = None, process_group: Any = None) -> bool:
    """torch.equal or torch.allclose of two sharded tensors in any tiles."""
    if len(args) != 2:
        raise ValueError(f"Expected two arguments for torch.{cmp_fun.__name__}, got {len(args)}")
    return _COMPARE[cmp_fun](*args, **(kwargs or {}))


def equal(types: Any, args: Any, kwargs: Any, process_group: Any) -> bool:
    return binary_cmp(torch.equal, types, args, kwargs, process_group)


def allclose(types: Any, args: Any, kwargs: Any, process_group: Any) -> bool:
    return binary_cmp(torch.allclose, types, args, kwargs, process_group)
