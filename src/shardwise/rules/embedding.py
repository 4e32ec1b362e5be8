"""Look-ups in a table. One cut by rows answers for the rows it has and adds zeros for the others; one cut by columns
answers with those."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.layout import Layout
from shardwise.layout.split import Intervals, positions
from shardwise.rules.index import located, pointable
from shardwise.strategy.program import reduced
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Algorithm, Factors, Gathered, Operand, PerCoords


@rule("embedding")
def embedding(first: Operand, second: Operand, padding_idx: Any = None, *args: Any, **kwargs: Any) -> Factors | None:
    """``i..., v d -> i... d``; aten gives the table first. With `sparse`, the gradient is dense all the same."""
    ids, table = (second, first) if first.dtype.is_floating_point else (first, second)
    max_norm = args[0] if args else kwargs.get("max_norm")
    if first is table:
        max_norm, by_freq = None, bool(args and args[0]) or kwargs.get("scale_grad_by_freq", False)
    else:
        by_freq = (len(args) > 2 and args[2]) or kwargs.get("scale_grad_by_freq", False)
    if max_norm is not None:
        return None  # torch takes it apart: first embedding_renorm_, then a plain look-up
    where: tuple[str | None, ...] = tuple(None if by_freq else f"i{d}" for d in range(ids.ndim))
    if padding_idx == -1 and first is table:
        padding_idx = None
    elif padding_idx is not None and padding_idx < 0:
        padding_idx += table.shape[0]
    rows = None if by_freq else "v"
    inputs = [(rows, "d"), where] if first is table else [where, (rows, "d")]
    size, pad = table.shape[0], -1 if padding_idx is None else padding_idx

    def local(inputs: list[Layout], outputs: list[Layout]) -> Any:
        layout = inputs[table.index]

        def look_up(a: torch.Tensor, b: torch.Tensor, held: Intervals | None = None) -> torch.Tensor:
            rows, ids = (a, b) if first is table else (b, a)
            if held is None:
                return rows_of(rows, ids, pad, by_freq)
            at, mine = located(ids, held, size)
            here = next((start for start, _ in positions(held, ((pad, pad + 1),))), -1)
            return rows_of(pointable(rows, 0), at, here, False).masked_fill(~mine.unsqueeze(-1), 0)

        return PerCoords(look_up, lambda coords: layout.held(0, coords)) if layout.is_cut(0) else look_up

    return Factors(inputs, [(*where, "d")], linear="each", joint=frozenset({table.index}), local=local)


def rows_of(table: torch.Tensor, ids: torch.Tensor, padding_idx: int, by_freq: bool) -> torch.Tensor:
    """torch.embedding, also for a rank that holds no column: there CUDA's backward kernel reads out of bounds."""
    if not table.shape[1]:
        return table[:0].sum(0).expand(*ids.shape, 0)
    return torch.embedding(table, ids, padding_idx, by_freq, False)


@rule("embedding_renorm")
def embedding_renorm(table: Operand, ids: Operand, max_norm: float, norm_type: float) -> Algorithm:
    return Algorithm(_renorm, writes=True)


def _renorm(table: Any, ids: Any, max_norm: float, norm_type: float) -> Any:
    """Shorten the rows that are looked up, each to the same length however often it is."""
    ids = ids.reshape(-1)
    rows = reduced(table.index_select(0, ids))
    norms = torch.linalg.vector_norm(rows, norm_type, 1, keepdim=True)
    return table.index_copy_(0, ids, torch.where(norms > max_norm, rows * (max_norm / (norms + 1e-7)), rows))


def _bags(**given: Any) -> torch.Tensor:
    """F.embedding_bag, also for a rank that holds no column: there CUDA's kernel reads out of bounds."""
    table = given["weight"]
    if table.shape[1]:
        return F.embedding_bag(**given)
    return F.embedding_bag(**given | {"weight": F.pad(table, (0, 1))})[:, :0]


@rule("embedding_bag")
def embedding_bag(*args: Any, **kwargs: Any) -> Any:
    """``b i, v d -> b d``, or all ids in one line with the offsets of the bags. Rows that are cut are summed by who
    holds them, the others with weight zero. With `sparse`, the gradient is dense all the same."""
    bound = inspect.signature(F.embedding_bag).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments | {"sparse": False}
    ids, table, mode, pad = (given[name] for name in ("input", "weight", "mode", "padding_idx"))
    operands = {name: x for name, x in given.items() if isinstance(x, Operand)}
    if given["max_norm"] is not None:
        return Gathered("gather, since max_norm rewrites the rows it looks up, and compute it on every rank")
    by_freq = given["scale_grad_by_freq"]
    bags = "b" if ids.ndim == 2 and not by_freq else None
    rows = None if mode == "max" or by_freq else "v"
    names = {x.index: (bags, None) if x.ndim == 2 else (None,) for x in operands.values()} | {table.index: (rows, "d")}
    pad = pad + table.shape[0] if pad is not None and pad < 0 else pad
    linear = frozenset(operands[name].index for name in ("weight", "per_sample_weights") if name in operands)

    def bag(*values: torch.Tensor) -> torch.Tensor:
        return _bags(**given | {name: values[x.index] for name, x in operands.items()})

    def bag_of_mine(*values: Any) -> torch.Tensor:
        *tensors, held = values
        local = given | {name: tensors[x.index] for name, x in operands.items()} | {"mode": "sum", "padding_idx": None}
        ids, table, weights = local["input"], local["weight"], local["per_sample_weights"]
        at, mine = located(ids, held, size, RuntimeError)
        counted = torch.ones_like(ids, dtype=table.dtype) if pad is None else (ids != pad).to(table.dtype)
        share = (counted if weights is None else weights * counted).masked_fill(~mine, 0)
        out = _bags(**local | {"input": at, "weight": pointable(table, 0), "per_sample_weights": share})
        if mode == "sum":
            return out
        ones = {"input": torch.zeros_like(at), "weight": table.new_ones(1, 1), "per_sample_weights": counted}
        return out / F.embedding_bag(**local | ones).clamp(min=1)

    def local(inputs: list[Layout], outputs: list[Layout]) -> Any:
        layout = inputs[table.index]
        return PerCoords(bag_of_mine, lambda coords: layout.held(0, coords)) if layout.is_cut(0) else bag

    size, how = table.shape[0], "none" if mode == "max" else "each"
    return Factors([names[i] for i in sorted(names)], [(bags, "d")], how, linear, local=local)
