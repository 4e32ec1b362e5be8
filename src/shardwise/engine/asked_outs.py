"""What torch says of a call with out=: it is asked, once for a plan, with zeros of the same shapes, strides and dtypes.

Which dtypes an `out` may have, whether it is resized, how it lies in memory then, and whether torch warns of that, is
decided in each of torch's kernels by itself.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.engine.call_shape import CallShape

_FEW = 2**16  # elements: with so many torch may be asked


class Told(NamedTuple):
    """What torch made of the outs, in their order."""

    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    kind: type  # of what the call returned
    warnings: list[tuple[str, type[Warning]]]  # those that it does not give without `out`

    def warn(self) -> None:
        for message, category in self.warnings:
            warnings.warn(message, category, stacklevel=2)


def asked(call: CallShape, without: Callable[..., Any], names: Sequence[str]) -> Told | None:
    """What torch says; None where zeros do not tell, as of an inverse, or would be many. Raises what torch raises.

    Args:
        call: The call.
        without: The function to call without outs.
        names: The names of the outs.
    """
    if "generator" in call.kwargs or sum(math.prod(layout.shape) for layout in call.layouts) > _FEW:
        return None
    try:
        with warnings.catch_warnings(record=True) as before:
            warnings.simplefilter("always")
            call.on_zeros(without, names)
    except Exception:  # the call itself is wrong, or zeros are
        return None
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        result, kwargs = call.on_zeros(call.func)
    outs: list[torch.Tensor] = []
    for name in names:
        outs += kwargs[name] if isinstance(kwargs[name], (tuple, list)) else [kwargs[name]]
    known = {str(warning.message) for warning in before}
    new = {str(w.message): w.category for w in noted if str(w.message) not in known}
    return Told([tuple(t.shape) for t in outs], [t.stride() for t in outs], type(result), list(new.items()))
