"""Autograd on a distributed tensor: what the user of one device would see, on every layout."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from shardwise import AutogradError, DTensor, LayoutError, Partial, Shard, StrictError, debug, distribute_tensor, strict
from shardwise.layout.gradient import grad_placements
from shardwise.testing import check_rule
from tests.tensor.common import (
    VALUE,
    WEIGHT,
    R,
    checked_on,
    is_simulated,
    laid_out,
    layouts,
    leaves,
    on_one_axis,
    same,
    whole,
    x,
)


def flags(mesh):
    for _, leaf, where in leaves(mesh):
        assert leaf.requires_grad and leaf.is_leaf and leaf.grad_fn is None and leaf.grad is None, where
        out = leaf * 2
        assert out.requires_grad and not out.is_leaf and out.grad_fn is not None, where
        assert not leaf.retains_grad and not out.retains_grad
        out.retain_grad()
        assert out.retains_grad
        detached = leaf.detach()
        assert not detached.requires_grad and detached.is_leaf, where
        assert leaf.requires_grad_(False) is leaf and not leaf.requires_grad
        leaf.requires_grad = True
        assert leaf.requires_grad
        with pytest.raises(RuntimeError, match="you can only change requires_grad flags of leaf variables"):
            out.requires_grad = False
    with pytest.raises(RuntimeError, match="floating point"):
        distribute_tensor(torch.arange(4), mesh).requires_grad_()


def grad_is_one_object(mesh):
    for plain, leaf, where in leaves(mesh):
        (plain * WEIGHT).sum().backward()
        (leaf * distribute_tensor(WEIGHT, mesh)).sum().backward()
        first = leaf.grad
        assert leaf.grad is first and isinstance(first, DTensor) and not first.requires_grad, where
        same(first, plain.grad, where)
        first.mul_(2)
        same(leaf.grad, plain.grad * 2, where)


def grad_accumulates(mesh):
    for plain, leaf, where in leaves(mesh):
        for t, w in ((plain, WEIGHT), (leaf, distribute_tensor(WEIGHT, mesh))):
            (t * w).sum().backward()
            (t * t).sum().backward()
        same(leaf.grad, plain.grad, where)


def grad_is_assigned(mesh):
    for _, leaf, where in leaves(mesh):
        (leaf * leaf).sum().backward()
        grads = leaf.grad.placements
        leaf.grad = None
        assert leaf.grad is None
        given = distribute_tensor(WEIGHT, mesh, grads)
        leaf.grad = given
        assert leaf.grad is (given if not leaf.layout.is_partial or not is_simulated(mesh) else leaf.grad), where
        (leaf * 1).sum().backward()
        same(leaf.grad, WEIGHT + 1, where)
        del leaf.grad
        assert leaf.grad is None


def grad_is_assigned_in_any_layout(mesh):
    for _, leaf, where in leaves(mesh):
        for places in layouts(mesh, WEIGHT):
            leaf.grad = None
            leaf.grad = laid_out(WEIGHT, mesh, places)
            assert leaf.grad.placements == grad_placements(leaf.placements)
            (leaf * 1).sum().backward()
            same(leaf.grad, WEIGHT + 1, f"{where}, gradient given as {places}")
        given = WEIGHT.clone()
        leaf.grad = given  # a plain tensor counts as replicated
        (leaf * 1).sum().backward()
        same(leaf.grad, WEIGHT + 1, where)


def wrong_grad_is_refused(mesh):
    leaf = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
    before = leaf.grad
    with pytest.raises(LayoutError, match=r"grad: gradient of shape \(5,\) for a tensor of shape \(5, 4\)"):
        leaf.grad = distribute_tensor(x(5), mesh)
    with pytest.raises(LayoutError, match=r"grad: gradient of shape \(5,\) for a tensor of shape \(5, 4\)"):
        leaf.grad = x(5)
    with pytest.raises(TypeError, match="grad: the gradient must be a tensor, got list"):
        leaf.grad = [VALUE]
    with strict():
        with pytest.raises(StrictError, match="grad: a plain tensor meets a distributed one"):
            leaf.grad = VALUE
        with pytest.raises(StrictError, match=r"grad would communicate .* to \[.*S\(0\)"):
            leaf.grad = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(1)))
    assert leaf.grad is before is None


def backward_needs_a_gradient(mesh):
    for plain, leaf, where in leaves(mesh):
        with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
            (leaf * 2).backward()
        with pytest.raises(RuntimeError, match=r"gradient of shape \(4,\) for a tensor of shape \(5, 4\)"):
            (leaf * 2).backward(distribute_tensor(x(4), mesh))
        for places in layouts(mesh, VALUE):
            leaf.grad = plain.grad = None
            (leaf * 2).backward(laid_out(WEIGHT, mesh, places))
            (plain * 2).backward(WEIGHT)
            same(leaf.grad, plain.grad, f"{where}, gradient given as {places}")
        leaf.grad = None
        (leaf * 2).backward(WEIGHT)
        same(leaf.grad, plain.grad, f"{where}, a plain gradient")
        (same_grad,) = torch.autograd.grad(leaf * 2, leaf, WEIGHT)
        same(same_grad, plain.grad, f"{where}, a plain gradient")
    with pytest.raises(RuntimeError, match="does not require grad"):
        distribute_tensor(x(), mesh).backward()


def backward_frees_the_graph(mesh):
    leaf = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
    out = (leaf.exp() * leaf).sum()
    out.backward(retain_graph=True)
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


def autograd_backward(mesh):
    for plain, leaf, where in leaves(mesh):
        torch.autograd.backward([(plain * 2).sum(), plain * 3], [None, WEIGHT])
        torch.autograd.backward([(leaf * 2).sum(), leaf * 3], [None, distribute_tensor(WEIGHT, mesh)])
        same(leaf.grad, plain.grad, where)
        other = laid_out(VALUE, mesh, [R] * mesh.ndim, requires_grad=True)
        before = leaf.grad.clone()
        (leaf * other).sum().backward(inputs=[other])
        same(other.grad, VALUE, where)
        same(leaf.grad, before.full_tensor(), where)


def autograd_grad(mesh):
    for plain, leaf, where in leaves(mesh):
        other, mine = (
            x(5, 4, seed=9).requires_grad_(),
            laid_out(x(5, 4, seed=9), mesh, [R] * mesh.ndim, requires_grad=True),
        )
        unused, not_mine = x(2).requires_grad_(), distribute_tensor(x(2), mesh).requires_grad_()
        want = torch.autograd.grad(plain.exp() * other, [plain, other], WEIGHT)
        got = torch.autograd.grad(leaf.exp() * mine, [leaf, mine], distribute_tensor(WEIGHT, mesh))
        for g, w in zip(got, want, strict=True):
            assert isinstance(g, DTensor) and not g.requires_grad
            same(g, w, where)
        assert leaf.grad is None and mine.grad is None
        (only,) = torch.autograd.grad((leaf * mine).sum(), leaf)
        same(only, other, where)
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad((leaf * 2).sum(), [leaf, not_mine])
        got = torch.autograd.grad((leaf * 2).sum(), [leaf, not_mine], allow_unused=True)
        assert got[1] is None
        got = torch.autograd.grad((leaf * 2).sum(), [leaf, not_mine], materialize_grads=True)
        same(got[1], torch.zeros_like(unused), where)
        hidden = leaf * 3
        (inner,) = torch.autograd.grad((hidden * hidden).sum(), hidden)
        same(inner, VALUE * 6, where)


SECOND = {
    "power": lambda a, b: (a**3 * b).sum(),
    "exp of product": lambda a, b: (a * b).exp().mean(),
    "matmul": lambda a, b: (a @ b.t()).tanh().sum(),
    "softmax": lambda a, b: (a.softmax(-1) * b.softmax(0)).sum(),
    "layer_norm": lambda a, b: (F.layer_norm(a, (4,)) * b).pow(2).sum(),
    "reduce and broadcast": lambda a, b: ((a - a.mean(0)) * b.sum(1, keepdim=True)).pow(2).sum(),
    "view": lambda a, b: (a.reshape(2, 10) * b.reshape(2, 10)).sin().sum(),
}


def double_backward(mesh):
    """The gradient of |gradient|^2, for two operands on random layouts."""

    def squared_gradient(function):
        def run(a, b):
            ga, gb = torch.autograd.grad(function(a, b), [a, b], create_graph=True)
            assert ga.requires_grad
            return (ga * ga).sum() + (gb * gb * gb).sum()

        return run

    for name, function in SECOND.items():
        check_rule(
            squared_gradient(function),
            [[VALUE, WEIGHT]],
            [mesh],
            limit=5 if is_simulated(mesh) else 2,
            seed=len(name),
            tolerance=1e-10,
            partial=("sum",),
        )


def backward_with_create_graph(mesh):
    """.grad itself is part of the graph. (torch warns of the cycle.)"""
    plain = VALUE.clone().requires_grad_()
    leaf = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
    for t in (plain, leaf):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*create_graph=True.*")
            (t**3).sum().backward(create_graph=True)
        first, t.grad = t.grad, None
        assert first.requires_grad
        (first * first).sum().backward()
    same(leaf.grad, plain.grad)
    leaf.grad = None
    gc.collect()


def retain_grad_on_a_non_leaf(mesh):
    for plain, leaf, where in leaves(mesh):
        kept = []
        for t in (plain, leaf):
            hidden = t * 2
            hidden.retain_grad()
            (hidden * hidden).sum().backward()
            kept.append(hidden)
        same(kept[1].grad, kept[0].grad, where)
        assert kept[1].grad is kept[1].grad


def retain_grad_before_another_shape(mesh):
    """torch keeps the gradient of what the tensor was, under the new tensor's name; here it is refused."""
    leaf = distribute_tensor(x(4, 4), mesh).requires_grad_()
    hidden = leaf * 1
    hidden.retain_grad()
    with pytest.raises(AutogradError, match=r"t_ after retain_grad\(\).*call retain_grad\(\) after t_"):
        hidden.t_()
    hidden.sum().backward()
    same(hidden.grad, torch.ones(4, 4, dtype=torch.float64))


def no_grad_and_friends(mesh):
    for _, leaf, where in leaves(mesh):
        with torch.no_grad():
            assert not (leaf * 2).requires_grad, where
            with torch.enable_grad():
                assert (leaf * 2).requires_grad, where
            with torch.set_grad_enabled(True):
                assert (leaf * 2).requires_grad, where
            assert (
                not leaf.redistribute(placements=[R] * mesh.ndim).requires_grad or leaf.placements == (R,) * mesh.ndim
            )
        with torch.inference_mode():
            out = (leaf * 2).sum()
            assert not out.requires_grad and out.item() == pytest.approx(2 * VALUE.sum().item())
        with torch.set_grad_enabled(False):
            assert not (leaf * 2).requires_grad, where
        assert (leaf * 2).requires_grad, where

        @torch.no_grad()
        def decorated(t):
            return t * 2

        assert not decorated(leaf).requires_grad, where


def detach_shares_memory(mesh):
    for _, leaf, where in leaves(mesh):
        other = leaf.detach()
        other.zero_()
        same(leaf, torch.zeros_like(VALUE), where)
        hidden = leaf * 2
        assert hidden.detach_() is hidden and not hidden.requires_grad and hidden.is_leaf, where


def data_is_the_value(mesh):
    for plain, leaf, where in leaves(mesh):
        leaf.data.add_(1)
        plain.data.add_(1)
        same(leaf, plain, where)
        assert leaf.requires_grad and not leaf.data.requires_grad, where
        leaf.data = laid_out(WEIGHT, mesh, leaf.placements)
        same(leaf, WEIGHT, where)
        assert leaf.requires_grad and leaf.is_leaf
        (leaf * leaf).sum().backward()
        same(leaf.grad, WEIGHT * 2, where)
    leaf.grad = None
    leaf.data = leaf.data.float()
    assert leaf.dtype == torch.float32
    same(leaf * 2, WEIGHT.float() * 2)
    leaf.data = distribute_tensor(x(3, 2), mesh, on_one_axis(mesh, Shard(1)))
    assert leaf.shape == (3, 2) and leaf.placements[0] == Shard(1) and leaf.requires_grad
    leaf.sum().backward()
    same(leaf.grad, torch.ones(3, 2, dtype=torch.float64))
    with pytest.raises(LayoutError, match="data: expected a DTensor, got Tensor"):
        leaf.data = x(3, 2)


def leaf_in_place_is_refused(mesh):
    for _, leaf, where in leaves(mesh):
        for change in (lambda t: t.add_(1), lambda t: t.zero_(), lambda t: t.mul_(2), lambda t: t.__setitem__(0, 1.0)):
            with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
                change(leaf)
        same(leaf, VALUE, where)


def in_place_without_grad(mesh):
    for plain, leaf, where in leaves(mesh):
        with torch.no_grad():
            for t, w in ((plain, WEIGHT), (leaf, distribute_tensor(WEIGHT, mesh))):
                assert t.add_(1) is t
                t.mul_(2).sub_(w).addcmul_(w, w, value=0.5).clamp_(-1, 1)
                t[1:3] = 0.25
                t[:, 0:1].neg_()
                t.copy_(t * 2)
        same(leaf, plain, where)
        assert leaf.requires_grad and leaf.is_leaf


IN_PLACE = {
    "add_": lambda a, b: (a * 2).add_(b),
    "add_ twice": lambda a, b: (a * 2).add_(b).add_(b, alpha=3),
    "mul_": lambda a, b: (a * 2).mul_(b),
    "mul_ itself": lambda a, b: (a + 0).mul_(a) * b,
    "div_": lambda a, b: (a * 2).div_(b.abs() + 1),
    "exp_": lambda a, b: (a * b).exp_(),
    "relu_": lambda a, b: F.relu_(a * b),
    "copy_": lambda a, b: (a * 2).copy_(b * 3) + a,
    "fill_": lambda a, b: (a * 2).fill_(1.0) * b,
    "zero_": lambda a, b: (a * 2).zero_() + b,
    "masked_fill_": lambda a, b: (a * b).masked_fill_(a > 0, 0.5),
    "addmm_": lambda a, b: (a @ a.t()).addmm_(a, b.t()),
    "slice set": lambda a, b: _set(a * 2, (slice(1, 3),), b[1:3]),
    "column set": lambda a, b: _set(a * 2, (slice(None), 2), b[:, 0]),
    "number set": lambda a, b: _set(a * b, (0,), 3.0),
    "view add_": lambda a, b: _through(a * 2, lambda v: v[1:3].add_(b[1:3])),
    "view mul_": lambda a, b: _through(a * 2, lambda v: v.t()[0:2].mul_(3)) * b,
    "operators": lambda a, b: _operators(a * 2, b),
}


def _set(t, index, value):
    t[index] = value
    return t


def _through(t, change):
    change(t)
    return t


def _operators(t, b):
    t += b
    t *= 2
    t -= b
    t /= 3
    return t


def in_place_recorded(mesh):
    failed = []
    for name, function in IN_PLACE.items():
        try:
            check_rule(
                function,
                [[VALUE, WEIGHT]],
                [mesh],
                limit=6 if is_simulated(mesh) else 2,
                seed=len(name),
                tolerance=1e-10,
            )
        except AssertionError as error:
            failed.append(f"{name}: {error}")
    assert not failed, "\n\n".join(failed)


def views_alias(mesh):
    changes = {
        "rows": lambda t: t[1:3].zero_(), "row": lambda t: t[2].fill_(9), "column": lambda t: t[:, 1].mul_(2),
        "transpose": lambda t: t.t().add_(1), "flat": lambda t: t.view(-1).neg_(),
        "narrow": lambda t: t.narrow(1, 1, 2).zero_(), "select": lambda t: t.select(0, 4).zero_(),
        "chunk": lambda t: t.chunk(2)[1].zero_(), "split": lambda t: t.split([2, 2], 1)[0].add_(3),
        "unsqueeze": lambda t: t.unsqueeze(1).mul_(3), "detach": lambda t: t.detach().zero_(),
        "unbind": lambda t: t.unbind(0)[3].zero_(), "step": lambda t: t[::2].zero_(),
        "negative": lambda t: t[-1].zero_(), "as": lambda t: t.view_as(t).zero_(),
    }  # fmt: skip
    failed = []
    for name, change in changes.items():
        for places in layouts(mesh, VALUE):
            plain, mine = VALUE.clone(), laid_out(VALUE, mesh, places)
            change(plain)
            change(mine)
            if not torch.allclose(whole(mine), plain):
                failed.append(f"{name} {places}")
    assert not failed, f"{len(failed)}\n" + "\n".join(failed)


def views_of_views_alias(mesh):
    for change in (lambda t: t[1, 2].fill_(5), lambda t: t.diagonal().fill_(7), lambda t: t[1:3][0].fill_(5)):
        for places in layouts(mesh, VALUE):
            plain, mine = VALUE.clone(), laid_out(VALUE, mesh, places)
            change(plain)
            change(mine)
            same(mine, plain, str(places))


def in_place_on_partial(mesh):
    ops = {
        "add_": lambda t, o: t.add_(o), "add_ number": lambda t, o: t.add_(1), "mul_ number": lambda t, o: t.mul_(3),
        "mul_": lambda t, o: t.mul_(o), "exp_": lambda t, o: t.exp_(), "clamp_": lambda t, o: t.clamp_(-0.5, 0.5),
        "zero_": lambda t, o: t.zero_(), "fill_": lambda t, o: t.fill_(2), "copy_": lambda t, o: t.copy_(o),
        "set": lambda t, o: t.__setitem__(slice(0, 2), o[0:2]), "set number": lambda t, o: t.__setitem__(0, 4.0),
        "iadd": lambda t, o: t.__iadd__(o), "normal": lambda t, o: t.mul_(0).add_(o),
    }  # fmt: skip
    failed = []
    for name, op in ops.items():
        for places in layouts(mesh, VALUE):
            for kind in (Partial(), Partial("avg")):
                target_places = on_one_axis(mesh, kind)
                plain = VALUE.clone()
                mine = distribute_tensor(VALUE, mesh, target_places)
                try:
                    op(plain, WEIGHT)
                    op(mine, laid_out(WEIGHT, mesh, places))
                    assert mine.placements == tuple(target_places)
                    same(mine, plain)
                except Exception as error:
                    failed.append(f"{name} {target_places} with {places}: {type(error).__name__} {str(error)[:200]}")
    assert not failed, f"{len(failed)}\n" + "\n".join(failed)


def in_place_on_a_maximum(mesh):
    for change in (
        lambda t: t.zero_(),
        lambda t: t.add_(1),
        lambda t: t.copy_(WEIGHT),
        lambda t: t.__setitem__(0, 4.0),
    ):
        plain, mine = VALUE.clone(), distribute_tensor(VALUE, mesh, on_one_axis(mesh, Partial("max")))
        change(plain)
        change(mine)
        same(mine, plain)


def saved_tensor_changed_in_place(mesh):
    """torch's own guard: a value needed by the backward was overwritten."""
    leaf = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
    hidden = leaf * 2
    out = (hidden * hidden).sum()
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def checkpointing(mesh):
    weight = distribute_tensor(x(4, 4), mesh, on_one_axis(mesh, Shard(1))).requires_grad_()

    def block(t, w):
        return (t @ w).tanh() @ w.t()

    for _, leaf, where in leaves(mesh):
        weight.grad = None
        plain, plain_weight = VALUE.clone().requires_grad_(), x(4, 4).requires_grad_()
        block(plain, plain_weight).pow(2).sum().backward()
        checkpoint(block, leaf, weight, use_reentrant=False).pow(2).sum().backward()
        same(leaf.grad, plain.grad, where)
        same(weight.grad, plain_weight.grad, where)


def spread_is_shared(mesh):
    """Three projections of one replicated input: one all-reduce of its gradient."""
    value = x(3, 4)
    leaf = distribute_tensor(value, mesh).requires_grad_()
    weights = [distribute_tensor(x(4, 6, seed=i), mesh, on_one_axis(mesh, Shard(1))) for i in range(3)]
    with debug.ledger() as log:
        hidden = leaf * 1
        sum((hidden @ w).sum() for w in weights).backward()
    big = [e for e in log if e.kind == "all_reduce" and e.backward]
    assert len(big) == 1, log
    plain = value.clone().requires_grad_()
    sum((plain @ x(4, 6, seed=i)).sum() for i in range(3)).backward()
    same(leaf.grad, plain.grad)


def spread_after_in_place(mesh):
    """What is kept for sharing must not outlive a change of the value."""
    plain, leaf = x(3, 4).requires_grad_(), distribute_tensor(x(3, 4), mesh).requires_grad_()
    weight = distribute_tensor(x(4, 6), mesh, on_one_axis(mesh, Shard(1)))
    for step in range(3):
        losses = []
        for t, w in ((plain, x(4, 6)), (leaf, weight)):
            t.grad = None
            loss = (t @ w).pow(2).sum() + (t @ w).sum()
            loss.backward()
            losses.append(loss)
            with torch.no_grad():
                t.sub_(t.grad, alpha=0.01)
        same(losses[1], losses[0].detach(), f"step {step}")
        same(leaf.grad, plain.grad, f"step {step}")
    with torch.no_grad():
        for t in (plain, leaf):
            t.data.mul_(3)
    for t, w in ((plain, x(4, 6)), (leaf, weight)):
        t.grad = None
        (t @ w).pow(2).sum().backward()
    same(leaf.grad, plain.grad, "after .data")


def spread_of_a_non_leaf_after_in_place(mesh):
    def program(t, w):
        hidden = t * 1
        first = (hidden @ w).sum()
        hidden = hidden.mul_(2)
        return first + (hidden @ w).pow(2).sum()

    def program_with_view(t, w):
        hidden = t * 1
        first = (hidden @ w).sum()
        hidden[0].mul_(3)
        return first + (hidden @ w).sum()

    for run in (program_with_view,):
        plain, leaf = x(3, 4).requires_grad_(), distribute_tensor(x(3, 4), mesh).requires_grad_()
        weight = distribute_tensor(x(4, 6), mesh, on_one_axis(mesh, Shard(1)))
        run(plain, x(4, 6)).backward()
        run(leaf, weight).backward()
        same(leaf.grad, plain.grad)


def spread_under_no_grad_then_grad(mesh):
    leaf = distribute_tensor(x(3, 4), mesh).requires_grad_()
    weight = distribute_tensor(x(4, 6), mesh, on_one_axis(mesh, Shard(1)))
    with torch.no_grad():
        leaf @ weight
    (leaf @ weight).sum().backward()
    plain = x(3, 4).requires_grad_()
    (plain @ x(4, 6)).sum().backward()
    same(leaf.grad, plain.grad)
    leaf.requires_grad_(False)
    assert not (leaf @ weight).requires_grad


def a_kept_spread_survives_backward(mesh):
    """Two backward passes through the same leaf: the second must not meet freed buffers."""
    leaf = distribute_tensor(x(3, 4), mesh).requires_grad_()
    weight = distribute_tensor(x(4, 6), mesh, on_one_axis(mesh, Shard(1)))
    for n in (1, 2, 3):
        (leaf @ weight).sum().backward()
        plain = x(3, 4).requires_grad_()
        (plain @ x(4, 6)).sum().backward()
        same(leaf.grad, plain.grad * n)


def gradients_of_mixed_plain_and_distributed(mesh):
    """A plain leaf that meets a distributed one gets its gradient too."""
    for places in layouts(mesh, VALUE):
        plain = WEIGHT.clone().requires_grad_()
        leaf = laid_out(VALUE, mesh, places, requires_grad=True)
        (leaf * plain).sum().backward()
        same(leaf.grad, WEIGHT, str(places))
        same(plain.grad, VALUE, str(places))


CHECKS = [
    flags, grad_is_one_object, grad_accumulates, grad_is_assigned, grad_is_assigned_in_any_layout, wrong_grad_is_refused, backward_needs_a_gradient,
    backward_frees_the_graph, autograd_backward, autograd_grad, double_backward, backward_with_create_graph,
    retain_grad_on_a_non_leaf, retain_grad_before_another_shape, no_grad_and_friends, detach_shares_memory,
    data_is_the_value, leaf_in_place_is_refused, in_place_without_grad, in_place_recorded, views_alias, in_place_on_partial,
    saved_tensor_changed_in_place, checkpointing, spread_is_shared, spread_after_in_place,
    spread_of_a_non_leaf_after_in_place, spread_under_no_grad_then_grad, a_kept_spread_survives_backward,
    gradients_of_mixed_plain_and_distributed, views_of_views_alias, in_place_on_a_maximum,
]  # fmt: skip
test_simulated, test_processes = checked_on(__name__, CHECKS)
