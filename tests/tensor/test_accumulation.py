"""Several backward calls add up in `.grad`, also where the ranks of a simulated mesh are handed one gradient."""

from tests.tensor.common import checked_on, laid_out, layouts, same, x

VALUE = x(5, 4)
FUNCTIONS = {
    "softmax": lambda t: t.softmax(-1).pow(2).sum(),
    "view": lambda t: t.reshape(-1).exp().sum(),
    "transposed": lambda t: (t.T.unsqueeze(0) * 2).tanh().sum(),
    "whole": lambda t: t.full_tensor().pow(3).sum() if hasattr(t, "full_tensor") else t.pow(3).sum(),
}


def adds_up(mesh):
    for places in layouts(mesh, VALUE):
        for name, function in FUNCTIONS.items():
            plain, leaf = VALUE.clone().requires_grad_(), laid_out(VALUE, mesh, places, requires_grad=True)
            for _ in range(3):
                function(plain).backward()
                function(leaf).backward()
            same(leaf.grad, plain.grad, f"{name} {places}")


CHECKS = [adds_up]
test_simulated, test_processes = checked_on(__name__, CHECKS)
