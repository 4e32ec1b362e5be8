"""Under a dispatch mode of torch, which sees aten ops before the tensors do, answers and gradients stay what they are."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from shardwise import Shard
from tests.tensor.common import checked_on, laid_out, on_one_axis, same, x

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


test_simulated, test_processes = checked_on(__name__, [watched])
CHECKS = [watched]
