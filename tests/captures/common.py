"""The same program twice, eagerly and captured: everything it gives and leaves behind must be equal in every bit."""

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import shardwise
from shardwise import Replicate, Shard, distribute_tensor, simulate

MESH = simulate((2, 2), axis_names=("dp", "tp"))
ROWS = [Shard(0), Replicate()]
COLUMNS = [Replicate(), Shard(1)]


def laid_out(tensor, placements=ROWS):
    return distribute_tensor(tensor, MESH, placements)


def batches(count=4, shape=(5, 8), seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def plain(value):
    return value.full_tensor() if isinstance(value, shardwise.DTensor) else value


def module(*layers):
    """The layers in a row, replicated; the same values at every call."""
    torch.manual_seed(0)
    for layer in layers:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    return shardwise.distribute_module(nn.Sequential(*layers), MESH)


def both(make, calls=None, **options):
    """Run what `make()` gives: a function, and optionally calls of it and what is left behind. Returns the captured one."""
    runs = []
    for captured in (False, True):
        made = make()
        func, use, left = made if isinstance(made, tuple) else (made, calls, lambda: ())
        use = use or calls or [lambda f, x=x: f(laid_out(x)) for x in batches()]
        called = shardwise.capture(func, **options) if captured else func
        torch.manual_seed(3)
        found = [[_kept(v) for v in tree_leaves(call(called))] for call in use]
        runs.append((found, [_kept(v) for v in left()], torch.random.get_rng_state()))
    for eager, replayed in zip(tree_leaves(runs[0]), tree_leaves(runs[1]), strict=True):
        if isinstance(eager, torch.Tensor):
            assert eager.dtype == replayed.dtype and torch.equal(eager, replayed)
        else:
            assert eager == replayed
    return called


def _kept(value):
    value = plain(value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
