"""Hooks on tensors: they see the gradient whole, as one device has it, and may replace it."""

import gc
import weakref

import pytest
import torch

import shardwise
from shardwise import DTensor, Shard, distribute_tensor
from tests.tensor.common import VALUE, WEIGHT, R, checked_on, layouts, leaves, on_one_axis, same


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


def hooks_that_replace_after_use(mesh):
    """They see what comes through uses from before them too, and through those of a loss that left the mesh."""
    for plain, leaf, where in leaves(mesh):
        for t in (plain, leaf):
            hidden = t * 2
            out = hidden * hidden + hidden.sum() + t
            hidden.register_hook(lambda g: g.clamp(-3, 3))
            hidden.register_hook(lambda g: g + 1)
            t.register_hook(lambda g: g * 3)
            loss = (out * hidden).sum()
            (t.asked,) = torch.autograd.grad(loss, hidden, retain_graph=True)
            (t.first,) = torch.autograd.grad(loss, t, create_graph=True)
            (t.second,) = torch.autograd.grad((t.first * t.first).sum(), t, retain_graph=True)
            loss = loss.full_tensor() if t is leaf else loss
            loss.backward()
        same(leaf.asked, plain.asked, where)
        same(leaf.first, plain.first, where)
        same(leaf.second, plain.second, where)
        same(leaf.grad, plain.grad, where)


def hooks_that_replace_where_ranks_have_nothing(mesh):
    """A rank whose part of the gradient is no tensor at all gets its part of what the hook returns."""
    for plain, leaf, where in leaves(mesh, partial=False):
        for t in (plain, leaf):
            hidden = t * 2
            out = hidden[:1].sum()
            hidden.register_hook(lambda g: g + 1)
            out.backward()
        same(leaf.grad, plain.grad, where)


def a_hook_on_a_written_view(mesh):
    """torch itself crashes here unless somebody has asked the view for its grad_fn."""
    leaf = distribute_tensor(VALUE, mesh).requires_grad_()
    hidden = leaf * 1
    hidden.unsqueeze_(0)
    hidden.detach().mul_(2)
    hidden.register_hook(lambda g: g * 3)
    hidden.sum().backward()
    same(leaf.grad, torch.full_like(VALUE, 3))


def hooks_go_with_their_graph(mesh):
    """Nothing keeps a graph alive that only its own hooks know."""
    kept = weakref.WeakSet()

    class Big:
        pass

    for _ in range(3):
        leaf = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
        big = Big()
        kept.add(big)
        (leaf * 2).register_hook(lambda g, big=big: None)
        leaf.register_hook(lambda g, big=big: None)
    del leaf, big
    gc.collect()
    assert not kept


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
    hooks_that_replace_after_use, hooks_that_replace_where_ranks_have_nothing, a_hook_on_a_written_view,
    hooks_go_with_their_graph,
    hook_needs_requires_grad, post_accumulate_hooks,
]  # fmt: skip
test_simulated, test_processes = checked_on(__name__, CHECKS)


def test_hooks_on_nodes_are_refused():
    """A node belongs to one rank; hooks on several tensors still work."""
    x = shardwise.distribute_tensor(torch.arange(6.0), shardwise.simulate(2), [shardwise.Shard(0)]).requires_grad_()
    y = x * 2
    assert y.grad_fn.name() == "MulBackward0" and isinstance(y.grad_fn, torch.autograd.graph.Node)
    for register in (y.grad_fn.register_hook, y.grad_fn.register_prehook):
        with pytest.raises(shardwise.AutogradError, match="register_hook on the tensor itself"):
            register(lambda *grads: None)
    with pytest.raises(shardwise.AutogradError, match="Give the tensor itself"):
        torch.autograd.graph.get_gradient_edge(y)
    seen = []
    torch.autograd.graph.register_multi_grad_hook([x, y], lambda grads: seen.append([g.sum().item() for g in grads]))
    y.sum().backward()
    assert seen == [[12.0, 6.0]]
