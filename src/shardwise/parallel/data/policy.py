"""How a unit computes, and what it does with its parameters and gradients between passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shardwise.parallel.data.own_collectives import AllGather, ReduceScatter
    from shardwise.parallel.data.unit import Unit


@dataclass
class Policy:
    """What the program may choose for each unit, and change between passes.

    Attributes:
        compute_dtype: the dtype of the forward; None: that of the parameters.
        reduce_dtype: the dtype in which gradients are summed over the ranks; None: that of the forward.
        output_dtype: the dtype of floating-point outputs; None: whatever they have.
        casts_inputs: whether inputs are cast to `compute_dtype`: "never", of the "outermost" forward, or "always".
        frees: whether parameters are kept in parts, and whole only while they are used.
        frees_after_forward: not only after the backward; None: unless the unit is the root.
        frees_after_backward: else they stay whole until a parameter is written.
        reduces: whether the next backward pass reduces gradients, those that waited included.
        all_reduces: the same of a data mesh of two axes.
        after_sum: called with each sum of gradients over the ranks, as one flat tensor that it may write.
        gathers_by: what gathers parameters in the library's place.
        reduces_by: what sums gradients over the ranks that have parts in the library's place.
        divide_by: what the sum of the gradients over the ranks is divided by; None: the number of ranks.
        ahead_in_forward: the units to gather when the forward of this one begins; None: the next one.
        ahead_in_backward: the same for its backward.
    """

    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    casts_inputs: str = "outermost"
    frees: bool = False
    frees_after_forward: bool | None = None
    frees_after_backward: bool = True
    reduces: bool = True
    all_reduces: bool = True
    after_sum: Callable[[torch.Tensor], object] | None = None
    gathers_by: AllGather | None = None
    reduces_by: ReduceScatter | None = None
    divide_by: float | None = None
    ahead_in_forward: Sequence[Unit] | None = None
    ahead_in_backward: Sequence[Unit] | None = None

    @property
    def gives_sums_as_they_are(self) -> bool:
        """Whether the sum over one rank is that rank's gradient."""
        return self.divide_by is None and self.after_sum is None

    @property
    def syncs(self) -> bool:
        return self.reduces and self.all_reduces
