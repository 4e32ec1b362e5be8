"""torch.func on distributed tensors: one device's answer, or an error where it would be lost."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import func

from shardwise import AutogradError, Shard, distribute_tensor
from tests.tensor.common import checked_on, laid_out, layouts, on_one_axis, same, x

VALUE, WEIGHT = x(4, 3), x(3, 3, seed=1)

TRANSFORMS = {
    "grad": lambda a, w: func.grad(lambda t: ((t @ w) ** 3).sum())(a),
    "grad of grad": lambda a, w: func.grad(lambda t: func.grad(lambda u: ((u @ w) ** 3).sum())(t).pow(2).sum())(a),
    "grad of a closure's partner": lambda a, w: func.grad(lambda v: (a @ v).sin().sum())(w),
    "value and grad": lambda a, w: func.grad_and_value(lambda t: (w @ t.t()).exp().mean())(a),
    "vjp": lambda a, w: func.vjp(lambda t: (t @ w).sin(), a)[1](a),
    "jacrev": lambda a, w: func.jacrev(lambda t: (t @ w).sin())(a),
    "vmap": lambda a, w: torch.vmap(lambda row: (row @ w).sin())(a),
    "vmap of columns": lambda a, w: torch.vmap(lambda column: column.cumsum(0), in_dims=1, out_dims=1)(a),
    "vmap with a closure": lambda a, w: torch.vmap(lambda row: (a * row).sum(0))(a),
    "vmap of grad": lambda a, w: torch.vmap(func.grad(lambda row: (w @ row).sin().sum()))(a),
    "functional jacobian": lambda a, w: torch.autograd.functional.jacobian(lambda t: (t @ w).sin(), a),
    "functional hessian": lambda a, w: torch.autograd.functional.hessian(lambda t: ((t @ w) ** 3).sum(), a),
}


def transforms(mesh):
    for name, run in TRANSFORMS.items():
        want = run(VALUE, WEIGHT)
        for places in layouts(mesh, VALUE, partial=False)[::3]:
            got = run(laid_out(VALUE, mesh, places), distribute_tensor(WEIGHT, mesh, on_one_axis(mesh, Shard(1))))
            for g, w in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
                same(g, w, f"{name} {places}")


def forward_mode_is_refused(mesh):
    """The tangent would be in the wrapper, where no op looks."""
    value = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0)))
    for lost in (lambda: func.jvp(torch.sin, (value,), (value,)), lambda: func.linearize(torch.sin, value)):
        with pytest.raises(AutogradError, match="forward-mode differentiation .* Use reverse mode"):
            lost()
    with forward_ad.dual_level(), pytest.raises(AutogradError, match="forward-mode"):
        forward_ad.make_dual(value, value)


CHECKS = [transforms, forward_mode_is_refused]
test_simulated, test_processes = checked_on(__name__, CHECKS)
