"""embedding and embedding_bag on a sharded table: row-, column-, table- and grid-wise, or any other tiles.

As in torch, the ids and the result are each rank's own plain tensors; a row that several ranks look up gets the sum of
their gradients. Each row that a rank needs is fetched once, and torch's own function runs on the rows, so that every
mode and option is torch's. Where bags are summed or averaged and it takes fewer bytes, the owners of the rows sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwise.sharded.groups import is_member
from shardwise.sharded.ops.lookup import Bags, Lookup, lengths_of
from shardwise.sharded.ops.over_mesh import over_mesh
from shardwise.sharded.ops.registry import own
from shardwise.sharded.tensor import ShardedTensor

_embedding, _embedding_bag = F.embedding, F.embedding_bag


@own(F.embedding)
def embedding(*args: object, **kwargs: object) -> Any:
    return _looked_up(_embedding, args, kwargs)


@own(F.embedding_bag)
def embedding_bag(*args: object, **kwargs: object) -> Any:
    return _looked_up(_embedding_bag, args, kwargs)


def _looked_up(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given, op = dict(bound.arguments), func.__name__
    if not _own_ids(given):
        return over_mesh(func, args, kwargs)
    if func is _embedding_bag:
        _check_bags(given)
    ids, table = given["input"], given["weight"]
    _check_padding(op, table, given["padding_idx"])
    needed, places = torch.unique(ids, return_inverse=True)
    lookup = Lookup(table, needed.long(), op, _bags(given) if func is _embedding_bag else None)
    if lookup.pools and lookup.bags is not None:
        return lookup.bags.pooled(given["mode"], given["sparse"])
    given |= _fetched(lookup, places.view(ids.shape), given)
    return func(**given | {"max_norm": None, "sparse": False})


def _bags(given: dict[str, Any]) -> Bags | None:
    """Return the bags if the owners of the rows could sum them, else None.

    A maximum needs the rows, `max_norm` needs them whole, and frequencies are counted in the whole batch.
    """
    if given["mode"] == "max" or given["max_norm"] is not None or given["scale_grad_by_freq"]:
        return None
    ids, weights, padding = given["input"], given["per_sample_weights"], given["padding_idx"]
    lengths = lengths_of(ids, given["offsets"], given["include_last_offset"])
    if weights is not None and (weights.shape != ids.shape or weights.dtype != given["weight"].dtype):
        lengths, weights = None, None
    return Bags(
        ids.reshape(-1).long(),
        lengths,
        None if weights is None else weights.reshape(-1),
        None if padding is None else padding % given["weight"].size(0),
    )


def _own_ids(given: dict[str, Any]) -> bool:
    """Whether this is a look-up of plain ids in a sharded table; raises where the arguments do not fit."""
    ids, table = given["input"], given["weight"]
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"input need to be torch.Tensor, got {type(ids).__name__}")
    if not isinstance(table, ShardedTensor) or isinstance(ids, ShardedTensor):
        return False
    if table.dim() != 2:
        raise ValueError(f"Weight needs to have exactly 2 dims, got size {list(table.size())}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"Expected tensor for argument 'indices' to be of int64 or int32, got {ids.dtype}")
    return True


def _check_bags(given: dict[str, Any]) -> None:
    ids, offsets, mode = given["input"], given["offsets"], given["mode"]
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f"mode '{mode}' is not supported; use 'sum', 'mean' or 'max'")
    if ids.dim() not in (1, 2):
        raise ValueError(f"Input more than 2 dims not supported, got size {list(ids.size())}")
    if offsets is not None and ids.dim() != 1:
        raise ValueError(f"Input dimension needs to be exactly 1 dim with offsets, got size {list(ids.size())}")
    if offsets is None and ids.dim() == 1:
        raise ValueError("offsets is required for 1D input")
    if given["per_sample_weights"] is not None and mode != "sum":
        raise NotImplementedError(
            f"embedding_bag: per_sample_weights was not None. per_sample_weights is only supported for mode='sum' (got "
            f"mode='{mode}')"
        )


def _check_padding(op: str, table: ShardedTensor, padding_idx: int | None) -> None:
    n = table.size(0)
    if not is_member(table._process_group):
        raise RuntimeError(f"{op}: rank {dist.get_rank()} is not in the table's process group")
    if padding_idx is not None and not -n <= padding_idx < n:
        raise AssertionError(f"Padding_idx must be within num_embeddings: {padding_idx} for {n} rows")


def _fetched(lookup: Lookup, places: torch.Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """Return other arguments for torch's function: the rows this rank needs as a table, ids and padding_idx into it."""
    if given["max_norm"] is not None:
        lookup.shorten_rows(float(given["max_norm"]), float(given["norm_type"]))
    rows, padding = lookup.fetch(given["sparse"]), given["padding_idx"]
    if padding is not None:
        found = (lookup.ids == padding % lookup.table.size(0)).nonzero().flatten().tolist()
        padding = found[0] if found else None
    return {"input": places, "weight": rows, "padding_idx": padding}
