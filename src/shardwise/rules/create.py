"""New tensors made from a distributed one, on its mesh: of its own size cut as it is, of another replicated."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardwise.functions import without_size
from shardwise.layout import Layout, Replicate
from shardwise.strategy.program import Tensor, run_local
from shardwise.strategy.registry import program


def new(method: Any, sized: bool, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    mesh, one = x._layout.mesh, x._layout.mesh.comm.first(x._local)
    like = method(one.new_empty(0, device="meta"), *args, **(kwargs | {"device": "meta"}))
    alike, device = sized and like.shape == x.shape, kwargs.get("device") or one.device
    places = [p if alike and p.is_shard() else Replicate() for p in x._layout.placements]
    layout = Layout.make(mesh, places, like.shape, like.dtype, like.stride(), device)
    rest, named = without_size(args, kwargs) if alike else (args, kwargs)
    return run_local(lambda size: method(one, *[size] * alike, *rest, **named), [], layout, layout.local_shape_at)


for _name in "new_zeros new_ones new_empty new_empty_strided new_full new_tensor".split():
    _new = partial(new, getattr(torch.Tensor, _name), _name not in ("new_tensor", "new_empty_strided"))
    _new.__doc__ = "Every rank makes its part."
    program(_name)(_new)
