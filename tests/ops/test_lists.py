"""Ops on lists of tensors: every position as if alone, whatever the others are laid out like; thousands at linear cost."""

import random
import sys

import pytest
import torch
from torch import nn
from torch.testing._internal import common_methods_invocations as catalogue

import shardwise
from shardwise import Replicate, Shard, clear_caches, debug, distribute_tensor, simulate, strict
from shardwise.testing import check_rule, spread_out
from tests.values import layouts_of, seeded
from tests.workers import device_mesh, run_ranks

MESHES = [(3,), (2, 2), (2, 1, 3)]
SHAPES = [(4, 5), (7,), (4, 5), (1, 2, 6), (), (2, 3)]  # uneven, fewer rows than ranks, 0-d


def some(count=6, seed=0, low=None, dtype=torch.float64):
    tensors = seeded(*SHAPES[:count], seed=seed, dtype=dtype)
    return [t if low is None else t.abs() + low for t in tensors]


UNARY = [info.name.removeprefix("_foreach_") for info in catalogue.foreach_unary_op_db if hasattr(torch, info.name)]
DOMAIN = {"acos": (-0.9, 0.9), "asin": (-0.9, 0.9), "log": (0.1, 3), "log10": (0.1, 3), "log2": (0.1, 3), "sqrt": (0.1, 3), "rsqrt": (0.1, 3), "lgamma": (0.1, 3), "reciprocal": (0.1, 3), "log1p": (0.1, 3)}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name, mesh):
    low, high = DOMAIN.get(name, (-3, 3))
    tensors = [torch.sigmoid(t) * (high - low) + low for t in some(seed=len(name))]
    check_rule(
        lambda *xs: getattr(torch, f"_foreach_{name}")(list(xs)),
        [tensors],
        [simulate(mesh)],
        limit=4,
        seed=len(name),
        tolerance=1e-10,
    )


def f(name):
    return getattr(torch, f"_foreach_{name}")


a, b, c, pos = some(seed=1), some(seed=2), some(seed=3), some(seed=4, low=0.5)
N = len(a)
scalars = [0.5 * i - 1.2 for i in range(N)]
FORMS = {
    "add": (lambda *t: f("add")(t[:N], t[N:]), a + b),
    "add, alpha": (lambda *t: f("add")(t[:N], t[N:], alpha=2.5), a + b),
    "add, number": (lambda *t: f("add")(t, 1.5), a),
    "add, numbers": (lambda *t: f("add")(t, scalars), a),
    "add, tensor": (lambda *t: f("add")(t, torch.tensor(2.0, dtype=torch.float64)), a),
    "sub": (lambda *t: f("sub")(t[:N], t[N:], alpha=0.5), a + b),
    "sub, number": (lambda *t: f("sub")(t, 1.5), a),
    "mul": (lambda *t: f("mul")(t[:N], t[N:]), a + b),
    "mul, number": (lambda *t: f("mul")(t, 1.5), a),
    "mul, tensor": (lambda *t: f("mul")(t, torch.tensor(2.0, dtype=torch.float64)), a),
    "div": (lambda *t: f("div")(t[:N], t[N:]), a + pos),
    "div, numbers": (lambda *t: f("div")(t, scalars), a),
    "div, tensor": (lambda *t: f("div")(t, torch.tensor(2.0, dtype=torch.float64)), a),
    "clamp_min": (lambda *t: f("clamp_min")(t[:N], t[N:]), a + b),
    "clamp_max, number": (lambda *t: f("clamp_max")(t, 0.3), a),
    "maximum": (lambda *t: f("maximum")(t[:N], t[N:]), a + b),
    "minimum, numbers": (lambda *t: f("minimum")(t, scalars), a),
    "pow": (lambda *t: f("pow")(t[:N], t[N:]), pos + a),
    "pow, number": (lambda *t: f("pow")(t, 3), a),
    "pow of a number": (lambda *t: f("pow")(2.0, t), a),
    "lerp": (lambda *t: f("lerp")(t[:N], t[N : 2 * N], t[2 * N :]), a + b + c),
    "lerp, number": (lambda *t: f("lerp")(t[:N], t[N:], 0.3), a + b),
    "lerp, named": (lambda *t: f("lerp")(t[:N], tensors1=t[N:], weight=0.3), a + b),
    "add, named": (lambda *t: f("add")(t[:N], other=t[N:]), a + b),
    "add, named numbers": (lambda *t: f("add")(t, scalars=scalars), a),
    "lerp, numbers": (lambda *t: f("lerp")(t[:N], t[N:], scalars), a + b),
    "addcmul": (lambda *t: f("addcmul")(t[:N], t[N : 2 * N], t[2 * N :], 0.7), a + b + c),
    "addcmul, tensor": (lambda *t: f("addcmul")(t[:N], t[N : 2 * N], t[2 * N :], torch.tensor(scalars, dtype=torch.float64)), a + b + c),
    "addcdiv, numbers": (lambda *t: f("addcdiv")(t[:N], t[N : 2 * N], t[2 * N :], scalars), a + b + pos),
    "mm": (lambda *t: f("mm")(t[:3], t[3:]), seeded((4, 5), (3, 7), (2, 2), (5, 3), (7, 4), (2, 1))),
    "powsum": (lambda *t: [x * 1 for x in f("powsum")(t, 3)], a),
    "norm": (lambda *t: f("norm")(t), a),
    "norm, 1": (lambda *t: f("norm")(t, 1), a),
    "norm, 3.5": (lambda *t: f("norm")(t, 3.5), a),
    "norm, inf": (lambda *t: f("norm")(t, float("inf")), a),
    "max": (lambda *t: f("max")(t), a),
}  # fmt: skip
FORMS = {name: form for name, form in FORMS.items() if name != "mm" or hasattr(torch, "_foreach_mm")}  # new in torch 2.13


WITHOUT_GRAD = {"addcmul, tensor", "powsum", "addcdiv, numbers"}  # in torch 2.13


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_forms(name, mesh):
    function, tensors = FORMS[name]
    check_rule(
        function, [tensors], [simulate(mesh)], limit=5, seed=len(name), tolerance=1e-9, grad=name not in WITHOUT_GRAD
    )


ORDERS = [0, 0.5, 1, 2, 3.0, float("inf"), -1.5, -float("inf")]
KINDS = [(o, torch.float64) for o in ORDERS] + [(2, torch.float32), (1, torch.bfloat16), (2, torch.complex128)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("order, dtype", KINDS, ids=str)
def test_norms_without_grad(order, dtype, mesh):
    tensors = some(dtype=dtype, seed=7)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}.get(dtype, 1e-10)
    check_rule(lambda *t: f("norm")(t, order), [tensors], [simulate(mesh)], limit=4, grad=False, tolerance=tolerance)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    check_rule(
        lambda *t: f("norm")(t, order, dtype=wide),
        [tensors],
        [simulate(mesh)],
        limit=2,
        grad=False,
        tolerance=tolerance,
    )


def test_norms_do_not_overflow():
    x = torch.full((6,), 1e25)
    norms = f("norm")([distribute_tensor(x, simulate(3), [Shard(0)])])
    assert norms[0].full_tensor() == f("norm")([x])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bool], ids=str)
def test_max_without_grad(dtype):
    tensors = [(t * 40).to(dtype) for t in some(seed=9, low=0.1)]
    check_rule(lambda *t: f("max")(t), [tensors], [simulate(3)], limit=6, grad=False, partial=False, tolerance=1e-10)
    nan = [torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([-float("inf"), 2.0])]
    check_rule(lambda *t: f("max")(t), [nan], [simulate(3)], limit=6, grad=False, partial=False, tolerance=1e-10)


@pytest.mark.parametrize("function, error", [(lambda t: f("norm")(t, float("inf")), "infinity norm"), (f("max"), "maximum of an empty|max.*numel.. == 0|empty tensor")])  # fmt: skip
def test_nothing_has_no_extreme(function, error):
    x = distribute_tensor(torch.zeros(0, 3), simulate(2), [Shard(0)])
    with pytest.raises((RuntimeError, ValueError), match=error):
        function([x])


def test_one_exchange_for_all():
    mesh = simulate((2, 2))
    tensors = [distribute_tensor(x, mesh, [Shard(0), Replicate()]) for x in seeded(*[(4, 3)] * 20)]
    with torch.no_grad(), debug.ledger() as log:
        f("norm")(tensors)
    assert len(log) == 1 and log.total_bytes == 4 * 20 * 8  # of four ranks


# -- in place ----------------------------------------------------------------------------------------------
IN_PLACE = {
    "add_": lambda xs, ys, s: torch._foreach_add_(xs, ys, alpha=2),
    "add_, number": lambda xs, ys, s: torch._foreach_add_(xs, 1.5),
    "mul_, tensor": lambda xs, ys, s: torch._foreach_mul_(xs, s),
    "mul_": lambda xs, ys, s: torch._foreach_mul_(xs, ys),
    "lerp_": lambda xs, ys, s: torch._foreach_lerp_(xs, ys, 0.25),
    "addcmul_": lambda xs, ys, s: torch._foreach_addcmul_(xs, ys, ys, value=0.5),
    "addcdiv_, tensor": lambda xs, ys, s: torch._foreach_addcdiv_(xs, ys, [y + 3 for y in ys], torch.arange(len(xs), dtype=torch.float64)),
    "copy_": lambda xs, ys, s: torch._foreach_copy_(xs, ys),
    "zero_": lambda xs, ys, s: torch._foreach_zero_(xs),
    "exp_": lambda xs, ys, s: torch._foreach_exp_(xs),
    "clamp_max_": lambda xs, ys, s: torch._foreach_clamp_max_(xs, ys),
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name, mesh):
    generator = random.Random(len(name))
    for attempt in range(4):
        xs, ys, scale = some(seed=attempt), some(seed=attempt + 5), torch.tensor(1.7, dtype=torch.float64)
        mine = [spread_out(t, simulate(mesh), layouts_of(t, mesh, generator), seed=attempt) for t in xs + ys]
        placed = [t.placements for t in mine]
        want = [t.clone() for t in xs]
        IN_PLACE[name](want, ys, scale)
        with torch.no_grad():
            IN_PLACE[name](mine[:N], mine[N:], scale)
        for got, plain, places in zip(mine[:N], want, placed, strict=False):
            assert got.placements == places
            torch.testing.assert_close(got.full_tensor(), plain)


# -- clipping, scaling, fused steps ------------------------------------------------------------------------
def grads_on(mesh, seed):
    """Parameters in mixed layouts with gradients laid out as autograd leaves them, and the same ones plain."""
    generator, ours, plain = random.Random(seed), [], []
    for value, grad in zip(some(5, seed=seed), some(5, seed=seed + 1), strict=True):
        places = layouts_of(value, shardwise.mesh.as_mesh(mesh).shape, generator, partial=False)
        plain.append(nn.Parameter(value.clone()))
        plain[-1].grad = grad.clone()
        ours.append(nn.Parameter(spread_out(value, mesh, places)))
        ours[-1].grad = spread_out(grad, mesh, places)
    return ours, plain


def check_clipping(mesh, seeds):
    for seed in seeds:
        for order in (1.0, 2.0, 3.5, float("inf")):
            ours, plain = grads_on(mesh, seed)
            want = nn.utils.clip_grad_norm_(plain, 0.7, order)
            torch.testing.assert_close(nn.utils.get_total_norm([p.grad for p in ours], order).full_tensor(), want)
            got = nn.utils.clip_grad_norm_(ours, 0.7, order, foreach=[None, True, False][seed % 3])
            torch.testing.assert_close(got.full_tensor(), want)
            for mine, theirs in zip(ours, plain, strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
        ours, plain = grads_on(mesh, seed)
        nn.utils.clip_grad_value_(plain, 0.4)
        nn.utils.clip_grad_value_(ours, 0.4)
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_clipping(mesh):
    check_clipping(simulate(mesh), range(3))


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_unscale(bad):
    mesh = simulate((3, 2))
    plain = some(4, dtype=torch.float32, seed=3)
    if bad is not None:
        plain[1][5] = bad
    placed = [[Shard(0), Replicate()], [Shard(0), Replicate()], [Replicate(), Shard(1)], [Replicate(), Shard(2)]]
    ours = [distribute_tensor(t, mesh, p) for t, p in zip(plain, placed, strict=True)]
    found, found_here, scale = torch.zeros(1), torch.zeros(1), torch.tensor([0.25])
    torch._amp_foreach_non_finite_check_and_unscale_(plain, found, scale)
    torch._amp_foreach_non_finite_check_and_unscale_(ours, found_here, scale)
    assert torch.equal(found, found_here)
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, equal_nan=True)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
def test_fused_steps(optimizer, mesh):
    ours, plain = grads_on(simulate(mesh), 4)
    steps = [optimizer(ps, lr=0.1, fused=True) for ps in (ours, plain)]
    for step in steps:
        step.step()
        step.step()
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


def test_fused_step_with_other_gradients():
    mesh = simulate(2)
    value, grad = seeded((4, 6), (4, 6))
    plain, ours = nn.Parameter(value.clone()), nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))
    state = [torch.zeros_like(value), torch.zeros_like(value)]
    placed = [distribute_tensor(s, mesh, [Shard(0)]) for s in state]
    rest = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    steps = [torch.ones(())], [torch.ones(())]
    with torch.no_grad():
        torch._fused_adamw_([plain], [grad], [state[0]], [state[1]], [], steps[0], **rest)
        there = distribute_tensor(grad, mesh, [Shard(1)])
        torch._fused_adamw_([ours], [there], [placed[0]], [placed[1]], [], steps[1], **rest)
    torch.testing.assert_close(ours.full_tensor(), plain)


# -- cat and stack -----------------------------------------------------------------------------------------
x, y, z = seeded((4, 3), (2, 3), (4, 3))
JOINED = {
    "cat": (lambda *t: torch.cat(t), [x, y, z]),
    "cat, axis=": (lambda *t: torch.cat(t, axis=1), [x, z]),
    "cat, dim=-1": (lambda *t: torch.cat(tensors=t, dim=-1), [x, z]),
    "cat with an empty 1-D tensor": (lambda *t: torch.cat([t[0], t[1].new_empty(0), t[1]]), [x, y]),
    "cat of kinds": (lambda *t: torch.cat([t[0], t[1].float()]), [x, y]),
    "concat of 1-D": (lambda *t: torch.concat(t), seeded((5,), (0,), (2,))),
    "stack": (lambda *t: torch.stack(t), [x, z]),
    "stack, 1": (lambda *t: torch.stack(t, 1), [x, z]),
    "stack, -1": (lambda *t: torch.stack(t, dim=-1), [x, z, x]),
    "stack of 0-d": (lambda *t: torch.stack(t), seeded((), (), ())),
    "hstack": (lambda *t: torch.hstack(t), [x, z]),
    "hstack of 1-D": (lambda *t: torch.hstack(t), seeded((5,), (2,))),
    "vstack": (lambda *t: torch.vstack(t), [x, y]),
    "dstack": (lambda *t: torch.dstack(t), [x, z]),
    "column_stack": (lambda *t: torch.column_stack(t), [x, *seeded((4,))]),
    "_chunk_cat": (lambda *t: torch._chunk_cat(t, 0, 3), [x, y]),
    "_chunk_cat, 1": (lambda *t: torch._chunk_cat(t, 1, 2), [x, z, *seeded((4, 2, 2))]),
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", JOINED)
def test_joined(name, mesh):
    function, tensors = JOINED[name]
    check_rule(
        function, [tensors], [simulate(mesh)], limit=8, seed=len(name), grad="_chunk_cat" not in name, tolerance=1e-10
    )


def test_nothing_moves_where_layouts_agree():
    mesh = simulate(3)
    xs = [distribute_tensor(t, mesh, [Shard(0)]) for t in seeded((4, 3), (7, 3))]
    with strict():
        torch.cat(xs)
        torch.cat(xs, axis=0)
        torch.cat([xs[0], xs[0].new_empty(0), xs[1]])
        torch.stack([xs[0], xs[0]], 1)
        f("mul")(xs, 2.0)
        f("add_")(xs, xs)


# -- many --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "function", [torch.stack, torch.cat, torch._foreach_norm, lambda t: torch._foreach_mul(t, 2.0)]
)
def test_first_call_is_linear_in_the_count(function):
    """Operands that all are cut in their own way are the worst case. Calls of functions are counted, not seconds."""
    mesh = simulate(2)
    value = torch.zeros(400, 2)

    def calls(count):
        tensors = [distribute_tensor(value, mesh, [Shard(0, sizes=(i, 400 - i))]) for i in range(count)]
        function(tensors[:2])
        clear_caches()
        made = 0

        def hear(frame, event, argument):
            nonlocal made
            made += event in ("call", "c_call")

        sys.setprofile(hear)
        try:
            function(tensors)
        finally:
            sys.setprofile(None)
        return made

    assert calls(320) < 1.2 * 4 * calls(80)


# -- processes ---------------------------------------------------------------------------------------------
def on_gloo(rank, world_size, shape):
    mesh = device_mesh(shape)
    for name in (name for name in ("mul", "lerp", "mm", "norm", "norm, 3.5", "max") if name in FORMS):
        function, tensors = FORMS[name]
        check_rule(function, [tensors], [mesh], limit=2, seed=3, tolerance=1e-9)
    check_rule(lambda *t: f("norm")(t, float("inf")), [a], [mesh], limit=2, grad=False, tolerance=1e-10)
    check_rule(lambda *t: f("max")(t), [a], [mesh], limit=2, grad=False, tolerance=1e-10)
    for name in ("cat", "cat with an empty 1-D tensor", "stack, 1"):
        function, tensors = JOINED[name]
        check_rule(function, [tensors], [mesh], limit=3, seed=1, tolerance=1e-10)
    check_clipping(mesh, range(2))


def test_processes():
    run_ranks(on_gloo, 2, (2,))


def test_lists_must_be_of_one_length():
    xs = [spread_out(t, simulate((3,)), [Replicate()]) for t in some(3)]
    calls = (
        lambda: torch._foreach_add(xs, xs[:1]),
        lambda: torch._foreach_mul_(xs[:1], xs),
        lambda: torch._foreach_div(xs, [2.0]),
    )
    for wrong in calls:
        with pytest.raises(RuntimeError, match="same number of"):
            wrong()


def test_overloads_that_return_nothing():
    xs = [spread_out(t, simulate((3,)), [Replicate()]) for t in some(2)]
    assert torch.ops.aten._foreach_neg_.default(xs) is None
    torch.testing.assert_close(xs[0].full_tensor(), -some(2)[0])


@pytest.mark.parametrize("scalars", [0.5, [0.5, 2.0]], ids=str)
def test_gradients_of_quotients_where_ranks_hold_nothing(scalars):
    values = [[t.abs() + 1 for t in seeded((3,), (2, 2), seed=seed)] for seed in range(3)]
    mesh, grads = simulate((4,)), []
    for place in (lambda t: t.clone(), lambda t: spread_out(t, mesh, [Shard(0)])):
        lists = [[place(t).requires_grad_() for t in some] for some in values]
        given = {"value": scalars} if isinstance(scalars, float) else {"scalars": scalars}
        sum(t.sin().sum() for t in torch._foreach_addcdiv(*lists, **given)).backward()
        grads.append([t.grad for some in lists for t in some])
    for want, got in zip(*grads, strict=True):
        torch.testing.assert_close(got.full_tensor(), want)
