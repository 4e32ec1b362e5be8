"""New tensors made from a distributed one: replicated, on its mesh."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.layout import Layout
from shardwise.layout.placement import REPLICATE
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Algorithm, Operand
from shardwise.wrapper import wrap


def new(name: str) -> None:
    method = getattr(torch.Tensor, name)

    @rule(name)
    def make(x: Operand, *args: Any, **kwargs: Any) -> Algorithm:
        def run(x: Any, *args: Any, **kwargs: Any) -> Any:
            mesh = x._layout.mesh
            value = method(mesh.comm.first(x._local), *args, **kwargs)
            layout = Layout.make(
                mesh, [REPLICATE] * len(mesh.shape), tuple(value.shape), value.dtype, value.stride(), value.device
            )
            return wrap(mesh.comm.shared(value), layout)

        return Algorithm(run)


for _name in ["new_zeros", "new_ones", "new_empty", "new_empty_strided", "new_full", "new_tensor"]:
    new(_name)
