"""embedding and embedding_bag on a sharded table: row-, column-, table- and grid-wise, or any other tiles.

As torch has it, the ids are this rank's own and so is the result, a plain tensor: a row that several ranks look up gets
the sum of their gradients. The rows are fetched, each once, and torch's own function runs on them, so every mode and
option is torch's.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwise.sharded.ops.lookup import Lookup
from shardwise.sharded.ops.over_mesh import over_mesh
from shardwise.sharded.owners import is_member
from shardwise.sharded.registry import own
from shardwise.sharded.tensor import ShardedTensor

_embedding, _embedding_bag = F.embedding, F.embedding_bag


def _given(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


@own(F.embedding)
def embedding(*args: Any, **kwargs: Any) -> Any:
    given = _given(_embedding, args, kwargs)
    if not _own_ids(given):
        return over_mesh(F.embedding, args, kwargs)
    ids, table = given["input"], given["weight"]
    given["input"], given["weight"], given["padding_idx"] = _fetched(
        "embedding", ids, table, given["padding_idx"], given["max_norm"], given["norm_type"], given["sparse"]
    )
    return _embedding(**given | {"max_norm": None, "sparse": False})


@own(F.embedding_bag)
def embedding_bag(*args: Any, **kwargs: Any) -> Any:
    given = _given(_embedding_bag, args, kwargs)
    if not _own_ids(given):
        return over_mesh(F.embedding_bag, args, kwargs)
    _check_bags(given)
    given["input"], given["weight"], given["padding_idx"] = _fetched(
        "embedding_bag",
        given["input"],
        given["weight"],
        given["padding_idx"],
        given["max_norm"],
        given["norm_type"],
        given["sparse"],
    )
    return _embedding_bag(**given | {"max_norm": None, "sparse": False})


def _own_ids(given: dict[str, Any]) -> bool:
    """Whether this is a look-up of plain ids in a sharded table."""
    ids, table = given["input"], given["weight"]
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"input need to be torch.Tensor, got {type(ids).__name__}")
    if not isinstance(table, ShardedTensor) or isinstance(ids, ShardedTensor):
        return False
    if table.dim() != 2:
        raise ValueError(f"Weight needs to have exactly 2 dims, got size {list(table.size())}")
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


def _fetched(
    op: str,
    ids: torch.Tensor,
    table: ShardedTensor,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    sparse: bool,
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """The rows this rank needs as a small table, the ids as places in it, and where padding is there."""
    n = table.size(0)
    if not is_member(table._process_group):
        raise RuntimeError(f"{op}: rank {dist.get_rank()} is not in the table's process group")
    if padding_idx is not None and not -n <= padding_idx < n:
        raise AssertionError(f"Padding_idx must be within num_embeddings: {padding_idx} for {n} rows")
    needed, places = torch.unique(ids, return_inverse=True)
    lookup = Lookup(table, needed.long(), op)
    if max_norm is not None:
        lookup.shorten_rows(float(max_norm), float(norm_type))
    rows = lookup.fetch(sparse)
    padding = None if padding_idx is None else (needed == padding_idx % n).nonzero().flatten().tolist()
    return places.view(ids.shape), rows, padding[0] if padding else None
