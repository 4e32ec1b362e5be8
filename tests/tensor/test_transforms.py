"""torch.func, forward-mode differentiation and the functions of torch.autograd on distributed tensors: one device's
answer, or an error where it would be lost."""

import functools

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import func, nn
from torch.autograd import functional, gradcheck, gradgradcheck
from torch.utils._pytree import tree_leaves

import shardwise
from shardwise import AutogradError, DTensor, LayoutError, Partial, Replicate, Shard, distribute_tensor
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.tensor.common import _on_ranks, checked_on, laid_out, layouts, on_one_axis, same, x
from tests.workers import run_ranks

VALUE, WEIGHT = x(4, 3), x(3, 3, seed=1)
INDEX, CLASSES = torch.tensor([3, 0, 2, 2]), torch.tensor([0, 1, 2, 0])
KERNEL = x(2, 1, 3, seed=2)
TIES = torch.tensor([[1.0, 2, 3], [1, 2, 0], [0, 2, 3], [1, -1, 3]], dtype=torch.float64)


def written(t):
    y = t * 2
    y.add_(1)
    y[0] = 5.0
    return y.mul_(t)


class Cube(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value):
        return value**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0] ** 2

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 3 * ctx.saved_tensors[0] ** 2


OPS = {
    "mul": lambda t: t * t, "pow": lambda t: t**3, "div": lambda t: t / (t * t + 1), "gelu": F.gelu, "relu": F.relu,
    "where": lambda t: torch.where(t > 0, t * 2, t * 3), "clamp": lambda t: t.clamp(-0.5, 0.5),
    "atan2": lambda t: torch.atan2(t, t + 3), "addcmul": lambda t: torch.addcmul(t, t, t, value=0.5),
    "sum": torch.sum, "mean of rows": lambda t: t.mean(0), "prod": torch.prod, "prod of rows": lambda t: t.prod(0),
    "var": lambda t: t.var(0), "norm": torch.norm, "amax": lambda t: t.amax(0), "max": torch.max,
    "max of rows": lambda t: t.max(0).values, "logsumexp": lambda t: t.logsumexp(0), "cumsum": lambda t: t.cumsum(0),
    "cumprod": lambda t: t.cumprod(0), "softmax": lambda t: t.softmax(0), "softmax of columns": lambda t: t.softmax(1),
    "layer_norm": lambda t: F.layer_norm(t, (3,)), "rms_norm": lambda t: F.rms_norm(t, (3,)),
    "batch_norm": lambda t: F.batch_norm(t, None, None, training=True), "normalize": lambda t: F.normalize(t, dim=0),
    "repeat": lambda t: t.repeat(2, 1), "reshape": lambda t: t.reshape(2, 6), "view": lambda t: t.view(12),
    "transpose": lambda t: t.t() @ t, "row": lambda t: t[0], "column": lambda t: t[:, 1], "step": lambda t: t[::2],
    "flip": lambda t: t.flip(0), "roll": lambda t: t.roll(1, 0), "expand": lambda t: t[None].expand(2, 4, 3),
    "cat": lambda t: torch.cat([t, t * 2]), "split": lambda t: torch.split(t, 2)[1], "diagonal": torch.diagonal,
    "pad": lambda t: F.pad(t, (1, 1, 2, 0)), "unfold": lambda t: t.unfold(0, 2, 1), "index": lambda t: t[INDEX],
    "gather": lambda t: t.gather(0, INDEX[:, None].expand(4, 3)), "mask": lambda t: t[t > 0],
    "scatter": lambda t: torch.zeros(4, 3, dtype=t.dtype).scatter(0, INDEX[:, None].expand(4, 3), t),
    "embedding": lambda t: F.embedding(INDEX, t), "sort": lambda t: t.sort(0).values,
    "topk": lambda t: t.topk(2, 0).values, "matmul": lambda t: t @ WEIGHT, "linear": lambda t: F.linear(t, WEIGHT),
    "einsum": lambda t: torch.einsum("ij,jk->ik", t, WEIGHT), "outer": lambda t: torch.outer(t[0], t[1]),
    "conv": lambda t: F.conv1d(t.t()[:, None], KERNEL, padding=1), "pool": lambda t: F.avg_pool1d(t.t()[None], 2),
    "to and double": lambda t: t.to(torch.float32).double(), "clone": torch.clone, "written": written,
    "cross_entropy": lambda t: F.cross_entropy(t, CLASSES), "mse_loss": lambda t: F.mse_loss(t, torch.ones_like(t)),
    "det": lambda t: torch.linalg.det(t.t() @ t), "inv": lambda t: torch.linalg.inv(t.t() @ t + torch.eye(3)),
    "a Function": lambda t: Cube.apply(t) * 2,
}  # fmt: skip


def total(op):
    """A function of the results of `op` that has another derivative for each of them, of second order too."""
    return lambda t: (lambda y: (y * y.detach().sin()).sum() + (y**2).sum())(op(t))


def duals(op, t):
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(op(forward_ad.make_dual(t, t * 0.5 + 1)))
        return found.primal, found.tangent


OF_OPS = {
    "grad": lambda op, t: func.grad(total(op))(t),
    "grad of grad": lambda op, t: func.grad(lambda u: (func.grad(total(op))(u) ** 2).sum())(t),
    "vjp": lambda op, t: func.vjp(op, t)[1](op(t).detach().cos())[0],
    "jvp": lambda op, t: func.jvp(op, (t,), (t * 0.5 + 1,)),
    "jacrev": lambda op, t: func.jacrev(op)(t),
    "jacfwd": lambda op, t: func.jacfwd(op)(t),
    "forward_ad": duals,
}
LEFT_OUT = {("forward_ad", "a Function")}  # an error, see below


def agree(got, want, where, tolerance=1e-8):
    for g, w in zip(tree_leaves(got), tree_leaves(want), strict=True):
        same(g, w, where, tolerance)


def ops(mesh, transforms=("grad", "jvp", "jacrev"), names=tuple(OPS), value=VALUE):
    places = [on_one_axis(mesh, p) for p in (Shard(0), Shard(1, sizes=[2, *[0] * (mesh.shape[0] - 2), 1]), Partial())]
    for transform in transforms:
        for name in names:
            if (transform, name) not in LEFT_OUT:
                run = functools.partial(OF_OPS[transform], OPS[name])
                for place in [*places, [Replicate()] * mesh.ndim]:
                    tolerance = 1e-5 if name == "to and double" else 1e-8
                    agree(run(laid_out(value, mesh, place)), run(value), f"{transform} {name} {place}", tolerance)


REDUCTIONS = ("amax", "max", "max of rows", "prod", "prod of rows", "softmax", "matmul", "row", "written")


def more_transforms_of_ops(mesh):
    ops(
        mesh, ("grad of grad", "vjp", "jacfwd", "forward_ad"), (*REDUCTIONS, "layer_norm", "index", "cat", "a Function")
    )


def ties(mesh):
    """Elements that are all the maximum share its derivative, whichever ranks hold them."""
    ops(mesh, ("grad", "jvp"), ("amax", "max", "max of rows"), TIES)


def to(t, *places):
    return t.redistribute(placements=on_one_axis(t.device_mesh, *places)) if isinstance(t, DTensor) else t


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def without_grad(t):
    with torch.no_grad():
        return t * 2


def of_outer_leaf(a, w):
    """Autograd outside of a transform."""
    a = a.detach().requires_grad_()
    return torch.autograd.grad((func.grad(lambda t: (t @ w).sin().sum())(a * 2) ** 2).sum(), a)


def without_grad_outside(a, w):
    with torch.no_grad():
        return func.grad(lambda t: (t @ w).sin().sum())(a)


def tangent_with_grad(a, w):
    a = a.detach().requires_grad_()
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual((forward_ad.make_dual(a, a.detach() * 2) @ w).sin().sum())
        return torch.autograd.grad(out.tangent, a)


def layer(a, w):
    """The gradients of a layer with parallel styles, whose inputs are plain."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    if isinstance(a, DTensor):
        mesh = a.device_mesh if a.device_mesh.ndim == 1 else a.device_mesh["a"]
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    values = {name: p.detach() for name, p in net.named_parameters()}
    return func.grad(lambda p: func.functional_call(net, p, (VALUE,)).pow(2).sum())(values)


def batched_grads(a, w):
    a, w = a.detach().requires_grad_(), w.detach().requires_grad_()
    seeds = torch.arange(18, dtype=VALUE.dtype).view(2, 3, 3)
    return torch.autograd.grad((a @ w).sin().t() @ a, (a, w), seeds, is_grads_batched=True, create_graph=True)


def laid_out_inside(a, t):
    return distribute_tensor(t, a.device_mesh, on_one_axis(a.device_mesh, Shard(1))) if isinstance(a, DTensor) else t


def entered(a, t):
    return DTensor.from_local(t, a.device_mesh, [Replicate()] * a.device_mesh.ndim) if isinstance(a, DTensor) else t


def made(a):
    if not isinstance(a, DTensor):
        return torch.ones(4, 3)
    return shardwise.ones(4, 3, device_mesh=a.device_mesh, placements=on_one_axis(a.device_mesh, Shard(1)))


def doubled_locally(t):
    return DTensor.from_local(t.to_local() * 2, t.device_mesh, t.placements) if isinstance(t, DTensor) else t * 2


def hooked(t):
    y = t * 2
    y.register_hook(lambda grad: grad * 10)
    return (y**3).sum()


def written_view(t):
    """Where the view is a copy, the write reaches its base all the same."""
    y = t * 2
    y[0].mul_(3)
    y.reshape(6, 2)[1].add_(y.detach()[0, 0])
    return (y**2).sum()


def leaf(t):
    return t.detach().requires_grad_()


PROGRAMS = {
    "grad of grad": lambda a, w: func.grad(lambda t: func.grad(lambda u: ((u @ w) ** 3).sum())(t).pow(2).sum())(a),
    "grad of a closure's partner": lambda a, w: func.grad(lambda v: (a @ v).sin().sum())(w),
    "ops on a closure": lambda a, w: func.grad(lambda v: (a.repeat(2, 1).reshape(8, 3).softmax(0) @ v).sum())(w),
    "value and grad": lambda a, w: func.grad_and_value(lambda t: (w @ t.t()).exp().mean())(a),
    "two arguments": lambda a, w: func.grad(lambda t, u: (t @ u).sin().sum(), argnums=(0, 1))(a, w),
    "aux": lambda a, w: func.grad(lambda t: ((t @ w).sum(), t * 2), has_aux=True)(a),
    "redistribute": lambda a, w: func.grad(lambda t: (to(to(t, Shard(1)), Shard(0)).sin() @ w).pow(3).sum())(a),
    "redistribute, jvp": lambda a, w: func.jvp(lambda t: to(to(t * t, Shard(1)) @ w, Replicate()), (a,), (a,)),
    "redistribute, jacrev": lambda a, w: func.jacrev(lambda t: to(t @ w, Shard(1)).sin())(a),
    "redistribute, jacfwd": lambda a, w: func.jacfwd(lambda t: to(t @ w, Shard(1)).sin())(a),
    "full_tensor": lambda a, w: func.grad(lambda t: (whole(t) ** 3).sum())(a),
    "distribute_tensor": lambda a, w: func.grad(lambda t: (laid_out_inside(a, t) @ w).sin().sum())(VALUE),
    "distribute_tensor, jvp": lambda a, w: func.jvp(lambda t: laid_out_inside(a, t) @ w, (VALUE,), (VALUE,)),
    "distribute_tensor of a constant": lambda a, w: func.grad(lambda t: (laid_out_inside(a, VALUE) * t).sin().sum())(a),
    "from_local": lambda a, w: func.grad(lambda t: (entered(a, t) @ w).sin().sum())(VALUE),
    "to_local": lambda a, w: func.grad(lambda t: (doubled_locally(to(t, Shard(0))) ** 3).sum())(a),
    "to_local, jvp": lambda a, w: func.jvp(lambda t: doubled_locally(to(t, Shard(0))) ** 3, (a,), (a,)),
    "a hook": lambda a, w: func.grad(hooked)(a),
    "a written view": lambda a, w: func.grad(written_view)(a),
    "a written view, jvp": lambda a, w: func.jvp(written_view, (a,), (a,)),
    "ones": lambda a, w: func.grad(lambda t: (t * made(a)).sin().sum())(a),
    "plain argument": lambda a, w: func.grad(lambda t: (t @ w).sin().sum())(VALUE),
    "plain argument, jvp": lambda a, w: func.jvp(lambda t: (t @ w).sin(), (VALUE,), (VALUE,)),
    "plain argument, jacrev": lambda a, w: func.jacrev(lambda t: (t @ w).sin())(VALUE),
    "plain argument, vmap": lambda a, w: torch.vmap(lambda t: (t @ w).sin())(VALUE),
    "jacrev in chunks": lambda a, w: func.jacrev(lambda t: (t @ w).sin(), chunk_size=1)(a),
    "jacrev of jacrev": lambda a, w: func.jacrev(func.jacrev(lambda t: (t @ w).sin().sum(0)))(a),
    "jacfwd of jacfwd": lambda a, w: func.jacfwd(func.jacfwd(lambda t: (t @ w).sin().sum(0)))(a),
    "jacrev of jacfwd": lambda a, w: func.jacrev(func.jacfwd(lambda t: (t @ w).sin().sum(0)))(a),
    "hessian": lambda a, w: func.hessian(lambda t: ((t.t() @ t) @ w).sin().sum())(a),
    "vmap": lambda a, w: torch.vmap(lambda row: (row @ w).sin())(a),
    "vmap of columns": lambda a, w: torch.vmap(lambda column: column.cumsum(0), in_dims=1, out_dims=1)(a),
    "vmap with a closure": lambda a, w: torch.vmap(lambda row: (a * row).sum(0))(a),
    "vmap of grad": lambda a, w: torch.vmap(func.grad(lambda row: (w @ row).sin().sum()))(a),
    "gradients of each sample": lambda a, w: torch.vmap(func.grad(lambda v, row: (row @ v).sin().sum()), (None, 0))(
        w, a
    ),
    "grad of vmap": lambda a, w: func.grad(lambda v: torch.vmap(lambda row: (row @ v).sin())(a).pow(2).sum())(w),
    "grad of a mapped argument": lambda a, w: func.grad(lambda t: torch.vmap(lambda r: (r @ w).sin())(t).sum())(a),
    "grad of vmap of grad": lambda a, w: func.grad(
        lambda v: torch.vmap(func.grad(lambda row: (row @ v).sin().sum()))(a).pow(2).sum()
    )(w),
    "vmap of jvp": lambda a, w: torch.vmap(lambda r: func.jvp(lambda t: (t @ w).sin(), (r,), (r,))[1])(a),
    "vmap of tangents": lambda a, w: torch.vmap(lambda r: func.jvp(lambda u: (r @ u).sin(), (w,), (w * r,))[1])(a),
    "functionalize": lambda a, w: func.functionalize(lambda t: (t @ w).sin())(a),
    "no_grad inside": lambda a, w: func.grad(lambda t: (t.sin() * without_grad(t)).sum())(a),
    "no_grad outside": without_grad_outside,
    "detach": lambda a, w: func.grad(lambda t: (t.sin() * t.detach()).sum())(a),
    "detach, jvp": lambda a, w: func.jvp(lambda t: t.sin() * t.detach(), (a,), (a,)),
    "autograd outside": of_outer_leaf,
    "gradient of a tangent": tangent_with_grad,
    "parallel styles": layer,
    "is_grads_batched": batched_grads,
    "is_grads_batched, unused": lambda a, w: torch.autograd.grad(
        leaf(a) * 2, leaf(w), torch.stack([VALUE, VALUE]), is_grads_batched=True, allow_unused=True
    ),
}


def transforms(mesh):
    for name, run in PROGRAMS.items():
        want = run(VALUE, WEIGHT)
        for places in layouts(mesh, VALUE)[::3]:
            got = run(laid_out(VALUE, mesh, places), distribute_tensor(WEIGHT, mesh, on_one_axis(mesh, Shard(1))))
            agree(got, want, f"{name} {places}")


FUNCTIONAL = {
    "jacobian": lambda f, t, **more: functional.jacobian(f, t, **more),
    "jacobian, mapped": lambda f, t: functional.jacobian(f, t, vectorize=True),
    "jacobian, forward": lambda f, t: functional.jacobian(f, t, vectorize=True, strategy="forward-mode"),
    "jacobian, recorded": lambda f, t: functional.jacobian(f, t, create_graph=True),
    "hessian": lambda f, t: functional.hessian(lambda u: (f(u) ** 2).sum(), t),
    "hessian, mapped": lambda f, t: functional.hessian(lambda u: (f(u) ** 2).sum(), t, vectorize=True),
    "vjp": lambda f, t: functional.vjp(f, t, f(t)),
    "jvp": lambda f, t: functional.jvp(f, t, t),
    "hvp": lambda f, t: functional.hvp(lambda u: (f(u) ** 2).sum(), t, t),
    "vhp": lambda f, t: functional.vhp(lambda u: (f(u) ** 2).sum(), t, t),
}


def functions_of_autograd(mesh):
    weight = distribute_tensor(WEIGHT, mesh, on_one_axis(mesh, Shard(0)))
    for name, run in FUNCTIONAL.items():
        want = run(lambda t: (t @ WEIGHT).sin(), VALUE)
        for places in layouts(mesh, VALUE)[::4]:
            agree(run(lambda t: (t @ weight).sin(), laid_out(VALUE, mesh, places)), want, f"{name} {places}")


def checks_of_gradients(mesh):
    weight = distribute_tensor(WEIGHT, mesh, on_one_axis(mesh, Shard(0)))
    for places in (on_one_axis(mesh, Shard(0)), [Replicate()] * mesh.ndim, on_one_axis(mesh, Partial())):
        value = laid_out(VALUE, mesh, places, requires_grad=True)
        assert gradcheck(lambda t: (t @ weight).sin(), (value,))
        assert gradcheck(lambda t: (t @ weight).sin(), (value,), fast_mode=True)
        assert gradcheck(lambda t: (t @ weight).sin(), (value,), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(lambda t: (t @ weight).sin(), (value,))
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        gradcheck(lambda t: t.detach() * t, (value,))


def errors(mesh):
    """Where a derivative would be lost, or the arguments do not fit."""
    value = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0)))
    with pytest.raises(AutogradError, match="torch.func.linearize.* is not supported.* Use torch.func.jvp"):
        func.linearize(torch.sin, value)
    with forward_ad.dual_level():
        with pytest.raises(AutogradError, match="Cube: forward_ad of a torch.autograd.Function .* use torch.func.jvp"):
            Cube.apply(forward_ad.make_dual(value, value))
        with pytest.raises(LayoutError, match=r"the tangent is of shape \(3, 3\) .* the tensor of shape \(4, 3\)"):
            forward_ad.make_dual(value, distribute_tensor(WEIGHT, mesh))
        with pytest.raises(AutogradError, match="the tensor is a plain one and its tangent a DTensor"):
            forward_ad.make_dual(VALUE, value)
    out = value.detach().requires_grad_()
    with pytest.raises(ValueError, match="is_grads_batched wants a stack of equally many gradients"):
        torch.autograd.grad(out.sum(), out, is_grads_batched=True)


def nothing_stays(mesh):
    """What a transform computed is not kept on tensors that outlive it."""
    weight = distribute_tensor(WEIGHT, mesh, [Replicate()] * mesh.ndim).requires_grad_()
    value = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0)))
    func.grad(lambda t: (t @ weight).sum())(value)
    (value @ weight).sum().backward()
    same(weight.grad, VALUE.t() @ torch.ones(4, 3, dtype=VALUE.dtype))


CHECKS = [
    ops,
    more_transforms_of_ops,
    ties,
    transforms,
    functions_of_autograd,
    checks_of_gradients,
    errors,
    nothing_stays,
]
test_simulated, _ = checked_on(__name__, CHECKS, simulated=[(3,), (2, 2)])


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_processes(check):
    run_ranks(_on_ranks, 2, __name__, [check.__name__], (2,))
