"""The local tensors of a distributed tensor that hold its graph and accumulate its gradient."""

from __future__ import annotations

import torch

from shardwise.wrapper import Wrapper


def leaf_values(tensor: Wrapper) -> tuple[torch.Tensor, ...]:
    """The plain tensors whose graphs stand for the tensor's: one per process, or one per distinct simulated rank."""
    return tensor._layout.mesh.comm.values(tensor._local)


def first_leaf(tensor: Wrapper) -> torch.Tensor:
    """The first of `leaf_values`, whose autograd attributes (requires_grad, is_leaf, ...) are those of all."""
    return tensor._layout.mesh.comm.first(tensor._local)


def loose_writes(tensor: Wrapper) -> int:
    """How often `.data` was handed out, written or replaced: such a write raises no version counter."""
    origin = tensor._origin
    return tensor._loose_writes + (0 if origin is None else origin.memory.unseen_writes + origin.memory.lent_writes)
