"""Functions that torch's compiler traces, unlike all others of this package (`dynamo.py`): what is compiled for a rank
where the program's own functions are called with a rank's own indices.

Dynamo decides by the file that a function comes from, and forgets exceptions when it is reset. So these functions say
that they come from another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
Mod = Callable[..., torch.Tensor]
Index = Callable[[torch.Tensor], torch.Tensor]  # the place of an element in the whole tensor, by that in a rank's


def _traced(func: F) -> F:
    """`func`, and the functions that it defines, as if they came from no file of this package."""
    func.__code__ = _from_elsewhere(func.__code__)
    return func


def _from_elsewhere(code: CodeType) -> CodeType:
    inner = [_from_elsewhere(c) if isinstance(c, CodeType) else c for c in code.co_consts]
    return code.replace(co_filename="<traced for a rank>", co_consts=tuple(inner))


@_traced
def same(index: torch.Tensor) -> torch.Tensor:
    """The index where a rank holds all elements."""
    return index


@_traced
def shifted(start: torch.Tensor) -> Index:
    """The index where a rank holds the elements from `start[0]` on. A tensor, so that one compiled program fits all."""
    return lambda index: index + start[0]


@_traced
def looked_up(table: torch.Tensor) -> Index:
    """The index where a rank holds the elements that `table` lists."""
    return lambda index: table[index]


@_traced
def scores_of_whole(mod: Mod, batch: Index, head: Index, query: Index) -> Mod:
    """A score_mod for a rank, of one for the whole tensors."""

    def score_mod(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        return mod(score, batch(b), head(h), query(q_idx), kv_idx)

    return score_mod


@_traced
def mask_of_whole(mod: Mod, batch: Index, head: Index, query: Index) -> Mod:
    """A mask_mod for a rank, of one for the whole tensors."""

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return mod(batch(b), head(h), query(q_idx), kv_idx)

    return mask_mod


@_traced
def calling(operator: Callable[..., Sequence[torch.Tensor]], wanted: Sequence[int]) -> Callable[..., object]:
    """A function that calls an operator and returns these of its results: torch compiles functions only, and has no
    code for results of flex_attention that nobody asks for."""

    def call(*args: object) -> list[torch.Tensor]:
        made = operator(*args)
        return [made[i] for i in wanted]

    return call
