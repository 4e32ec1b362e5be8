"""SequenceParallel: a layer that treats all positions alike runs on a part of the sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.layout import Shard
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import DeviceMesh, SimulatedMesh
from shardwise.parallel.styles.axis import StyleAxis
from shardwise.parallel.styles.base import ParallelStyle, StyleHook, handed_over, lay_out_parameters
from shardwise.parallel.styles.placing import refuse


class SequenceParallel(ParallelStyle):
    """Run a norm, dropout or other layer that treats positions alike on a part of the sequence.

    The parameters are replicated. The input is cut along the sequence, and so is the output.

    Args:
        sequence_dim: the dim of input and output that is the sequence. A plain input counts as each rank's part of it.
        use_local_output: whether the program gets a local tensor instead of a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence = Shard(sequence_dim)
        self.sequence_sharding = (self.sequence,)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | SimulatedMesh | None) -> nn.Module:
        axis = StyleAxis.of(device_mesh, self.axis)
        lay_out_parameters(module, dict.fromkeys(module._parameters, REPLICATE), axis, self.src_data_rank)
        module.register_forward_pre_hook(StyleHook(self._before, axis))
        module.register_forward_hook(StyleHook(self._after, axis))
        return module

    def _before(self, module: nn.Module, args: tuple[Any, ...], axis: StyleAxis) -> tuple[Any, ...]:
        x = args[0]
        if not isinstance(x, torch.Tensor):
            refuse(x, f"SequenceParallel: the first input of {type(module).__name__}")
        return axis.move(axis.distributed(x, self.sequence), self.sequence), *args[1:]

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor, axis: StyleAxis) -> torch.Tensor:
        laid = axis.distributed(output, self.sequence)
        laid = axis.move(laid, laid.placements[axis.number], like=args[0])
        return handed_over(laid, self.use_local_output, axis)

    def __repr__(self) -> str:
        return f"SequenceParallel(sequence_dim={self.sequence.dim}, use_local_output={self.use_local_output})"
