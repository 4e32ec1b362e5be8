"""What the arguments and results of one call of an operator tell about it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch

from shardwise.captures.program import items_in, written_places
from shardwise.protocols import Args, Item, Kwargs, Op
from shardwise.torch_private.tensors import (
    are_transforms_active,
    is_transformed,
    schema_of,
    share_memory,
    storage_id,
    without_torch_function,
)


class Traits(NamedTuple):
    """What an operator does in every call.

    Attributes:
        name: How programs show it.
        is_for_profilers: Whether it computes nothing.
        asks_for_values: Whether it hands a value of a tensor to Python.
        sizes_depend: Whether the size of its result depends on values.
        reshapes: Whether it gives its argument another shape.
        draws: Whether it may draw random numbers.
        written: Place and name of the arguments that it writes to.
    """

    name: str
    is_for_profilers: bool
    asks_for_values: bool
    sizes_depend: bool
    reshapes: bool
    draws: bool
    written: tuple[tuple[int, str], ...]


@lru_cache(maxsize=4096)
def traits_of(func: Op) -> Traits:
    """The traits of an operator: asking torch's tags takes longer than most of what a capture does per call."""
    tags = func.tags
    return Traits(
        func.overloadpacket.__name__,
        func.namespace in ("prim", "profiler"),
        torch.Tag.data_dependent_output in tags,
        torch.Tag.dynamic_output_shape in tags,
        torch.Tag.inplace_view in tags,
        torch.Tag.nondeterministic_seeded in tags,
        written_places(func),
    )


def share_memory_with(given: Iterable[object], made: Item) -> bool:
    """Whether a result of an operator is in the memory of something that it was given."""
    results = [t for t in items_in(made) if isinstance(t, torch.Tensor)]
    taken = [t for t in given if isinstance(t, torch.Tensor)]
    if not are_transforms_active() and not any(map(is_transformed, results)):
        return any(share_memory(t, source) for t in results for source in taken)
    with without_torch_function():
        memory = {storage_id(t) for t in taken}
        return any(storage_id(t) in memory for t in results)


def has_indices(func: Op, args: Args) -> bool:
    """Whether an operator takes a list of indices and none of them is a mask: the size of its result is theirs."""
    lists = [i for i, a in enumerate(schema_of(func).arguments) if str(a.type) == "List[Optional[Tensor]]"]
    indices = items_in(*(args[i] for i in lists if i < len(args)))
    return bool(lists) and not any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices)


def is_without_values(given: Iterable[object], kwargs: Kwargs) -> bool:
    """Whether a call is about tensors without values: somebody asks what a result would look like."""
    are_meta = [item.is_meta for item in given if isinstance(item, torch.Tensor)]
    return all(are_meta) if are_meta else torch.device(kwargs.get("device") or "cpu").type == "meta"
