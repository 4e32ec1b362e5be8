"""The local tensors of a distributed tensor that hold its graph and accumulate its gradient."""

from __future__ import annotations

import torch

from shardwise.protocols import LocalValue
from shardwise.wrapper import Wrapper


def leaf_local(tensor: Wrapper) -> LocalValue:
    """The local value that accumulates the gradient; where hooks were registered, ops use another one behind them."""
    leaf = tensor.__dict__.get("_leaf")
    if leaf is None:
        return tensor._local
    first = tensor._layout.mesh.comm.first
    if not first(leaf).is_leaf and getattr(first(tensor._local).grad_fn, "hooks", None) is not tensor._hooks:
        del tensor._leaf  # an op has written into the tensor since: it is another value, without those hooks
        tensor._hooks = None
        return tensor._local
    return leaf


def leaf_values(tensor: Wrapper) -> tuple[torch.Tensor, ...]:
    """The plain tensors whose graphs stand for the tensor's: one per process, or one per distinct simulated rank."""
    return tensor._layout.mesh.comm.values(leaf_local(tensor))


def first_leaf(tensor: Wrapper) -> torch.Tensor:
    """The first of `leaf_values`, whose autograd attributes (requires_grad, is_leaf, ...) are those of all."""
    return tensor._layout.mesh.comm.first(leaf_local(tensor))


def loose_writes(tensor: Wrapper) -> int:
    """How often `.data` was handed out or replaced: such a write raises no version counter."""
    return tensor._loose_writes
