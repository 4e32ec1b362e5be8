"""The functions that torch has for changes of layout, and for a tensor of which every rank keeps its own part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from shardwise.api import distribute_tensor
from shardwise.errors import LayoutError, check_type
from shardwise.layout import Placement
from shardwise.mesh import DeviceMesh
from shardwise.spec import Spec
from shardwise.tensor import DTensor


def redistribute_local_tensor(
    local_tensor: torch.Tensor,
    current_spec: Spec,
    target_spec: Spec,
    *,
    async_op: bool = False,
    use_graph_based_transform: bool | None = None,
    is_explicit: bool = False,
) -> torch.Tensor:
    """Return what this rank holds under another layout; differentiable. All ranks of the mesh call it.

    Args:
        local_tensor: What this rank holds now.
        current_spec: The layout it is in, as `DTensor._spec` says it.
        target_spec: The layout it is to have; of the same mesh or another.
        async_op: Whether values may still be on their way; the first use waits for them.
        use_graph_based_transform: Not used: there is one planner.
        is_explicit: Not used: strict() allows what a program asks for.
    """
    check_type(current_spec, Spec, "redistribute_local_tensor: current_spec", "give the _spec of a DTensor")
    check_type(target_spec, Spec, "redistribute_local_tensor: target_spec", "give the _spec of a DTensor")
    meta = current_spec.tensor_meta
    if meta is None:
        raise LayoutError("redistribute_local_tensor: current_spec has no tensor_meta; give it shape, stride and dtype")
    now = DTensor.from_local(
        local_tensor, current_spec.mesh, current_spec.placements, shape=meta.shape, stride=meta.stride
    )
    return now.redistribute(target_spec.mesh, target_spec.placements, async_op=async_op).to_local()


def _shard_tensor(
    full_tensor: torch.Tensor, placements: Sequence[Placement], device_mesh: DeviceMesh | None = None
) -> DTensor:
    """Return a tensor that every rank holds laid out, each rank keeping its part of its own: nothing is sent."""
    return distribute_tensor(full_tensor, device_mesh, placements, src_data_rank=None)


class Redistribute:
    """`DTensor.redistribute` under the name of the Function that torch has for it."""

    @staticmethod
    def apply(
        input: DTensor, device_mesh: DeviceMesh, placements: Sequence[Placement], async_op: bool = False
    ) -> DTensor:
        return input.redistribute(device_mesh, placements, async_op=async_op)


@contextmanager
def use_min_cost_redistribution_plan(enabled: bool = True) -> Iterator[None]:
    """Nothing: every plan is the cheapest."""
    yield


@contextmanager
def disable_redistribute_transform_optimization(disabled: bool = True) -> Iterator[None]:
    """Nothing: there is one planner."""
    yield
