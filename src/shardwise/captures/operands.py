"""What the arguments and results of one call of an operator tell about it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwise.captures.program import items_in
from shardwise.protocols import Args, Item, Kwargs, Op
from shardwise.torch_private.tensors import schema_of, storage_id, without_torch_function


def share_memory_with(given: Iterable[object], made: Item) -> bool:
    """Whether a result of an operator is in the memory of something that it was given."""
    with without_torch_function():
        taken = {storage_id(t) for t in given if isinstance(t, torch.Tensor)}
        return any(storage_id(t) in taken for t in items_in(made) if isinstance(t, torch.Tensor))


def has_indices(func: Op, args: Args) -> bool:
    """Whether an operator takes a list of indices and none of them is a mask: the size of its result is theirs."""
    lists = [i for i, a in enumerate(schema_of(func).arguments) if str(a.type) == "List[Optional[Tensor]]"]
    indices = items_in(*(args[i] for i in lists if i < len(args)))
    return bool(lists) and not any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices)


def is_without_values(given: Iterable[object], kwargs: Kwargs) -> bool:
    """Whether a call is about tensors without values: somebody asks what a result would look like."""
    are_meta = [item.is_meta for item in given if isinstance(item, torch.Tensor)]
    return all(are_meta) if are_meta else torch.device(kwargs.get("device") or "cpu").type == "meta"
