"""Seeds and samples of torch, without what torch does besides: it looks through the whole stack each time."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy
import torch

_OF_THE_DATABASE = 1234  # torch's own tests start from it before each sample


def seed_torch(seed: int = 0) -> None:
    """As `torch.manual_seed`, which on a machine without an accelerator keeps a text of the stack for each kind of
    accelerator at every call, and so costs a hundred times the seeding."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@functools.cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


class _Listed(Protocol):
    """An entry of torch's database of operators."""

    sample_inputs_func: Callable[..., Iterable[Any]]


def database_samples(op: _Listed, device: str, dtype: torch.dtype) -> Iterator[Any]:
    """The samples of `op.sample_inputs(device, dtype)`, which looks for the name of a test in all source files of the
    stack: most of the time of a short proof."""
    samples = iter(op.sample_inputs_func(op, device, dtype, False))
    while True:
        seed_torch(_OF_THE_DATABASE)
        random.seed(_OF_THE_DATABASE)
        numpy.random.seed(_OF_THE_DATABASE)
        try:
            sample = next(samples)
        except StopIteration:
            return
        yield sample
