"""Gradients that a program sees or replaces, of tensors that are pending averages, extremes and products."""

import pytest
import torch
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, Partial, Shard, distribute_tensor
from tests.tensor.common import Double, R, TripledInPlace, checked_on, on_one_axis, same, x

WEIGHT = x(3, seed=5)
REDUCED = {
    "avg": lambda rows: rows.mean(0),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
    "product": lambda rows: rows.prod(0),
}


class Swapped(Function):
    """A gradient that has nothing to do with the one that came."""

    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.ones_like(grad) * torch.arange(1.0, 4, dtype=grad.dtype)


class Squared(Function):
    """Saves its argument and its result."""

    @staticmethod
    def forward(ctx, t):
        out = t * t
        ctx.save_for_backward(t, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        t, out = ctx.saved_tensors
        return grad * 2 * t + 0 * out


def pairs(mesh):
    """For every reduction, a plain leaf of one row a rank and a distributed one, and a function that reduces the rows:
    of the distributed one, it leaves the reduction pending."""
    rows = x(mesh.shape[0], 3, seed=2) + 2.5
    for op, of_rows in REDUCED.items():
        for ties in (False, True):
            value = rows.clone()
            if ties:
                value[-1] = value[0]
            leaf = distribute_tensor(value, mesh, on_one_axis(mesh, Shard(0))).requires_grad_()

            def pending(leaf, op=op):
                return DTensor.from_local(leaf.to_local().reshape(3) * 1, mesh, on_one_axis(mesh, Partial(op)))

            yield op, value.clone().requires_grad_(), of_rows, leaf, pending


def functions(mesh):
    for op, plain, of_rows, leaf, pending in pairs(mesh):
        for function in (Double, Swapped, Squared):
            plain.grad = leaf.grad = None
            for t, reduce in ((plain, of_rows), (leaf, pending)):
                out = function.apply(reduce(t))
                (out * out * WEIGHT).sum().backward()
                t.seen = out
            same(leaf.seen, plain.seen, f"{op} {function.__name__}")
            same(leaf.grad, plain.grad, f"{op} {function.__name__}")


def second_derivatives_of_functions(mesh):
    for op, plain, of_rows, leaf, pending in pairs(mesh):
        for t, reduce in ((plain, of_rows), (leaf, pending)):
            (grad,) = torch.autograd.grad((Squared.apply(reduce(t)) * WEIGHT).sum(), t, create_graph=True)
            (grad * grad).sum().backward()
        same(leaf.grad, plain.grad, op)


def functions_that_write(mesh):
    for op, plain, of_rows, leaf, pending in pairs(mesh):
        for t, reduce in ((plain, of_rows), (leaf, pending)):
            hidden = reduce(t) * 1
            flat = hidden.view(-1)
            out = TripledInPlace.apply(hidden)
            assert out is hidden
            (hidden * flat * WEIGHT).sum().backward()
        same(leaf.grad, plain.grad, op)
        told = "cannot be told" if op == "product" else "leaf Variable that requires grad"
        with pytest.raises(RuntimeError, match=told):
            TripledInPlace.apply(pending(leaf).detach().requires_grad_())


def functions_with_pending_results(mesh):
    """What a Function makes is pending inside; outside its gradient is that of the result."""

    class Pending(Function):
        @staticmethod
        def forward(ctx, t, op):
            if isinstance(t, DTensor):
                out = DTensor.from_local(t.to_local().reshape(3) * 2, mesh, on_one_axis(mesh, Partial(op)))
            else:
                out = REDUCED[op](t * 2)
            constant = out > 1
            ctx.mark_non_differentiable(constant)
            ctx.save_for_backward(t, out)
            return out, constant

        @staticmethod
        def backward(ctx, grad, _):
            t, out = ctx.saved_tensors
            return t * grad * out, None

    for op, plain, _, leaf, _ in pairs(mesh):
        for t in (plain, leaf):
            out, constant = Pending.apply(t, op)
            assert not constant.requires_grad and out.requires_grad
            (grad,) = torch.autograd.grad((out * out * WEIGHT).sum(), t, create_graph=True)
            (grad * grad).sum().backward()
            t.seen = grad
        same(leaf.seen, plain.seen, op)
        same(leaf.grad, plain.grad, op)


def hooks_replace(mesh):
    rows = x(mesh.shape[0], 3)
    for op, plain, of_rows, leaf, pending in pairs(mesh):
        other = distribute_tensor(rows, mesh, on_one_axis(mesh, Shard(0)))
        hooks = {
            "constant": lambda g, t: torch.ones_like(g) * torch.arange(1.0, 4, dtype=g.dtype),
            "scaled": lambda g, t: g * 3,
            "clamped": lambda g, t: g.clamp(-1, 1),
            "with a pending sum": lambda g, t, leaf=leaf, other=other: g + (other if t is leaf else rows).sum(0),
        }
        for name, hook in hooks.items():
            plain.grad = leaf.grad = None
            for t, reduce in ((plain, of_rows), (leaf, pending)):
                hidden = reduce(t)
                if op == "product" and t is leaf:
                    with pytest.raises(RuntimeError, match="cannot be told from those of its factors"):
                        hidden.register_hook(lambda g: None)
                    hidden = hidden.redistribute(placements=on_one_axis(mesh, R))
                hidden.register_hook(lambda g, hook=hook, t=t: hook(g, t))
                (hidden * hidden * WEIGHT).sum().backward()
            same(leaf.grad, plain.grad, f"{op} {name}")


def hooks_on_leaves(mesh):
    """The parts of an average get equal shares, whatever the hook returns."""
    value = x(3)
    leaf = distribute_tensor(value, mesh, on_one_axis(mesh, Partial("avg"))).requires_grad_()
    leaf.register_hook(lambda g: torch.ones_like(g))
    (leaf * WEIGHT).sum().backward()
    same(leaf.grad, torch.ones(3, dtype=torch.float64))
    n = mesh.shape[0]
    for value in leaf._layout.mesh.comm.values(leaf._local):
        torch.testing.assert_close(value.grad, torch.full((3,), 1 / n, dtype=torch.float64))


def a_write_between_hook_and_backward(mesh):
    leaf = distribute_tensor(x(mesh.shape[0], 3), mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
    hidden = DTensor.from_local(leaf.to_local().reshape(3) * 1, mesh, on_one_axis(mesh, Partial("max")))
    hidden.register_hook(lambda g: g * 2)
    out = hidden.sum()
    hidden.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def retained(mesh):
    for op, plain, of_rows, leaf, pending in pairs(mesh):
        for t, reduce in ((plain, of_rows), (leaf, pending)):
            hidden = reduce(t)
            if op == "product" and t is leaf:
                for watch in (DTensor.retain_grad, lambda h: torch.autograd.grad(h.sum(), h)):
                    with pytest.raises(RuntimeError, match="cannot be told from those of its factors"):
                        watch(hidden)
                hidden = hidden.redistribute(placements=on_one_axis(mesh, R))
            hidden.retain_grad()
            (hidden * hidden * WEIGHT).sum().backward()
            t.seen = hidden.grad
        same(leaf.seen, plain.seen, op)
        same(leaf.grad, plain.grad, op)


def products_of_cut_dims(mesh):
    """What is reduced over a cut dim is watched as on one device."""
    value = x(5, 3) + 2
    for places in ([Shard(0)] * mesh.ndim, on_one_axis(mesh, Shard(0)), on_one_axis(mesh, Shard(1))):
        for reduce in (lambda t: t.prod(), lambda t: t.prod(0), lambda t: t.prod(1, keepdim=True), lambda t: t.mean(0)):
            plain, leaf = value.clone().requires_grad_(), distribute_tensor(value, mesh, places).requires_grad_()
            for t in (plain, leaf):
                hidden = reduce(t)
                hidden.retain_grad()
                hidden.register_hook(lambda g: torch.ones_like(g))
                Double.apply(hidden).pow(2).sum().backward()
                t.seen = hidden.grad
            same(leaf.seen, plain.seen, str(places))
            same(leaf.grad, plain.grad, str(places))


def reentrant_checkpoints(mesh):
    for op, plain, of_rows, leaf, pending in pairs(mesh):
        for t, reduce in ((plain, of_rows), (leaf, pending)):
            out = checkpoint(lambda h: h * h, reduce(t), use_reentrant=True)
            out = checkpoint(reduce, t, use_reentrant=True) * out
            (out * WEIGHT).sum().backward()
        same(leaf.grad, plain.grad, op)


def second_derivatives_with_an_unused_result(mesh):
    """Of several pending sums one is not used: the zeros that stand for its gradient count once."""

    class Sums(Function):
        @staticmethod
        def forward(ctx, t, w):
            ctx.save_for_backward(t, w)
            return (t * t).sum(), (t**3).sum() * w, t.sum(0)

        @staticmethod
        def backward(ctx, a, b, c):
            t, w = ctx.saved_tensors
            return 2 * t * a + 3 * t * t * b * w + c, (t**3).sum() * b + (w * (1 + b) * (1 + c.sum())) * a

    value = x(5, 3)
    for used in range(3):
        plain, w = value.clone().requires_grad_(), x().requires_grad_()
        leaf = distribute_tensor(value, mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
        mine = distribute_tensor(x(), mesh).requires_grad_()
        for t, weight in ((plain, w), (leaf, mine)):
            out = Sums.apply(t, weight)[used]
            first = torch.autograd.grad((out * out).sum(), (t, weight), create_graph=True)
            sum((g * g).sum() for g in first).backward()
        same(leaf.grad, plain.grad, f"result {used}")
        same(mine.grad, w.grad, f"result {used}")


CHECKS = [
    functions, second_derivatives_of_functions, functions_that_write, functions_with_pending_results, hooks_replace,
    hooks_on_leaves, a_write_between_hook_and_backward, retained, products_of_cut_dims, reentrant_checkpoints,
    second_derivatives_with_an_unused_result,
]  # fmt: skip

test_simulated, test_processes = checked_on(__name__, CHECKS)
