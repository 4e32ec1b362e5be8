"""The private names that torch has for context parallel."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NoReturn

import torch

from shardwise.errors import LayoutError, RuleError
from shardwise.mesh import DeviceMesh, SimulatedMesh
from shardwise.parallel.context import context_parallel_shard


class _RotateMethod(Enum):
    ALL_TO_ALL = auto()
    ALL_GATHER = auto()


class _ContextParallelOptions:
    """What programs set before they use context parallel. What has one value here takes no other."""

    _VALUES = {"enable_load_balance": True, "convert_to_f32": True}

    def __getattr__(self, name: str) -> bool:
        if name in self._VALUES:
            return self._VALUES[name]
        raise AttributeError(f"_cp_options has no {name!r}; it has {', '.join(self._VALUES)}")

    def __setattr__(self, name: str, value: object) -> None:
        if value != getattr(self, name):
            raise LayoutError(
                f"_cp_options.{name} = {value!r}: here it is always {getattr(self, name)}: sequences are cut in "
                f"zig-zag and results are added up in float32; to cut a sequence in another way, use distribute_tensor"
            )


_cp_options = _ContextParallelOptions()


def _context_parallel_shard(
    mesh: DeviceMesh | SimulatedMesh,
    buffers: Sequence[torch.Tensor],
    seq_dims: Sequence[int],
    load_balancer: object = None,
) -> list[torch.Tensor]:
    """Return this rank's zig-zag part of each tensor's sequence; differentiable.

    Args:
        mesh: The axis or axes to cut over.
        buffers: Plain tensors, the same on all ranks, or DTensors, which stay DTensors.
        seq_dims: For each tensor, the dim that is the sequence.
        load_balancer: None. The zig-zag is the only balance there is.
    """
    if load_balancer is not None:
        raise LayoutError(f"_context_parallel_shard: load_balancer = {load_balancer!r}: give None, the zig-zag")
    cut = context_parallel_shard(mesh, buffers, seq_dims)
    return [x if type(given) is type(x) else x.to_local() for given, x in zip(buffers, cut, strict=True)]


# -- names that programs import whether they use them or not ----------------------------------------------
class _Refused:
    """Part of how torch cuts attention by itself: it can be imported, and says what to use when it is called."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        _refuse(type(self).__name__)


class _ContextParallel(_Refused):
    class AttentionType(Enum):
        FLEX = "flex_attention"
        SDPA = "scaled_dot_product_attention"


class _HeadTailLoadBalancer(_Refused):
    pass


class _PTRRLoadBalancer(_Refused):
    pass


def _enable_context_parallel_dispatcher() -> NoReturn:
    _refuse("_enable_context_parallel_dispatcher")


def _refuse(name: str) -> NoReturn:
    raise RuleError(
        f"{name}: attention over a cut sequence needs no style or dispatcher here: give it DTensors that are cut along "
        f"the sequence, or run the model inside of shardwise.parallel.context_parallel(mesh, ...)"
    )
