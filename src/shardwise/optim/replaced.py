"""Optimizers that were made before a call replaced their parameters: they would train nothing."""

from __future__ import annotations

import weakref

import torch

from shardwise.errors import AutogradError
from shardwise.modules import count_replaced, replaced

# optimizers that had no replaced parameter, with how many were replaced and how many parameters they had then
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


def check_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer would step parameters that were replaced, and that have got no gradient since."""
    count = count_replaced()
    if not count:
        return
    now = count, sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) == now:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = [(param, was) for param in params if (was := replaced(param)) is not None]
    for param, was in found:
        if was.is_unused_since(param):
            raise AutogradError(
                f"step: {len(found)} of the {len(params)} parameters of this {type(optimizer).__name__}, "
                f"{was.name!r} of shape {tuple(param.shape)} among them, were replaced by {was.by}() after it was "
                f"made: it would train nothing. Make the optimizer after {was.by}(), from module.parameters()"
            )
    if not found:
        _checked[optimizer] = now
