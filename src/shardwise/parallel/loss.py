"""loss_parallel: cross-entropy on logits whose classes are cut, and nothing of them moved.

The rule of cross_entropy never gathers cut classes. What this adds is a promise: a call that would move logits, because
they come whole, pending or laid out otherwise, raises instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from shardwise.errors import LayoutError
from shardwise.layout import Partial, Replicate
from shardwise.rules.loss import classes_of
from shardwise.tensor import DTensor

_SIGNATURE = inspect.signature(F.cross_entropy)


class loss_parallel(TorchFunctionMode):
    """A context manager: inside, `F.cross_entropy` on DTensors never moves the logits, only a few numbers for each
    sample.

    The loss is Replicate on the axes that cut the classes, whatever its reduction. On an axis that cuts the batch it is
    what `F.cross_entropy` gives outside: for `reduction="sum"` a pending sum, for `"none"` cut as the batch is.

    Logits whose classes no mesh axis cuts, as ColwiseParallel(use_local_output=False) does, raise LayoutError.

    Example:
        with loss_parallel():
            F.cross_entropy(logits, targets).backward()
    """

    def __torch_function__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            arguments = _SIGNATURE.bind(*args, **kwargs).arguments
            logits = arguments["input"]
            if isinstance(logits, DTensor):
                return _summed(func(*args, **kwargs), _check(logits, arguments["target"]))
        return func(*args, **kwargs)


def _summed(loss: DTensor, axes: list[int]) -> DTensor:
    """The loss, each rank's own where the classes are cut added up: `loss.to_local()` is the loss itself."""
    pending = {axis for axis in axes if loss.placements[axis].is_partial()}
    places = [Replicate() if axis in pending else p for axis, p in enumerate(loss.placements)]
    return loss.redistribute(placements=places) if pending else loss


def _check(logits: DTensor, target: object) -> list[int]:
    """The mesh axes that cut the classes. Raises where logits, or class probabilities of the same size, would have to
    move."""
    places, dim = logits.placements, classes_of(logits)
    cut = [axis for axis, p in enumerate(places) if p.is_shard(dim)]
    pending = [axis for axis, p in enumerate(places) if isinstance(p, Partial)]
    if not cut or pending:
        needs = "no mesh dim that is pending" if pending else f"exactly one mesh dim to shard tensor dimension {dim}"
        raise LayoutError(
            f"loss_parallel() requires {needs}, but got placements {places} for input of shape {tuple(logits.shape)}; "
            f"redistribute it to Shard({dim}) on an axis, or give the last layer "
            f"ColwiseParallel(use_local_output=False)"
        )
    if isinstance(target, torch.Tensor) and target.dtype.is_floating_point:
        theirs = target.placements if isinstance(target, DTensor) else ()
        wrong = [axis for axis in cut if theirs and not theirs[axis].is_replicate() and theirs[axis] != places[axis]]
        if wrong:
            raise LayoutError(
                f"loss_parallel: target, of probabilities, has placements {list(theirs)}, input has {list(places)}; "
                f"redistribute target to those of input"
            )
    return cut
