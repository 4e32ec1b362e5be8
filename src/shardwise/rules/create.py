"""New tensors made from a distributed one: replicated, on its mesh."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.layout import Layout
from shardwise.layout.placement import REPLICATE
from shardwise.strategy.registry import program
from shardwise.wrapper import wrap


def new(name: str) -> None:
    method = getattr(torch.Tensor, name)

    @program(name)
    def make(x: Any, *args: Any, **kwargs: Any) -> Any:
        mesh = x._layout.mesh
        value = method(mesh.comm.first(x._local), *args, **kwargs)
        everywhere = [REPLICATE] * len(mesh.shape)
        layout = Layout.make(mesh, everywhere, value.shape, value.dtype, value.stride(), value.device)
        return wrap(mesh.comm.shared(value), layout)


for _name in "new_zeros new_ones new_empty new_empty_strided new_full new_tensor".split():
    new(_name)
