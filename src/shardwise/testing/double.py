"""Comparing with one device, without the rounding that a model asks for.

A model that computes a part of itself in float32, whatever its own dtype (a Llama does so in its norms), rounds there.
Two runs that differ in the last bit of a float64 may then round differently and be 1e-8 apart, which says nothing of
either. In double, what is wrong shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_FLOAT = {torch.Tensor.float: torch.Tensor.double}


class in_double(TorchFunctionMode):
    """Inside, float64 stays what it is: what asks torch for float32 gets float64, on plain tensors and DTensors.

    >>> x = torch.ones(2, dtype=torch.float64)
    >>> with in_double():
    ...     x.to(torch.float32).dtype, x.float().dtype, x.softmax(0, dtype=torch.float32).dtype
    (torch.float64, torch.float64, torch.float64)
    """

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_doubled, (tuple(args), kwargs or {}))
        return _FLOAT.get(func, func)(*args, **kwargs)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
