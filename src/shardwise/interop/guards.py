"""Wrappers of torch's that shard or replicate parameters themselves refuse ours, and say what to use.

They would put our tensors into torch's own, as if they were local ones.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.errors import RuleError
from shardwise.imports import when_imported
from shardwise.tensor import DTensor
from shardwise.torch_private.tensors import FSDP_CLASSES

Start = Callable[..., None]


def guard() -> None:
    """Have DistributedDataParallel, fully_shard and FullyShardedDataParallel refuse parameters that are ours."""
    DistributedDataParallel.__init__ = _refusing(  # type: ignore[method-assign]
        DistributedDataParallel.__init__, nn.Module.parameters, "DistributedDataParallel", "none"
    )
    for path, (name, wrapper) in FSDP_CLASSES.items():
        when_imported(path, functools.partial(_guard_class, name, wrapper))


def _guard_class(name: str, wrapper: str, module: ModuleType) -> None:
    found = getattr(module, name, None)  # another version of torch may have none: then there is no guard
    if found is not None:
        found.__init__ = _refusing(found.__init__, lambda given: given, wrapper, "parameters")


def _refusing(start: Start, parameters: Callable[..., object], wrapper: str, shard: str) -> Start:
    """The `__init__` of a class, that first looks at the parameters it is to hold."""

    first = list(inspect.signature(start).parameters)[1]

    @functools.wraps(start)
    def checked(self: object, *args: object, **kwargs: object) -> None:
        found = parameters(args[0] if args else kwargs.get(first, ()))
        for param in found if isinstance(found, Iterable) and not isinstance(found, DTensor) else (found,):
            if isinstance(param, DTensor):
                raise RuleError(
                    f"{wrapper}: a parameter of shape {tuple(param.shape)} is a shardwise.DTensor laid out "
                    f"{list(param.placements)}, which torch's {wrapper} would take for a local tensor; use "
                    f"shardwise.parallel.data_parallel(module, mesh, shard={shard!r}), or wrap the module before its "
                    f"parameters are distributed"
                )
        start(self, *args, **kwargs)

    return checked
