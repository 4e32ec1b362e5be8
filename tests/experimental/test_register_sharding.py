"""Rules of the user's own: as lines and as strategies, for custom ops, torch's ops and Python functions."""

import contextlib
import io
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import wrap_torch_function

import shardwise
from shardwise import (
    LayoutError,
    Partial,
    Replicate,
    RuleError,
    Shard,
    debug,
    distribute_tensor,
    register_sharding,
    simulate,
    strict,
)
from shardwise.strategy import registry
from shardwise.testing import check_rule
from tests.values import seeded
from tests.workers import device_mesh, run_ranks

MESHES = [(3,), (2, 2), (2, 1, 3)]


@torch.library.custom_op("shardwise_test::scaled_mm", mutates_args=())
def scaled_mm(x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return scale * (x @ y)


@scaled_mm.register_fake
def _(x, y, scale=1.0):
    return x @ y


def save(ctx, inputs, output):
    x, y, ctx.scale = inputs
    ctx.save_for_backward(x, y)


def backward(ctx, grad):
    x, y = ctx.saved_tensors
    return ctx.scale * grad @ y.T, ctx.scale * x.T @ grad, None


scaled_mm.register_autograd(backward, setup_context=save)


@torch.library.custom_op("shardwise_test::ranked", mutates_args=())
def ranked(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.argsort(dim).argsort(dim).to(x.dtype) * 0.5


@ranked.register_fake
def _(x, dim):
    return torch.empty_like(x)


@torch.library.custom_op("shardwise_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, 0)


@doubled.register_fake
def _(x):
    return x.new_empty(2 * x.shape[0], *x.shape[1:])


@wrap_torch_function(lambda x, y: (x, y))
def row_dots(x, y):
    return (x * y).sum(-1)


register_sharding(scaled_mm, "m k, k n -> m n", linear="each")
register_sharding(row_dots, "*b k, *b k -> *b", linear="each")


@register_sharding(torch.ops.shardwise_test.ranked.default)
def ranked_sharding(x, dim):
    assert isinstance(x.shape, torch.Size) and x.ndim == x.dim() == len(x.stride()) and x.tensor_meta.dtype == x.dtype
    assert (
        x.tensor_meta.stride == x.stride() and x.tensor_meta.shape == x.shape and x.mesh.size() == x.mesh.mesh.numel()
    )
    others = [d for d in range(x.ndim) if d != dim % x.ndim]
    return [([Replicate()], [Replicate(), None]), *(([Shard(d)], [Shard(d), None]) for d in others)]


@register_sharding(doubled)
def doubled_sharding(x):
    return [([Shard(0)], [Shard(0)]), ([Shard(-1)], [Shard(-1)]), ([Partial()], [Partial()])]


X, Y = seeded((5, 6), (6, 4))
CASES = {
    "custom op": (lambda x, y: scaled_mm(x, y, 0.5), [X, Y], True),
    "custom op, named": (lambda x, y: scaled_mm(y=y, scale=0.5, x=x), [X, Y], True),
    "custom op, by its overload": (lambda x, y: torch.ops.shardwise_test.scaled_mm.default(x, y), [X, Y], True),
    "custom op, by its packet": (lambda x, y: torch.ops.shardwise_test.scaled_mm(x, y), [X, Y], True),
    "Python function": (row_dots, seeded((4, 3, 5), (4, 3, 5)), True),
    "strategies": (lambda x: ranked(x, 1), seeded((5, 6)), False),
    "strategies, negative dim": (lambda x: ranked(x, -2), seeded((5, 6)), False),
    "strategies, sizes differ": (doubled, seeded((4, 3)), False),
    "strategies, uneven sizes differ": (doubled, seeded((5, 3)), False),
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_simulated(name, mesh):
    function, tensors, grad = CASES[name]
    check_rule(function, [tensors], [simulate(mesh)], limit=10, seed=len(name), grad=grad, tolerance=1e-10)


def on_gloo(rank, world_size):
    for function, tensors, grad in CASES.values():
        check_rule(function, [tensors], [device_mesh((world_size,))], limit=5, grad=grad, tolerance=1e-10)


def test_processes():
    run_ranks(on_gloo, 2)


def test_nothing_moves_where_the_rule_lets_it():
    mesh = simulate((2, 2))
    x = distribute_tensor(X, mesh, [Shard(0), Shard(1)])
    y = distribute_tensor(Y, mesh, [Replicate(), Shard(0)])
    with strict():
        assert scaled_mm(x, y).placements == (Shard(0), Partial())
        assert ranked(distribute_tensor(X, mesh, [Shard(0, sizes=(4, 1)), Replicate()]), 1).placements[0].dim == 0
        assert doubled(distribute_tensor(X[:4], mesh, [Shard(0), Replicate()])).placements == (Shard(0), Replicate())
        assert ranked(distribute_tensor(X, mesh, [Replicate()] * 2), 1).placements == (Replicate(), Replicate())


@pytest.fixture
def restored():
    """The rules as they were."""
    kept, hidden = dict(registry._user_rules), set(registry._hidden)
    yield
    registry._user_rules.clear()
    registry._user_rules.update(kept)
    registry._hidden.clear()
    registry._hidden.update(hidden)
    registry._by_function.clear()
    shardwise.clear_caches()


def test_the_example_of_torch(restored):
    """Softmax as in the documentation of torch's register_sharding; F.softmax comes to it, after it was planned too."""
    x = distribute_tensor(X, simulate(2), [Shard(0)])
    F.softmax(x, 1)
    asked = []

    @register_sharding(torch.ops.aten._softmax.default)
    def custom_softmax_sharding(x, dim, half_to_float):
        asked.append(dim)
        softmax_dim = dim if dim >= 0 else dim + x.ndim
        acceptable_shardings = [([Replicate()], [Replicate(), None, None])]
        for sharding_dim in range(x.ndim):
            if sharding_dim != softmax_dim:
                acceptable_shardings.append(([Shard(sharding_dim)], [Shard(sharding_dim), None, None]))
        return acceptable_shardings

    with strict():
        torch.testing.assert_close(F.softmax(x, 1).full_tensor(), F.softmax(X, 1))
    assert asked == [1]
    check_rule(lambda x: F.softmax(x, 0), [[X]], [simulate(3)], limit=8, tolerance=1e-10)


def test_several_ops(restored):
    @register_sharding([torch.ops.aten.sinh.default, torch.ops.aten.cosh.default])
    def replicated_only(x):
        return [([Replicate()], [Replicate()])]

    x = distribute_tensor(X, simulate(2), [Shard(0)])
    with debug.ledger() as log:
        torch.sinh(x), torch.cosh(x)
    assert [entry.kind for entry in log] == ["all_gather"] * 2


def test_reduction_of_a_line(restored):
    @torch.library.custom_op("shardwise_test::row_max", mutates_args=())
    def row_max(x: torch.Tensor) -> torch.Tensor:
        return x.amax(1)

    row_max.register_fake(lambda x: x.new_empty(x.shape[0]))
    register_sharding(row_max, "n k -> n", reduce="max")
    x = distribute_tensor(X, simulate(2), [Shard(1)])
    assert row_max(x).placements == (Partial("max"),)
    assert torch.equal(row_max(x).full_tensor(), X.amax(1))


def test_second_registration(restored):
    with pytest.raises(RuleError, match="has a rule already, registered by you; pass replace=True"):
        register_sharding(scaled_mm, "m k, k n -> m n")
    x = distribute_tensor(X, simulate(2), [Shard(0)])
    y = distribute_tensor(Y, simulate(2), [Replicate()])
    assert scaled_mm(x, y).placements == (Shard(0),)
    register_sharding(scaled_mm, "m! k, k n -> m! n", linear="each", replace=True)
    assert scaled_mm(x, y).placements == (Replicate(),)
    register_sharding(scaled_mm)(lambda *_: [([Shard(0)], [Shard(0), Replicate(), None]), ([Replicate()], [Replicate(), Replicate(), None])])
    assert scaled_mm(x, y).placements == (Shard(0),)  # a decorated function takes its place, as in torch


@torch.library.custom_op("shardwise_test::accumulate", mutates_args={"total"})
def accumulate(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    total.add_(x)
    return x * 2


accumulate.register_fake(lambda total, x: torch.empty_like(x))
PLACES = [[Shard(0)], [Shard(1)], [Replicate()], [Shard(0, sizes=(0, 4, 1))], [Partial()]]


@pytest.mark.parametrize("by_line", [True, False])
def test_an_op_that_writes(by_line):
    """Into an argument in any layout; what it returns comes back as well."""
    if by_line:
        register_sharding(accumulate, "a b, a b -> a b, a b", replace=True)
    else:

        @register_sharding(accumulate, replace=True)
        def strategies(total, x):
            return [((Shard(d),), (Shard(d), Shard(d))) for d in range(total.ndim)]

    mesh, value, more = simulate(3), torch.arange(20.0).reshape(5, 4), torch.arange(20.0).reshape(5, 4) / 7
    for here, there in itertools.product(PLACES, PLACES):
        total = distribute_tensor(value, mesh, here)
        memory = [part.data_ptr() for part in total.to_local().ranks]
        twice = accumulate(total, distribute_tensor(more, mesh, there))
        torch.testing.assert_close(total.full_tensor(), value + more)
        torch.testing.assert_close(twice.full_tensor(), more * 2)
        assert total.placements == distribute_tensor(value, mesh, here).placements
        assert memory == [part.data_ptr() for part in total.to_local().ranks]
    with debug.ledger() as log:
        accumulate(*(distribute_tensor(v, mesh, [Shard(0)]) for v in (value, more)))
    assert not list(log)
    plain = value.clone()  # counts as replicated
    accumulate(plain, distribute_tensor(more, mesh, [Shard(0)]))
    torch.testing.assert_close(plain, value + more)


@torch.library.custom_op("shardwise_test::forget", mutates_args={"x"})
def forget(x: torch.Tensor) -> None:
    x.zero_()


forget.register_fake(lambda x: None)


def test_an_op_that_returns_nothing():
    register_sharding(forget, "a b -> a b", replace=True)
    x = distribute_tensor(torch.ones(5, 4), simulate((2, 2)), [Shard(0), Shard(1)])
    assert forget(x) is None and torch.equal(x.full_tensor(), torch.zeros(5, 4))


def test_an_op_of_torchs_that_writes(restored):
    """`x.lerp_(...)` and `torch.lerp(..., out=out)`."""
    seen = []
    for op in (torch.ops.aten.lerp_.Scalar, torch.ops.aten.lerp.Scalar_out):

        @register_sharding(op)
        def strategies(x, end, weight, out=None, op=op):
            seen.append(op)
            ins = (Shard(0), Shard(0), None) + ((Shard(0),) if out is not None else ())
            return [((Shard(0),), ins)]

    mesh, a, b = simulate(2), torch.arange(10.0).reshape(5, 2), torch.ones(5, 2)
    x, end = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Shard(1)])
    out = distribute_tensor(torch.zeros(5, 2), mesh, [Replicate()])
    assert torch.ops.aten.lerp.Scalar_out(x, end, 0.25, out=out) is out
    torch.testing.assert_close(out.full_tensor(), torch.lerp(a, b, 0.25))
    assert x.lerp_(end, 0.25) is x and set(seen) == {torch.ops.aten.lerp_.Scalar, torch.ops.aten.lerp.Scalar_out}
    torch.testing.assert_close(x.full_tensor(), torch.lerp(a, b, 0.25))
    with pytest.raises(LayoutError, match="its result has shape"):
        torch.ops.aten.lerp.Scalar_out(x, end, 0.25, out=distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()]))


@pytest.mark.parametrize(
    "register, error",
    [
        (lambda: register_sharding(3, "a -> a"), r"op = 3 \(int\): expected an op of torch.ops"),
        (lambda: register_sharding(doubled, "a b"), "has no '->'"),
        (lambda: register_sharding(doubled, "a b, c -> a b"), "has 2 input terms, but the op has 1"),
        (lambda: register_sharding(doubled, "a b -> a, b"), "has 2 output terms, but the op has 1"),
        (lambda: register_sharding(doubled, "a a -> a"), "has 'a' twice in one term.*write 'a!'"),
        (lambda: register_sharding(doubled, "a b -> a b", linear="all"), "linear = 'all': expected 'none', 'joint' or"),
        (lambda: register_sharding(accumulate, "a, a -> a"), "has 1 output terms, but the op has 2"),
    ],
)
def test_bad_registration(register, error):
    with pytest.raises(RuleError, match=error):
        register()


@pytest.mark.parametrize(
    "strategies, error",
    [
        ([[Shard(0)]], "strategy 0, .* expected a pair"),
        ([([Shard(0)], [Shard(0), Replicate()])], "2 input placements for 1 tensors; give one for each, None"),
        ([([Shard(0)], [Shard(2)])], "input 0: Shard\\(dim=2\\) of a tensor with 2 dims"),
        ([([Shard(0)] * 2, [Shard(0)])], "has 2 output placements, the op has 1 results"),
        ([([Replicate()], [Shard(0)])], "promises results of shapes .* the op makes .* Correct the rule"),
    ],
)
def test_bad_strategies(strategies, error, restored):
    register_sharding(doubled, replace=True)(lambda x: strategies)
    with pytest.raises(RuleError, match=error):
        doubled(distribute_tensor(X, simulate(2), [Shard(0)]))


def test_line_that_promises_too_much(restored):
    register_sharding(doubled, "n k -> n k", replace=True)
    with pytest.raises(RuleError, match="the op makes .* Correct the rule"):
        doubled(distribute_tensor(X, simulate(2), [Shard(0)]))
    with pytest.raises(RuleError, match=r"tensors of shapes \[\(6,\)\] do not fit its line 'n k -> n k'"):
        doubled(distribute_tensor(torch.ones(6), simulate(2), [Shard(0)]))


def test_names():
    assert shardwise.experimental.register_sharding is register_sharding


def test_the_page(restored):
    """The examples of docs/extending.md run and print what the page shows."""
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    out, names = io.StringIO(), {}
    with contextlib.redirect_stdout(out):
        for block in re.findall(r"```python\n(.*?)```", text, re.S):
            exec(compile(block, "extending.md", "exec"), names)
    shown = "".join(re.findall(r"```\n(.*?)```", re.sub(r"```python\n.*?```", "", text, flags=re.S), re.S))
    assert out.getvalue().splitlines() == shown.splitlines()
