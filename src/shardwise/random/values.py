"""Random ops whose distribution comes from the values of a distributed tensor: another one for each element or row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from shardwise.comm.capturing import tape_here, tapes
from shardwise.layout import Layout
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import Mesh
from shardwise.protocols import LocalValue
from shardwise.random import distributions as draws
from shardwise.random.draw import common_key, drawn, note_torch_draw
from shardwise.random.generator import TORCH, stream
from shardwise.strategy.memory import copied_stride, stored_as
from shardwise.strategy.program import reduced, run_local, whole
from shardwise.torch_private.tensors import assert_later
from shardwise.wrapper import Wrapper, wrap

Drawer = torch.Generator | None
Operand = Any  # a distributed tensor or a number


def drawn_whole(func: Callable[..., Any], *args: object, **kwargs: Any) -> Any:
    """What a random function of torch draws, computed on every rank alike from gathered operands. It draws from torch's
    own stream if that is in use, else from a new generator that starts from this op's key."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Wrapper)]
    mesh, generator = tensors[0]._layout.mesh, kwargs.get("generator")
    key = None
    if stream() == TORCH:
        note_torch_draw(mesh, generator)
    else:
        key = common_key(mesh, generator)

    def call(*operands: object, **named: object) -> Any:
        if key is not None:
            device = next(t.device for t in operands if isinstance(t, torch.Tensor))
            named["generator"] = torch.Generator(device).manual_seed(key >> 1)
        return func(*operands, **named)

    operands = [_whole_local(a) for a in args]
    result = mesh.comm.bind(call)(*operands, **{k: _whole_local(v) for k, v in kwargs.items()})
    return tree_map_only(torch.Tensor, lambda local: _replicated(local, mesh), result)


def _whole_local(x: object) -> Any:
    """The whole value, in the memory order it has on one device: torch draws in that order."""
    if not isinstance(x, Wrapper):
        return x
    stride = copied_stride(x._layout.shape, x._layout.stride)
    return x._layout.mesh.comm.bind(lambda v: stored_as(v, stride))(whole(x)._local)


def _replicated(local: LocalValue, mesh: Mesh) -> Wrapper:
    first = mesh.comm.first(local)
    places = [REPLICATE] * len(mesh.shape)
    return wrap(local, Layout.make(mesh, places, tuple(first.shape), first.dtype, first.stride(), first.device))


def _check(condition: Operand, message: str) -> None:
    """Raise where a condition is not true everywhere. A rank outside of the mesh leaves it to the ranks of the mesh,
    and without values it is taken to be true. In a program that is written down the check is an op."""
    comm = condition._layout.mesh.comm
    if comm.outlined:
        condition.all().full_tensor()  # ranks with values exchange it
    if comm.outside or comm.outlined:
        return
    if tapes and tape_here() is not None:
        for value in comm.values(reduced(condition.all())._local):
            assert_later(value, message)
    elif not bool(condition.all()):
        raise RuntimeError(message)


def bernoulli_of(p: Any, generator: Drawer = None, like: Wrapper | None = None) -> Any:
    """1 with the probability that each element of p (as large as `like`, if given) says."""
    p = p.detach()
    _check((p >= 0) & (p <= 1), "Expected p_in >= 0 && p_in <= 1 to be true, but got false.")
    layout = (p if like is None else like)._layout
    real = torch.float64 if p.dtype == torch.float64 else torch.float32
    noise = drawn(layout.replace(dtype=real), draws.uniform(), generator)
    return (noise < p).to(layout.dtype)


def normal_of(mean: Operand, std: Operand, generator: Drawer = None) -> Any:
    """Normal numbers whose means, standard deviations or both are tensors."""
    mean, std = (reduced(x.detach()) if isinstance(x, Wrapper) else x for x in (mean, std))
    if isinstance(std, Wrapper):
        _check(std >= 0, "normal expects all elements of std >= 0.0")
    elif not std >= 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    tensors = [x for x in (mean, std) if isinstance(x, Wrapper)]
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    model: Any = next((x for x in tensors if x.shape == shape), None)
    if model is None:
        model = tensors[0] + tensors[1]
    noise = drawn(model._layout.replace(dtype=tensors[0].dtype), draws.normal(), generator)
    return noise * std + mean


def multinomial_of(p: Any, num_samples: int, replacement: bool = False, *, generator: Drawer = None) -> Any:
    """Indices drawn with the weights in the rows of p. Ranks may hold different rows; a cut row is gathered."""
    p = whole(p.detach(), [p.dim() - 1])
    categories = p.shape[-1]
    if not replacement and num_samples > categories:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    _check((p >= 0) & p.isfinite(), "probability tensor contains either `inf`, `nan` or element < 0")
    _check(p.sum(-1) > 0, "invalid multinomial distribution (sum of probabilities <= 0)")
    if not replacement:
        enough = (p > 0).sum(-1) >= num_samples
        _check(enough, "invalid multinomial distribution (not enough categories of positive weight)")
    shape = (*p.shape[:-1], num_samples)
    out = p._layout.replace(shape=shape, dtype=torch.int64)
    if replacement:
        noise = drawn(p._layout.replace(shape=shape, dtype=torch.float64), draws.uniform(), generator)
        return run_local(_look_up, [p, noise], out)
    noise = drawn(p._layout.replace(dtype=torch.float64), draws.exponential(), generator)
    return run_local(lambda p, noise: (p.double() / noise).topk(num_samples, -1).indices, [p, noise], out)


def _look_up(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The categories at which the sums of weights pass u."""
    total = p.double().cumsum(-1)
    found = torch.searchsorted(total, u * total[..., -1:], right=True)
    last = (p > 0).long().mul(torch.arange(p.shape[-1], device=p.device)).amax(-1, keepdim=True)
    return found.minimum(last)  # where u times the total rounds up to it


def permuted(layout: Layout, *, generator: Drawer = None) -> Any:
    """The numbers 0 to n - 1 in a random order."""
    everywhere = layout.replicated()
    comm, n = layout.mesh.comm, layout.shape[0]
    if stream() == TORCH:
        note_torch_draw(layout.mesh, generator)
        order = comm.shared(torch.randperm(n, generator=generator, dtype=layout.dtype, device=layout.device))
    else:
        keys = drawn(everywhere.replace(dtype=torch.int64), draws.integer(torch.int64, -(1 << 63), None), generator)
        order = comm.bind(lambda keys: keys.argsort(stable=True).to(layout.dtype))(keys._local)
    return wrap(order, everywhere).redistribute(placements=layout.placements)


def rrelu_of(x: Wrapper, lower: float, upper: float) -> Any:
    """Leaky relu with a random slope for every element."""
    x = reduced(x)
    slopes = drawn(x._layout, draws.uniform(lower, upper))
    return torch.where(x > 0, x, x * slopes)
