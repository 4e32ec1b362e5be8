"""Writes to views and to what they are views of, also where a view had to be copied: every tensor shows what torch's
would, and autograd sees the writes."""

import random

import pytest
import torch
from torch import nn

from shardwise import RuleError, Shard, distribute_tensor, strict
from shardwise.testing.spread import random_sizes
from tests.tensor.common import R, checked_on, is_simulated, laid_out, layouts, on_one_axis, same, whole, x

VALUE = x(5, 4)


def some_view(rng, t):
    """A view op that t takes."""
    d = rng.randrange(t.dim())
    n = t.shape[d]
    a, b = sorted((rng.randint(0, n), rng.randint(0, n)))
    e, step, i = rng.randrange(t.dim()), rng.randint(1, 3), rng.randrange(n) if n else None
    views = {
        "narrow": lambda t: t.narrow(d, a, b - a),
        "transpose": lambda t: t.transpose(d, e),
        "unsqueeze": lambda t: t.unsqueeze(d),
        "step": lambda t: t[(slice(None),) * d + (slice(None, None, step),)],
        "last chunk": lambda t: t.chunk(2, d)[-1],
    }
    if i is not None and t.dim() > 1:
        views["select"] = lambda t: t.select(d, i)
        views["diagonal"] = lambda t: t.diagonal(0, 0, 1)
    if t.is_contiguous() and t.numel():
        views["view"] = lambda t: t.view(-1)
    return rng.choice(sorted(views.items()))


def some_write(rng, t):
    """An op that writes to t."""
    c, i = rng.random(), rng.randrange(t.shape[0]) if t.shape[0] else None
    writes = {
        "mul_": lambda t: t.mul_(1 + c),
        "fill_": lambda t: t.fill_(c),
        "clamp_": lambda t: t.clamp_(-0.5, 0.5),
        "add_ sum": lambda t: t.add_(t.detach().sum()),
        "flip": lambda t: t.copy_(t.flip(0) * 2),
        "mask": lambda t: t.__setitem__(t > 0.5, c),
    }
    if i is not None:
        writes["row"] = lambda t: t.__setitem__(i, c)
    return rng.choice(sorted(writes.items()))


def program(seed, steps=6):
    """(number of a tensor, name, op) of views and writes, for a tensor like VALUE."""
    rng, tensors, ops = random.Random(seed), [VALUE.clone()], []
    while len(ops) < steps:
        i = rng.randrange(len(tensors))
        is_view = rng.random() < 0.5
        name, op = (some_view if is_view else some_write)(rng, tensors[i])
        result = op(tensors[i])
        ops.append((i, is_view, name, op))
        if is_view:
            tensors.append(result)
    return ops


def run(ops, value):
    tensors = [value]
    for i, is_view, _, op in ops:
        result = op(tensors[i])
        if is_view:
            tensors.append(result)
    return tensors


def seeds(mesh):
    return range(20 if is_simulated(mesh) else 2)


def all_tensors_show_all_writes(mesh):
    for seed in seeds(mesh):
        ops = program(seed)
        for places in layouts(mesh, VALUE):
            wanted, got = run(ops, VALUE.clone()), run(ops, laid_out(VALUE, mesh, places))
            for i, (one, other) in enumerate(zip(wanted, got)):
                same(other, one, f"{[(j, name) for j, _, name, _ in ops]} tensor {i} {places}")


def autograd_sees_all_writes(mesh):
    for seed in seeds(mesh):
        ops = program(seed, 4)

        def total(leaf, ops=ops):
            return sum((t.sin() * (i + 1)).sum() for i, t in enumerate(run(ops, leaf * 1.5)))

        plain = VALUE.clone().requires_grad_()
        try:
            total(plain).backward()
        except RuntimeError:  # torch lets nobody write to some views, and a write may spoil what was saved
            continue
        for places in layouts(mesh, VALUE)[:: 1 if is_simulated(mesh) else 3]:
            leaf = laid_out(VALUE, mesh, places, requires_grad=True)
            total(leaf).backward()
            same(leaf.grad, plain.grad, f"{[(j, name) for j, _, name, _ in ops]} {places}")


def rows_in_place(mesh):
    """What people write."""
    for dtype in (torch.float32, torch.int64, torch.int16, torch.bool, torch.complex64, torch.bfloat16):
        value = torch.arange(20).view(5, 4).to(dtype)
        if dtype == torch.int64:
            value += 1 << 60
        for places in layouts(mesh, value, partial=False):
            plain, mine = value.clone(), distribute_tensor(value, mesh, places)
            for t in (plain, mine):
                t[1] = t[0]
                t[4].copy_(t[2])
                if dtype != torch.bool:
                    t[3] += 5
                    t[0, 1] += 3
            assert torch.equal(whole(mine), plain), (dtype, places)


def padding_row_is_zeroed(mesh):
    for sizes in (None, random_sizes(7, mesh.shape[0], random.Random(0))):
        table = nn.Embedding(7, 3, padding_idx=2)
        table.weight = nn.Parameter(distribute_tensor(x(7, 3), mesh, on_one_axis(mesh, Shard(0, sizes=sizes))))
        table.reset_parameters()
        assert not whole(table.weight)[2].any() and whole(table.weight)[3].all()


def refusals(mesh):
    if mesh.shape[0] == 1:
        return
    mine = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0)))
    row = mine[2]
    with strict(), pytest.raises(RuleError, match="strict.. forbids"):
        row.zero_()
    with strict():
        mine.add_(1)
    with pytest.raises(RuleError, match="used after its base was written"):
        row.sum()
    leaf = laid_out(VALUE, mesh, on_one_axis(mesh, Shard(0)), requires_grad=True)
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        leaf[2].zero_()
    windows = distribute_tensor(VALUE, mesh, [Shard(0)] + [R] * (mesh.ndim - 1)).unfold(0, 2, 1)
    with pytest.raises(RuntimeError, match="more than one element"):
        windows.zero_()


def views_whose_elements_overlap(mesh):
    """A write to the base shows in every window, and each element of the base gets the gradients of all of them."""
    views = {
        "unfold": lambda t: t.unfold(0, 3, 1),
        "unfold columns": lambda t: t.unfold(1, 2, 1),
        "a view of windows": lambda t: t.unfold(0, 2, 1).transpose(0, 1)[1:],
        "windows of a diagonal": lambda t: t.diagonal().unfold(0, 2, 1),
        "as_strided": lambda t: t.as_strided((4, 4), (2, 1)),
        "torch.as_strided": lambda t: torch.as_strided(t, (3, 2), (1, 3), 2),
        "expand": lambda t: t[1].expand(3, 4),
    }
    for places in layouts(mesh, VALUE, partial=False)[:: 1 if is_simulated(mesh) else 3]:
        for name, view in views.items():
            for recorded in (True, False):
                plain, leaf = VALUE.clone().requires_grad_(), laid_out(VALUE, mesh, places, requires_grad=True)
                for t in (plain, leaf):
                    base = t * 1
                    t.seen = view(base)
                    with torch.set_grad_enabled(recorded):
                        base.mul_(t.detach() + 2)
                        base[2:4] = base[0].detach()
                    (t.seen * t.seen * 3).sum().backward()
                same(leaf.seen, plain.seen, f"{name} {places}")
                same(leaf.grad, plain.grad, f"{name} {places}")


CHECKS = [
    views_whose_elements_overlap,
    all_tensors_show_all_writes,
    autograd_sees_all_writes,
    rows_in_place,
    padding_row_is_zeroed,
    refusals,
]
test_simulated, test_processes = checked_on(__name__, CHECKS)
