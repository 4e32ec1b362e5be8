"""Hooks on tensors: they see the gradient whole, as one device has it, and may replace it."""

import pytest
import torch

from shardwise import DTensor, Shard, distribute_tensor
from tests.tensor.common import R, checked_on, laid_out, layouts, on_one_axis, same, x

VALUE, WEIGHT = x(5, 4), x(5, 4, seed=3)


def leaves(mesh, value=VALUE, partial=True):
    """A plain leaf and a distributed one, for every layout."""
    for places in layouts(mesh, value, partial):
        yield value.clone().requires_grad_(), laid_out(value, mesh, places, requires_grad=True), str(places)


def hooks_observe(mesh):
    for _, leaf, where in leaves(mesh):
        seen = []
        handle = leaf.register_hook(lambda g, seen=seen: seen.append(g))
        hidden = leaf * 2
        inner = hidden.register_hook(lambda g, seen=seen: seen.append(g))
        (hidden * hidden).sum().backward()
        assert len(seen) == 2 and all(isinstance(g, DTensor) for g in seen), where
        same(seen[0], VALUE * 4, where)
        same(seen[1], VALUE * 8, where)
        same(leaf.grad, VALUE * 8, where)
        handle.remove()
        inner.remove()
        hidden = leaf * 2
        (hidden * hidden).sum().backward()
        assert len(seen) == 2, where


def hooks_replace(mesh):
    for plain, leaf, where in leaves(mesh):
        for t in (plain, leaf):
            t.register_hook(lambda g: g * 3)
            t.register_hook(lambda g: g + 1)
            hidden = t * 2
            hidden.register_hook(lambda g: g.clamp(-1, 1))
            (hidden * hidden).sum().backward()
        same(leaf.grad, plain.grad, where)
        with torch.no_grad():
            leaf.sub_(leaf.grad)
            plain.sub_(plain.grad)
        same(leaf, plain, f"in-place step after hooks, {where}")
        leaf.grad = plain.grad = None
        for t in (plain, leaf):
            (t * t).sum().backward()
        same(leaf.grad, plain.grad, f"second step, {where}")


def hooks_replace_with_another_layout(mesh):
    leaf = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
    leaf.register_hook(lambda g: distribute_tensor(WEIGHT, mesh, on_one_axis(mesh, Shard(1))))
    (leaf * 2).sum().backward()
    same(leaf.grad, WEIGHT)


def hooks_and_retained_gradients(mesh):
    """What is kept is what the hooks made of it, whichever came first; what is written later is another value."""
    for plain, leaf, where in leaves(mesh):
        for first, written in ((True, False), (False, False), (True, True)):
            plain.grad = leaf.grad = None
            for t in (plain, leaf):
                hidden = t * 2
                if first:
                    hidden.retain_grad()
                hidden.register_hook(lambda g: g * 3)
                if written:
                    hidden.mul_(2)
                if not first:
                    hidden.retain_grad()
                out = (hidden * hidden).sum()
                (t.asked,) = torch.autograd.grad(out, hidden, retain_graph=True)
                out.backward()
                t.seen = None if written else hidden.grad
            same(leaf.asked, plain.asked, f"{first} {written} {where}")
            same(leaf.seen, plain.seen, f"{first} {where}")
            same(leaf.grad, plain.grad, f"{first} {written} {where}")


def hooks_after_use(mesh):
    """Registered between forward and backward, a hook still sees the gradient."""
    for _, leaf, where in leaves(mesh):
        seen = []
        hidden = leaf * 2
        out = (hidden * hidden).sum()
        handle = hidden.register_hook(lambda g, seen=seen: seen.append(g))
        leaf.register_hook(lambda g, seen=seen: seen.append(g))
        out.backward(retain_graph=True)
        assert len(seen) == 2, where
        same(seen[0], VALUE * 4, where)
        same(seen[1], VALUE * 8, where)
        handle.remove()
        out.backward()
        assert len(seen) == 3, where


def hooks_after_a_move(mesh):
    """A use that is a move counts as a use."""
    for places in layouts(mesh, VALUE, partial=False):
        leaf = distribute_tensor(VALUE, mesh, places).requires_grad_()
        seen = []
        out = (leaf.redistribute(placements=[R] * mesh.ndim) * distribute_tensor(WEIGHT, mesh)).sum()
        leaf.register_hook(lambda g, seen=seen: seen.append(g))
        out.backward()
        assert len(seen) == 1, places
        same(seen[0], WEIGHT, str(places))


def hook_needs_requires_grad(mesh):
    with pytest.raises(RuntimeError, match="cannot register a hook on a tensor that doesn't require gradient"):
        distribute_tensor(VALUE, mesh).register_hook(print)
    leaf = distribute_tensor(VALUE, mesh).requires_grad_()
    with pytest.raises(RuntimeError, match="non-leaf"):
        (leaf * 2).register_post_accumulate_grad_hook(print)


def post_accumulate_hooks(mesh):
    """The optimizer step in the backward pass."""
    for plain, leaf, where in leaves(mesh):
        calls = []

        def step(p, calls=calls):
            calls.append(p)
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        handles = [t.register_post_accumulate_grad_hook(step) for t in (plain, leaf)]
        for _ in range(2):
            for t in (plain, leaf):
                (t * t).sum().backward()
        assert [c is leaf for c in calls] == [False, True] * 2, where
        same(leaf, plain, where)
        assert leaf.grad is None
        handles[1].remove()
        (leaf * leaf).sum().backward()
        assert len(calls) == 4 and leaf.grad is not None, where


CHECKS = [
    hooks_and_retained_gradients,
    hooks_observe, hooks_replace, hooks_replace_with_another_layout, hooks_after_use, hooks_after_a_move,
    hook_needs_requires_grad, post_accumulate_hooks,
]  # fmt: skip
test_simulated, test_processes = checked_on(__name__, CHECKS)
