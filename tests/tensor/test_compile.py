"""torch.compile on distributed tensors: every op is a graph break, and the answer is the eager one."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
{before}
import torch
import shardwise
from shardwise import Shard, distribute_tensor, simulate

assert ("torch._dynamo" in sys.modules) == {loaded}
whole = torch.randn(5, 4, dtype=torch.float64)
x = distribute_tensor(whole, simulate(3), [Shard(0)]).requires_grad_()
program = lambda t: (t.sin() * 2 + t[1:].sum(0)).sum()
for backend in ("eager", "aot_eager"):
    compiled = torch.compile(program, backend=backend)
    for _ in range(2):
        y = compiled(x)
        (grad,) = torch.autograd.grad(y, [x])
        plain = whole.clone().requires_grad_()
        want = program(plain)
        torch.testing.assert_close(y.full_tensor(), want)
        torch.testing.assert_close(grad.full_tensor(), torch.autograd.grad(want, [plain])[0])
print("equal")
"""


@pytest.mark.parametrize(
    ("before", "loaded"), [("", False), ("import torch._dynamo", True)], ids=["dynamo later", "dynamo first"]
)
def test_compiled_equals_eager(before, loaded):
    program = PROGRAM.format(before=before, loaded=loaded)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "equal", done.stderr
