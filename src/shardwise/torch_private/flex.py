"""The operator below flex_attention, what surrounds torch's own call of it, and its block masks. All of it is imported
once the program imports flex_attention, which takes a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

MODULE = "torch.nn.attention.flex_attention"
OPERATOR = "torch._higher_order_ops.flex_attention"  # the module; its operator has the name flex_attention


def operator() -> Callable[..., Any]:
    """The operator: of query, key, value, score_mod, block mask, scale, kernel options."""
    found: Callable[..., Any] = import_module(OPERATOR).flex_attention
    return found


def compiled(call: Callable[..., Any], options: Mapping[str, Any] | None) -> Callable[..., Any]:
    """A function that runs `call` as torch runs the operator: traced, by the "eager" backend unless the program gave
    `options` of torch.compile."""

    def run(*args: object) -> object:
        with import_module("torch._higher_order_ops.utils").setup_compilation_env() as backend:
            chosen = {"backend": backend} if options is None else options
            return torch.compile(call, **{**chosen, "fullgraph": True})(*args)

    return run


def block_mask(
    blocks: Sequence[torch.Tensor | None],
    block_size: Sequence[int],
    mask_mod: Callable[..., torch.Tensor],
    lengths: tuple[int, int],
    with_queries: bool,
) -> tuple[Any, ...]:
    """A block mask as the operator takes it.

    Args:
        blocks: How many blocks of keys each block of queries sees in part, and which; the same of those it sees whole.
        block_size: Of queries and keys.
        mask_mod: Which keys a query sees.
        lengths: Of queries and keys.
        with_queries: Whether the same is stored by blocks of keys, too, as gradients need it.
    """
    made = import_module(MODULE).BlockMask.from_kv_blocks(
        *blocks, tuple(block_size), mask_mod, lengths, compute_q_blocks=with_queries
    )
    found: tuple[Any, ...] = made.as_tuple()
    return found
