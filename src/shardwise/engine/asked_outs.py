"""What torch says of a call with out=: it is asked, once for a plan, with zeros of the same shapes, strides and dtypes.

Which dtypes an `out` may have, whether it is resized, how it lies in memory then, and whether torch warns of that, is
decided in each of torch's kernels by itself.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from shardwise.engine.call_shape import CallShape

_FEW = 2**16  # elements: with so many torch may be asked
Noted = dict[str, type[Warning]]  # the texts of warnings and their kinds


class Told(NamedTuple):
    """What torch made of the outs, in their order."""

    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    kind: type  # of what the call returned
    warnings: Noted  # those that it does not give without `out`

    def warn(self) -> None:
        for text, kind in self.warnings.items():
            warnings.warn(text, kind, stacklevel=2)


def asked(call: CallShape, without: Callable[..., Any], names: Sequence[str]) -> Told | None:
    """What torch says; None where zeros do not tell, as of an inverse, or would be many. Raises what torch raises.

    Args:
        call: The call.
        without: The function to call without outs.
        names: The names of the outs.
    """
    if "generator" in call.kwargs or sum(math.prod(layout.shape) for layout in call.layouts) > _FEW:
        return None
    before: Noted = {}
    new: Noted = {}
    try:
        with _warnings_in(before):
            call.on_zeros(without, names)
    except Exception:  # the call itself is wrong, or zeros are
        return None
    with _warnings_in(new):
        result, kwargs = call.on_zeros(call.func)
    outs: list[torch.Tensor] = []
    for name in names:
        outs += kwargs[name] if isinstance(kwargs[name], (tuple, list)) else [kwargs[name]]
    added = {text: kind for text, kind in new.items() if text not in before}
    return Told([tuple(t.shape) for t in outs], [t.stride() for t in outs], type(result), added)


@contextmanager
def _warnings_in(noted: Noted) -> Iterator[None]:
    """Inside, warnings are noted and not shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, category, *where: noted.update({str(message): category})
        yield
