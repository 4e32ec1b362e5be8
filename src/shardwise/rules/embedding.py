"""Look-ups in a table. Where rows are cut, every rank looks up those it has and adds zeros for the others; where
columns are cut, every rank has its columns of the result."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.functions import also_writes
from shardwise.layout.split import Intervals, positions
from shardwise.strategy import Answer, Factors, Operand, Tensor, factors, reduced
from shardwise.strategy.lookup import by_holders, located, pointable
from shardwise.strategy.registry import program, rule

# `never_empty` below: of no ids torch's gradient has no derivative, and of no column CUDA's kernels read out of bounds
also_writes(F.embedding, (1, "weight"), when=(3, "max_norm"), default=None)
also_writes(F.embedding_bag, (1, "weight"), when=(3, "max_norm"), default=None)


@rule("embedding")
def embedding(first: Operand, second: Operand, *args: object, **kwargs: object) -> Factors | None:
    """``*i, v d -> *i d``; aten gives the table first. With `sparse`, the gradient is dense all the same."""
    aten = first.dtype not in (torch.int32, torch.int64) or second.ndim != 2  # a table of numbers has two dims
    ids, table = (second, first) if aten else (first, second)
    options = ("padding_idx", *(() if aten else ("max_norm", "norm_type")), "scale_grad_by_freq", "sparse")
    arguments = dict(zip(options, args)) | kwargs
    if arguments.get("max_norm") is not None:
        return None  # torch takes it apart: first embedding_renorm_, then a plain look-up
    size, pad, by_freq = table.shape[0], arguments.get("padding_idx"), arguments.get("scale_grad_by_freq", False)
    sparse = bool(arguments.get("sparse", False))
    pad = -1 if pad is None or (aten and pad == -1) else pad + size if pad < 0 else pad
    where, rows = ("*i!", "v! d") if by_freq else ("*i", "v d")

    def look_up(first: torch.Tensor, second: torch.Tensor, held: tuple[Intervals] | None = None) -> torch.Tensor:
        rows, ids = (first, second) if aten else (second, first)
        if held is None:
            return torch.embedding(rows, ids, pad, by_freq, by_freq and sparse)  # torch refuses to have both
        at, mine = located(ids, held[0], size)
        here = next((start for start, _ in positions(held[0], ((pad, pad + 1),))), -1)
        return torch.embedding(pointable(rows, 0), at, here).masked_fill(~mine.unsqueeze(-1), 0)

    text = f"{rows}, {where} -> *i d" if aten else f"{where}, {rows} -> *i d"
    local = by_holders([0], look_up, look_up, table.index)
    return factors(text, [first, second], "each", joint={table.index}, local=local, never_empty=True)


@program("embedding_renorm", writes=True)
def renorm(table: Tensor, ids: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Shorten the rows that are looked up, each to the same length however often it is."""
    ids = ids.reshape(-1)
    rows = reduced(table.index_select(0, ids))
    norms = torch.linalg.vector_norm(rows, norm_type, 1, keepdim=True)
    return table.index_copy_(0, ids, torch.where(norms > max_norm, rows * (max_norm / (norms + 1e-7)), rows))


@rule("embedding_bag")
def embedding_bag(*args: Any, **kwargs: Any) -> Answer:
    """``b i, v d -> b d``, or all ids in one line with the offsets of the bags. Rows that are cut are summed by who
    holds them, the others with weight zero. With `sparse`, the gradient is dense all the same."""
    bound = inspect.signature(F.embedding_bag).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments | {"sparse": False}
    ids, table, mode, pad = (arguments[name] for name in ("input", "weight", "mode", "padding_idx"))
    by_freq = arguments["scale_grad_by_freq"]
    operands = {name: x for name, x in arguments.items() if isinstance(x, Operand)}
    if arguments["max_norm"] is not None:
        return None  # torch takes it apart: first embedding_renorm_, then a plain look-up
    bags = "b" if ids.ndim == 2 and not by_freq else None
    rows = None if mode == "max" or by_freq else "v"
    names = {x.index: (bags, None) if x.ndim == 2 else (None,) for x in operands.values()} | {table.index: (rows, "d")}
    size = table.shape[0]
    pad = pad + size if pad is not None and pad < 0 else pad
    linear = frozenset(operands[name].index for name in ("weight", "per_sample_weights") if name in operands)

    def bags_of(values: Sequence[torch.Tensor], **changes: Any) -> torch.Tensor:
        return F.embedding_bag(**arguments | {name: values[x.index] for name, x in operands.items()} | changes)

    def bags_of_mine(*values: Any) -> torch.Tensor:
        *tensors, (held,) = values
        found = {name: tensors[x.index] for name, x in operands.items()}
        ids, rows, weights = found["input"], found["weight"], found.get("per_sample_weights")
        at, mine = located(ids, held, size, RuntimeError)
        counted = torch.ones_like(ids, dtype=rows.dtype) if pad is None else (ids != pad).to(rows.dtype)
        share = (counted if weights is None else weights * counted).masked_fill(~mine, 0)
        total = functools.partial(bags_of, tensors, mode="sum", padding_idx=None)
        out = total(input=at, weight=pointable(rows, 0), per_sample_weights=share)
        if mode == "sum":
            return out
        ones = total(input=torch.zeros_like(at), weight=rows.new_ones(1, 1), per_sample_weights=counted)
        return out / ones.clamp(min=1)

    local = by_holders([0], bags_of_mine, lambda *values: bags_of(values), table.index)
    how = "none" if mode == "max" else "each"
    inputs = [names[i] for i in sorted(names)]
    return Factors(inputs, [(bags, "d")], how, linear, local=local, never_empty=True)


# what torch makes of F.embedding_bag where no gradient is asked for, which it cannot see of ours
program("_embedding_bag_forward_only")(lambda *args, **kwargs: torch.ops.aten._embedding_bag(*args, **kwargs))
