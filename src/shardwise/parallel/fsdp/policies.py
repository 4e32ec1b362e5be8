"""What programs tell fully_shard about dtypes, devices and axes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.errors import LayoutError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a module computes. The optimizer sees the parameters in the dtype that they had.

    Attributes:
        param_dtype: of the whole parameters, and so of the forward and the backward; None: that of the parameters.
        reduce_dtype: in which gradients are summed over the ranks, and added up while they wait; None: `param_dtype`.
        output_dtype: of floating-point outputs; None: whatever they have.
        cast_forward_inputs: whether floating-point inputs are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a mesh are for data, where `fully_shard` is given the mesh of the whole program.

    Attributes:
        shard: the name of the axis over which parameters are cut; None: they are not cut.
        replicate: the name of the axis along which there are copies of them; None: there is no such axis.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise LayoutError("DataParallelMeshDims: name at least one axis, shard=... or replicate=...")


@dataclass
class OffloadPolicy:
    """Parameters, gradients and the optimizer's state stay on the device of the mesh."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Parameters, gradients and the optimizer's state are kept on the CPU; modules compute on the device of the mesh.

    Attributes:
        pin_memory: whether the CPU's copies lie in memory that the device can read by itself.
    """

    pin_memory: bool = True
