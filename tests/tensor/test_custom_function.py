"""torch.autograd.Function on distributed tensors: what one device gives, on every layout."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, Shard, distribute_tensor
from tests.tensor.common import (
    Double,
    R,
    TripledInPlace,
    checked_on,
    is_simulated,
    laid_out,
    layouts,
    on_one_axis,
    same,
    x,
)

VALUE, WEIGHT = x(5, 4), x(5, 4, seed=3)


class Negated(Function):
    """Values pass."""

    @staticmethod
    def forward(ctx, t):
        return t

    @staticmethod
    def backward(ctx, grad):
        return -grad


class View(Negated):
    @staticmethod
    def forward(ctx, t):
        return t.view_as(t)


class Exp(Function):
    """Saves its result, which second derivatives go through."""

    @staticmethod
    def forward(ctx, t):
        out = t.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return grad * out


class Product(Function):
    """Saves its arguments; a number among them; several results."""

    @staticmethod
    def forward(ctx, a, scale, b):
        ctx.save_for_backward(a, None, b)
        ctx.scale = scale
        return a * b * scale, (a + b).sum(0), "note"

    @staticmethod
    def backward(ctx, grad, column, _):
        a, nothing, b = ctx.saved_tensors
        assert nothing is None and ctx.needs_input_grad[1] is False
        return grad * b * ctx.scale + column, None, (grad * a * ctx.scale + column) if ctx.needs_input_grad[2] else None


class Cube(Function):
    """The newer form, with defaults."""

    @staticmethod
    def forward(t, power=3):
        return t**power

    @staticmethod
    def setup_context(ctx, inputs, output):
        t, ctx.power = inputs
        ctx.save_for_backward(t)

    @staticmethod
    def backward(ctx, grad):
        (t,) = ctx.saved_tensors
        return grad * ctx.power * t ** (ctx.power - 1), None


class Once(Exp):
    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        assert not torch.is_grad_enabled()
        return grad * ctx.saved_tensors[0]


class InPlaceAndMore(Function):
    """The written argument comes before a new result."""

    @staticmethod
    def forward(ctx, t):
        ctx.mark_dirty(t)
        return t.mul_(3), t * 5

    @staticmethod
    def backward(ctx, grad, more):
        return grad * 3 + more * 15


class Parts(Function):
    """One result has no gradient; the other's may be missing."""

    @staticmethod
    def forward(ctx, t):
        ctx.set_materialize_grads(False)
        sign, twice, thrice = t.sign(), t * 2, t * 3
        ctx.mark_non_differentiable(sign)
        return sign, twice, thrice

    @staticmethod
    def backward(ctx, sign, twice, thrice):
        assert sign is None and twice is None
        return thrice * 3


class Zeros(Parts):
    """Missing gradients come as zeros."""

    @staticmethod
    def forward(ctx, t):
        return t.sign(), t * 2, t * 3

    @staticmethod
    def backward(ctx, sign, twice, thrice):
        assert not sign.any() and not twice.any() and twice.shape == (5, 4)
        return thrice * 3 + twice


def some_layouts(mesh, partial=True):
    """On processes a third of them: what differs there is the exchange."""
    return layouts(mesh, VALUE, partial)[:: 1 if is_simulated(mesh) else 3]


def both(mesh, partial=True, value=VALUE):
    for places in some_layouts(mesh, partial):
        yield value.clone().requires_grad_(), laid_out(value, mesh, places, requires_grad=True), str(places)


def values_and_gradients(mesh):
    for function in (Double, Negated, View, Exp, Cube, Once):
        for plain, leaf, where in both(mesh):
            for t in (plain, leaf):
                out, inner = function.apply(t), function.apply(t * 2)
                assert out.requires_grad and not out.is_leaf and out.grad_fn.name() == f"{function.__name__}Backward"
                (out * out + inner).sum().backward()
                t.seen = out
            same(leaf.seen, plain.seen, where)
            same(leaf.grad, plain.grad, f"{function.__name__} {where}")


def without_grad(mesh):
    for plain, leaf, where in both(mesh):
        for t in (leaf.detach(), leaf):
            with torch.no_grad() if t.requires_grad else torch.enable_grad():
                out = Double.apply(t)
            assert not out.requires_grad, where
            same(out, plain * 2, where)
        with torch.inference_mode():
            same(Exp.apply(leaf), plain.exp(), where)


def several_arguments_and_results(mesh):
    for plain, leaf, where in both(mesh):
        for other_needs in (True, False):
            other = WEIGHT.clone().requires_grad_(other_needs)
            mine = distribute_tensor(WEIGHT, mesh, on_one_axis(mesh, Shard(1), -1)).requires_grad_(other_needs)
            plain.grad = leaf.grad = None
            for t, o in ((plain, other), (leaf, mine)):
                out, column, note = Product.apply(t, 2.5, o)
                assert note == "note"
                ((out * out).sum() + (column * column).sum()).backward()
            same(leaf.grad, plain.grad, where)
            same(mine.grad, other.grad, where)


def with_a_plain_tensor(mesh):
    """It counts as replicated, and its gradient is whole."""
    for plain, leaf, where in both(mesh):
        other, mine = WEIGHT.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
        for t, o in ((plain, other), (leaf, mine)):
            Product.apply(t, 2, o)[0].exp().sum().backward()
        same(leaf.grad, plain.grad, where)
        assert type(mine.grad) is torch.Tensor
        same(mine.grad, other.grad, where)
        mine.grad = None
        Product.apply(leaf.detach(), 2, mine)[0].exp().sum().backward()
        same(mine.grad, other.grad, where)


def second_derivatives(mesh):
    for function in (Double, Negated, Exp, Cube, lambda t: Product.apply(t, 2, t)[0]):
        apply = getattr(function, "apply", function)
        for plain, leaf, where in both(mesh):
            for t in (plain, leaf):
                (grad,) = torch.autograd.grad((apply(t * 1) * t).sum(), t, create_graph=True)
                (grad * grad).sum().backward()
            same(leaf.grad, plain.grad, f"{function} {where}")


def once_is_once(mesh):
    for _, leaf, _ in both(mesh):
        out = Once.apply(leaf)
        (grad,) = torch.autograd.grad((out * out).sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice a function that was marked with @once_different"):
            grad.sum().backward()


def in_place(mesh):
    for plain, leaf, where in both(mesh):
        for t in (plain, leaf):
            hidden = t * 2
            out = TripledInPlace.apply(hidden)
            assert out is hidden
            (hidden * hidden).sum().backward()
        same(leaf.grad, plain.grad, where)
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            TripledInPlace.apply(leaf)
    for plain, leaf, where in both(mesh):
        results = [InPlaceAndMore.apply(t * 2) for t in (plain, leaf)]
        for written, more in results:
            (written * more).sum().backward()
        same(results[1][1], results[0][1], where)
        same(leaf.grad, plain.grad, where)


def missing_gradients(mesh):
    for function in (Parts, Zeros):
        for plain, leaf, where in both(mesh):
            for t in (plain, leaf):
                sign, _, thrice = function.apply(t)
                assert sign.requires_grad is (function is Zeros)
                (thrice * thrice).sum().backward()
            same(leaf.grad, plain.grad, where)


def other_layouts_inside(mesh):
    """What a Function does to layouts is its own business, in both directions."""

    class Moved(Function):
        @staticmethod
        def forward(ctx, t, there):
            return t.redistribute(placements=there) * 2

        @staticmethod
        def backward(ctx, grad):
            return grad.redistribute(placements=[R] * mesh.ndim) * 2, None

    for places in some_layouts(mesh)[1::2]:
        for plain, leaf, where in both(mesh):
            out = Moved.apply(leaf, places)
            assert out.placements == (leaf.detach().redistribute(placements=places) * 2).placements
            (out * laid_out(WEIGHT, mesh, [R] * mesh.ndim)).sum().backward()
            same(leaf.grad, WEIGHT * 2, f"{where} to {places}")
            assert plain.grad is None


def to_and_from_plain(mesh):
    """Functions that leave and enter the typed world."""
    places = on_one_axis(mesh, Shard(0))

    class Gathered(Function):
        @staticmethod
        def forward(ctx, t):
            return t.full_tensor()

        @staticmethod
        def backward(ctx, grad):
            return distribute_tensor(grad, mesh, places)

    class Dealt(Function):
        @staticmethod
        def forward(ctx, t):
            return distribute_tensor(t, mesh, places)

        @staticmethod
        def backward(ctx, grad):
            return grad.full_tensor()

    leaf = distribute_tensor(VALUE, mesh, places).requires_grad_()
    out = Gathered.apply(leaf)
    assert type(out) is torch.Tensor and out.requires_grad
    (out * WEIGHT).sum().backward()
    same(leaf.grad, WEIGHT)
    plain = VALUE.clone().requires_grad_()
    out = Dealt.apply(plain)
    assert isinstance(out, DTensor) and out.requires_grad and not out.is_leaf
    (out * out).sum().backward()
    same(plain.grad, VALUE * 2)
    with pytest.raises(RuntimeError, match="second derivatives through a torch.autograd.Function that makes a DTensor"):
        torch.autograd.grad((Dealt.apply(plain) ** 2).sum(), plain, create_graph=True)


def on_local_tensors(mesh):
    for _, leaf, where in both(mesh, partial=False):
        local = Exp.apply(leaf.to_local())
        DTensor.from_local(local, mesh, leaf.placements, shape=VALUE.shape).sum().backward()
        same(leaf.grad, VALUE.exp(), where)


def gradients_of_other_forms(mesh):
    """A plain gradient counts as replicated; one too large is summed; the wrong number is torch's error."""

    class Odd(Function):
        @staticmethod
        def forward(ctx, t, gradient):
            ctx.gradient = gradient
            return t * 1

        @staticmethod
        def backward(ctx, grad):
            return ctx.gradient

    leaf = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
    Odd.apply(leaf, (WEIGHT, None, None)).sum().backward()
    same(leaf.grad, WEIGHT)
    leaf.grad = None
    Odd.apply(leaf, (distribute_tensor(WEIGHT.expand(3, 5, 4), mesh), None)).sum().backward()
    same(leaf.grad, WEIGHT * 3)
    with pytest.raises(RuntimeError, match="OddBackward returned an incorrect number of gradients"):
        Odd.apply(leaf, (WEIGHT,)).sum().backward()
    with pytest.raises(RuntimeError, match="OddBackward"):
        Odd.apply(leaf, (WEIGHT[0, :3], None)).sum().backward()


def node_hooks(mesh):
    for plain, leaf, where in both(mesh):
        seen = []
        for t in (plain, leaf):
            out = Exp.apply(t)
            out.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
            handle = out.grad_fn.register_hook(lambda into, outof, seen=seen: seen.append((into[0], outof[0])))
            out.grad_fn.register_hook(lambda into, outof: (into[0] + outof[0],))
            out.sum().backward(retain_graph=True)
            handle.remove()
            out.sum().backward()
        assert len(seen) == 2, where
        same(seen[1][0], seen[0][0], where)
        same(seen[1][1], seen[0][1], where)
        same(leaf.grad, plain.grad, where)


def module_backward_hooks(mesh):
    def seen_by(t, module):
        seen = []
        module.register_full_backward_pre_hook(lambda m, outof: (outof[0] * 3,))
        module.register_full_backward_hook(lambda m, into, outof: seen.extend((into[0], outof[0])))
        module.register_full_backward_hook(lambda m, into, outof: (into[0] * 2,))
        (module(t) ** 2).sum().backward()
        return [*seen, t.grad, module.weight.grad]

    for places in some_layouts(mesh):
        got, want = [], []
        for t, found in (
            (VALUE.clone().requires_grad_(), want),
            (laid_out(VALUE, mesh, places, requires_grad=True), got),
        ):
            module = nn.Linear(4, 3, bias=False, dtype=torch.float64)
            weight = x(3, 4)
            if found is got:
                weight = distribute_tensor(weight, mesh, on_one_axis(mesh, Shard(0)))
            module.weight = nn.Parameter(weight)
            found += seen_by(t, module)
        assert len(got) == 4 and all(isinstance(g, DTensor) for g in got)
        for g, w in zip(got, want, strict=True):
            same(g, w, str(places))


def a_hook_of_a_module_without_input_gradients(mesh):
    seen = []
    module = nn.Linear(4, 3, dtype=torch.float64)
    module.weight, module.bias = (nn.Parameter(distribute_tensor(p.detach(), mesh)) for p in module.parameters())
    module.register_full_backward_hook(lambda m, into, outof: seen.append((into, outof)))
    with pytest.warns(UserWarning, match="Full backward hook is firing"):
        module(distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0)))).sum().backward()
    ((into, outof),) = seen
    assert into == (None,)
    same(outof[0], torch.ones(5, 3, dtype=torch.float64))


def reentrant_checkpoint(mesh):
    weight = distribute_tensor(x(4, 4), mesh, on_one_axis(mesh, Shard(1))).requires_grad_()

    def block(t, w):
        return (t @ w).tanh() @ w.t()

    for plain, leaf, where in both(mesh):
        weight.grad = None
        plain_weight = x(4, 4).requires_grad_()
        for t, w in ((plain, plain_weight), (leaf, weight)):
            for reentrant in (False, True):
                checkpoint(block, t, w, use_reentrant=reentrant).pow(2).sum().backward()
            checkpoint(lambda t, w=w: block(t, w), t, use_reentrant=True).pow(2).sum().backward()
        same(leaf.grad, plain.grad, where)
        same(weight.grad, plain_weight.grad, where)


def reentrant_checkpoint_of_plain_activations(mesh):
    """Tensor parallel modules: plain tensors outside, distributed ones inside."""
    weight = distribute_tensor(x(4, 4), mesh, on_one_axis(mesh, Shard(1))).requires_grad_()

    def block(t):
        return (distribute_tensor(t, mesh) if not t.requires_grad else DTensor.from_local(t, mesh)) @ weight

    plain, mine = (VALUE.clone().requires_grad_() for _ in range(2))
    plain_weight = x(4, 4).requires_grad_()
    (plain @ plain_weight).pow(2).sum().backward()
    if is_simulated(mesh):  # a plain tensor that enters belongs to every simulated rank
        return
    checkpoint(lambda t: block(t).full_tensor(), mine, use_reentrant=True).pow(2).sum().backward()
    same(mine.grad, plain.grad)
    same(weight.grad, plain_weight.grad)


def nothing_is_kept_alive(mesh):
    """No cycle holds a graph until the collector comes."""
    leaf = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
    gc.collect()
    gc.disable()
    try:
        out = Exp.apply(leaf)
        out.grad_fn.register_hook(lambda into, outof: None)
        alive = weakref.ref(out.grad_fn)
        (out * out).sum().backward()
        del out
        assert alive() is None
    finally:
        gc.enable()


CHECKS = [
    values_and_gradients, without_grad, several_arguments_and_results, with_a_plain_tensor, second_derivatives,
    once_is_once, in_place, missing_gradients, other_layouts_inside, to_and_from_plain, on_local_tensors,
    gradients_of_other_forms, node_hooks, module_backward_hooks, a_hook_of_a_module_without_input_gradients,
    reentrant_checkpoint, reentrant_checkpoint_of_plain_activations, nothing_is_kept_alive,
]  # fmt: skip
test_simulated, test_processes = checked_on(__name__, CHECKS)

TAKEN_BEFORE = """
import torch
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t * 2
    @staticmethod
    def backward(ctx, grad):
        return grad * 2
double = Double.apply
import shardwise
leaf = shardwise.distribute_tensor(torch.ones(4), shardwise.simulate((2,)), [shardwise.Shard(0)]).requires_grad_()
try:
    double(leaf)
except shardwise.AutogradError as error:
    assert "taken before shardwise was imported" in str(error), error
else:
    raise SystemExit("the gradient was lost")
Double.apply(leaf).sum().backward()
assert leaf.grad.full_tensor().tolist() == [2.0] * 4
"""


def test_an_apply_taken_before_the_import_raises():
    subprocess.run([sys.executable, "-c", TAKEN_BEFORE], check=True, timeout=240)
