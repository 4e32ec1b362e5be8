"""torch's modes. Under a dispatch mode, which sees aten ops before the tensors do, answers and gradients stay what they
are; and what is planned under one mode is right under the others."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from shardwise import Shard, clear_caches
from tests.tensor.common import checked_on, laid_out, layouts, on_one_axis, same, x

CALLS = {
    "pow": lambda t: t**2,
    "rsub": lambda t: 1 - t,
    "linear": lambda t: torch.nn.functional.linear(t, t),
    "aten": lambda t: torch.ops.aten.mul.Tensor(t, t),
    "softmax": lambda t: t.softmax(0),
    "norm": lambda t: torch.linalg.vector_norm(t, dim=1),
    "cumsum": lambda t: t.cumsum(0),
    "view": lambda t: t[1:].reshape(-1),
}


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def watched(mesh):
    value = x(5, 4)
    for name, call in CALLS.items():
        plain = value.clone().requires_grad_()
        call(plain).square().sum().backward()
        for modes in ([Watching], [Watching, Watching], [lambda: FlopCounterMode(display=False)]):
            mine = laid_out(value, mesh, on_one_axis(mesh, Shard(0)), requires_grad=True)
            entered = [mode().__enter__() for mode in modes]
            try:
                result = call(mine)
                result.square().sum().backward()
            finally:
                for mode in reversed(entered):
                    mode.__exit__(None, None, None)
            same(result, call(value), name)
            same(mine.grad, plain.grad, name)


def written_views(t, w):
    """Views and writes into them."""
    product = (t @ w).softmax(-1)
    rows, turned = product[1:3], product.t()
    rows.mul_(2)
    turned.add_(1)
    product[0] = 1
    return product, rows, turned, product.reshape(-1)


def planned_in_inference_mode(mesh):
    """Tensors of inference mode know no bases and may not meet a graph, but plans outlive the mode."""
    value, weight = x(5, 4), x(4, 3, seed=1)
    padded = lambda t: torch.nn.functional.pad(t[None], (1, 2), mode="reflect")[0] @ t.new_ones(7, 2)  # noqa: E731
    leaf = value.clone().requires_grad_()
    padded(leaf).sin().sum().backward()
    for places in layouts(mesh, value):
        clear_caches()
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            with mode():
                mine = laid_out(value, mesh, places), laid_out(weight, mesh, on_one_axis(mesh, Shard(0)))
                for got, want in zip(written_views(*mine), written_views(value, weight), strict=True):
                    same(got, want, f"{mode.__name__} {places}")
                same(padded(mine[0]), padded(value), f"{mode.__name__} {places}")
                filled = mine[0].clone().normal_()
                assert filled.is_inference() == torch.is_inference_mode_enabled()
        mine = laid_out(value, mesh, places, requires_grad=True)
        padded(mine).sin().sum().backward()
        same(mine.grad, leaf.grad, places)


def default_dtypes(mesh):
    """What integers become in a division follows the default dtype of the moment."""
    value = torch.arange(10).reshape(5, 2)
    calls = (lambda t: t / 2, lambda t: t * 1.5, torch.sin, lambda t: (t / 3).softmax(0), lambda t: t.logsumexp(0))
    try:
        for call in (*calls, lambda t: (t / 1).std(0), lambda t: torch.true_divide(t > 1, t + 1)):
            for dtype in (torch.float32, torch.float64, torch.float32):
                torch.set_default_dtype(dtype)
                for dim in (0, 1):
                    same(call(laid_out(value, mesh, on_one_axis(mesh, Shard(dim)))), call(value), dtype, 1e-6)
    finally:
        torch.set_default_dtype(torch.float32)


CHECKS = [watched, planned_in_inference_mode, default_dtypes]
test_simulated, test_processes = checked_on(__name__, CHECKS)
