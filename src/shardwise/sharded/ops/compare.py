"""Comparing whole tensors: `equal` and `allclose`, the same answer on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.record import Note
from shardwise.sharded.owners import communication_device, ranks_of
from shardwise.sharded.registry import own
from shardwise.sharded.tensor import ShardedTensor


def _both(name: str, one: Any, other: Any) -> None:
    if not isinstance(one, ShardedTensor) or not isinstance(other, ShardedTensor):
        raise TypeError(f"Both arguments to torch.{name} need to be of type ShardedTensor")


def everywhere(answer: bool, group: Any) -> bool:
    flag = torch.tensor([int(answer)], device=communication_device(group))
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def _comparable(one: ShardedTensor, other: ShardedTensor) -> bool:
    return one.size() == other.size() and ranks_of(one._process_group) == ranks_of(other._process_group)


@own(torch.equal, torch.Tensor.equal)
def equal(input: Any, other: Any) -> bool:
    """Whether two tensors have the same size and values, whatever their tiles."""
    _both("equal", input, other)
    if not _comparable(input, other):
        return False
    with torch.no_grad():
        theirs = other._like(input, Note("equal", "operands in different tiles"))._parts
        answer = all(torch.equal(a, b) for a, b in zip(input._parts, theirs))
    return everywhere(answer, input._process_group)


@own(torch.allclose, torch.Tensor.allclose)
def allclose(input: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Whether two tensors of one size are close everywhere, whatever their tiles."""
    _both("allclose", input, other)
    if not _comparable(input, other):
        return False
    with torch.no_grad():
        theirs = other._like(input, Note("allclose", "operands in different tiles"))._parts
        answer = all(torch.allclose(a, b, rtol, atol, equal_nan) for a, b in zip(input._parts, theirs))
    return everywhere(answer, input._process_group)
