"""torch.autocast on distributed tensors: the dtypes that plain torch gives, and its numbers within their rounding. A
pending sum is finished before it is rounded, and the parts of an algorithm are not cast for themselves."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Partial, Shard, debug, distribute_tensor, random, simulate
from tests.tensor.common import R, checked_on, is_simulated, laid_out, layouts, on_one_axis, whole, x

CALLS = {
    "linear": (lambda a, w: F.linear(a, w), (5, 4), (3, 4)),
    "matmul": (lambda a, b: a @ b, (5, 4), (4, 3)),
    "addmv, which is not cast": (lambda a, v: torch.addmv(v.sum(), a, v), (5, 4), (4,)),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), (5, 4), (3, 4)),
    "conv1d": (lambda a, w: F.conv1d(a, w, padding=1), (2, 3, 5), (4, 3, 3)),
    "conv_transpose1d": (lambda a, w: F.conv_transpose1d(a, w, stride=2), (2, 3, 4), (3, 2, 3)),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k), (2, 5, 4), (2, 6, 4)),
    "layer_norm": (lambda a, w: F.layer_norm(a @ w, (3,)), (5, 4), (4, 3)),
    "softmax": (lambda a, w: (a @ w).softmax(0), (5, 4), (4, 3)),
    "mse_loss": (lambda a, w: F.mse_loss(a @ w, torch.ones(5, 3)), (5, 4), (4, 3)),
    "cross_entropy": (lambda a, w: F.cross_entropy(a @ w, torch.tensor([0, 2, 1, 0, 2])), (5, 4), (4, 3)),
    "cat": (lambda a, w: torch.cat([a @ w, a[:, :3]]), (5, 4), (4, 3)),
    "prod": (lambda a, w: ((a @ w) / 9 + 1).prod(0), (5, 4), (4, 3)),
    "pinverse": (lambda a, w: torch.pinverse(a) @ w, (5, 4), (5, 3)),
    "gru_cell": (lambda a, w: torch.gru_cell(a, a[:, :3], w, w[:, :3]), (5, 4), (9, 4)),
    "out=": (lambda a, w: torch.mm(a.detach(), w.detach(), out=torch.zeros_like(a.detach()[:, :1] * w.detach()[0])),
             (5, 4), (4, 3)),
    "off inside": (lambda a, w: (_not_cast(a @ w), a @ w), (5, 4), (4, 3)),
}  # fmt: skip


def _not_cast(value):
    with torch.autocast("cpu", enabled=False):
        return value.float() @ torch.eye(3)


def close(got, want, where):
    if not isinstance(want, torch.Tensor):
        for g, w in zip(got, want, strict=True):
            close(g, w, where)
        return
    assert got.dtype == want.dtype, f"{got.dtype} instead of {want.dtype}: {where}"
    scale = max(1.0, want.detach().abs().max().item())
    full = whole(got)
    assert full.dtype == want.dtype, where
    torch.testing.assert_close(full, want.detach(), rtol=0.05, atol=0.05 * scale, msg=lambda m: f"{m}\n{where}")


def cast(call, tensors, **how):
    with torch.autocast("cpu", dtype=torch.bfloat16, **how):
        result = call(*tensors)
    roots = [r for r in (result if isinstance(result, tuple) else (result,)) if r.requires_grad]
    return result, torch.autograd.grad([r.float().sin().sum() for r in roots], tensors) if roots else ()


def as_on_one_device(mesh):
    for name, (call, *shapes) in CALLS.items():
        values = [x(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(shapes)]
        want = cast(call, [v.clone().requires_grad_() for v in values])
        ways = [layouts(mesh, v) for v in values]
        for i, places in list(enumerate(ways[0]))[:: 1 if is_simulated(mesh) else 5]:
            chosen = [places, ways[1][(3 * i + 1) % len(ways[1])]]
            mine = [laid_out(v, mesh, p, requires_grad=True) for v, p in zip(values, chosen, strict=True)]
            close(cast(call, mine, cache_enabled=bool(i % 2)), want, f"{name} {chosen}")


def of_bfloat16(mesh):
    """What autocast does in float32, given less."""
    value = x(6, 4, dtype=torch.bfloat16)
    for call in (lambda t: F.mse_loss(t, torch.ones_like(t)), lambda t: t.prod(0), lambda t: torch.linalg.svdvals(t)):
        want = cast(call, [value.clone().requires_grad_()])
        for dim in (0, 1):
            mine = laid_out(value, mesh, on_one_axis(mesh, Shard(dim)), requires_grad=True)
            close(cast(call, [mine]), want, f"{dim}")


def rounded_inside(mesh):
    """Products are rounded inside of a bilinear, on every layout to the same numbers."""
    values = [x(4, 3, seed=0, dtype=torch.float32), x(2, 3, 3, seed=1, dtype=torch.float32)]
    want = cast(lambda a, w: F.bilinear(a, a, w), [v.clone().requires_grad_() for v in values])[0]
    for dims in ((0, None), (1, None), (None, 0), (None, 1), (None, 2)):
        places = [R if d is None else Shard(d) for d in dims]
        mine = [laid_out(v, mesh, on_one_axis(mesh, p), requires_grad=True) for v, p in zip(values, places, strict=True)]
        got = cast(lambda a, w: F.bilinear(a, a, w), mine)[0]
        torch.testing.assert_close(whole(got), want.detach(), rtol=1e-5, atol=1e-5)


CHECKS = [as_on_one_device, of_bfloat16, rounded_inside]
test_simulated, test_processes = checked_on(__name__, CHECKS, simulated=[(4,), (2, 3)], real=[(2,)])


@pytest.mark.parametrize("draw", [lambda t: F.fractional_max_pool2d(t, 2, output_size=2), lambda t: torch.svd_lowrank(t)[1]])
def test_looking_for_casts_draws_no_random_numbers(draw):
    value = x(2, 3, 5, 5, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(3)
        want = draw(value)
        mine = distribute_tensor(value, simulate((2,)), [R])
        with random.use("torch"):
            torch.manual_seed(3)
            got = draw(mine)
    torch.testing.assert_close(whole(got), want)


def test_large_parts_of_a_small_sum():
    """Parts are not rounded before they meet: rounded, these would be 0 or 16."""
    mesh = simulate((2,))
    ones = distribute_tensor(torch.ones(1, 1), mesh, [R])
    parts = distribute_tensor(torch.tensor([[3001.0], [-3000.0]]), mesh, [Shard(0)])
    pending = DTensor.from_local(parts.to_local(), mesh, [Partial()])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for result in (pending @ ones, F.linear(pending, ones)):
            assert result.dtype == torch.bfloat16 and result.item() == 1.0


def test_what_ranks_cast_themselves_is_not_moved_more():
    """A linear of a cut weight on a whole input: nothing moves forward, and the input's gradient once for all uses."""
    mesh = simulate((2,))
    inputs = distribute_tensor(torch.randn(4, 6), mesh, [R]).requires_grad_()
    weights = [distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)]).requires_grad_() for _ in range(3)]
    with debug.ledger() as log:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outs = [F.linear(inputs, w) for w in weights]
        torch.autograd.backward([out.float().sum() for out in outs])
    assert [(e.op, e.backward) for e in log if e.kind == "all_reduce" and e.bytes > 100] == [("linear", True)]


@pytest.mark.parametrize("bad", [lambda a: F.linear(a, a[:, :3]), lambda a: torch.cat([a, a[:, 1:]])])
def test_errors_are_torchs_own(bad):
    value = torch.randn(5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError) as plain:
            bad(value)
        with pytest.raises(type(plain.value)):
            bad(distribute_tensor(value, simulate((2,)), [Shard(0)]))
