"""Pending greatest and least values: they stay pending through ops that keep the order of numbers, and only there."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Partial, RankTensor, Replicate, Shard, debug, simulate

INF, NAN = float("inf"), float("nan")
VALUES = [-INF, INF, NAN, 0.0, -0.0, 1.0, -1.0, 0.3, -0.3, 1e-30, 89.0, -89.0, 800.0, 7.5, -20.0, 3e38]
ODD = torch.tensor(VALUES)
FIRST, SECOND = (part.contiguous() for part in torch.meshgrid(ODD, ODD, indexing="ij"))  # every pair
REDUCED = {"max": torch.maximum, "min": torch.minimum}
TURNED = {"max": "min", "min": "max"}
UP = {
    "relu": F.relu,
    "relu6": F.relu6,
    "exp": torch.exp,
    "expm1": lambda x: x.expm1(),
    "exp2": torch.exp2,
    "tanh": torch.tanh,
    "sigmoid": lambda x: x.sigmoid(),
    "expit": torch.special.expit,
    "logsigmoid": F.logsigmoid,
    "erf": torch.erf,
    "atan": torch.arctan,
    "asinh": torch.asinh,
    "sinh": torch.sinh,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.fix,
    "rad2deg": torch.rad2deg,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "selu": F.selu,
    "threshold": lambda x: F.threshold(x, 0.5, 0.5),
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp, tensors": lambda x: torch.clamp(x, min=torch.tensor(0.1)),
    "clamp_max": lambda x: x.clamp_max(3.0),
    "+ number": lambda x: x + 1.5,
    "number +": lambda x: 2 + x,
    "- number": lambda x: x - 3,
    "* number": lambda x: x * 0.25,
    "number *": lambda x: 3 * x,
    "/ number": lambda x: x / 8,
    "cast up": lambda x: x.double(),
    "cast down": lambda x: x.to(torch.bfloat16),
    "in place": lambda x: x.clone().add_(1).relu_().mul_(2),
    "maximum": lambda x: torch.maximum(x, torch.tensor(0.2)),
    "maximum, other first": lambda x: torch.maximum(torch.tensor(0.2), x),
    "minimum": lambda x: torch.min(x, torch.tensor(0.2)),
    "positive": lambda x: +x,
    "rows": lambda x: x[3:].t().reshape(-1),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x * 2]),
}
DOWN = {
    "neg": lambda x: -x,
    "erfc": torch.erfc,
    "number -": lambda x: 1 - x,
    "rsub": lambda x: torch.rsub(x, 2.0),
    "* negative": lambda x: x * -2.0,
    "/ negative": lambda x: x / -3,
}
FINISHED = {  # NaN of a number, a number of NaN, no order, or numbers for which there is none
    "sqrt": torch.sqrt,
    "log": torch.log,
    "acos": torch.acos,
    "sign": torch.sign,
    "sgn": torch.sgn,
    "nan_to_num": torch.nan_to_num,
    "softsign": F.softsign,
    "abs": torch.abs,
    "square": torch.square,
    "gelu": F.gelu,
    "isnan": torch.isnan,
    "> number": lambda x: x > 0.1,
    "+ inf": lambda x: x + INF,
    "* inf": lambda x: x * INF,
    "* 0": lambda x: x * 0.0,
    "* nan": lambda x: x * NAN,
    "/ 0": lambda x: x / 0.0,
    "/ tiny": lambda x: x / 1e-45,
    "number /": lambda x: 1 / x,
    "// number": lambda x: x.div(2, rounding_mode="floor"),
    "+ tensor": lambda x: x + torch.tensor(INF),
    "fmax": lambda x: torch.fmax(x, torch.tensor(0.2)),
    "flat leaky_relu": lambda x: F.leaky_relu(x, 0.0),
    "threshold upward": lambda x: F.threshold(x, 0.5, 2.0),
    "round to decimals": lambda x: torch.round(x, decimals=400),
    "cast to int": lambda x: x.nan_to_num(0, 9, -9).to(torch.int32),
    "itself": lambda x: x + x,
}


def pending(kind, mesh=None, first=FIRST, second=SECOND):
    mesh = simulate(2) if mesh is None else mesh
    return DTensor.from_local(RankTensor([first.clone(), second.clone()]), mesh, [Partial(kind)])


def check(name, func, kind, left):
    """`func` of what is pending is right, and leaves `left` pending (None: nothing)."""
    want = func(REDUCED[kind](FIRST, SECOND))
    with debug.ledger() as ledger:
        got = func(pending(kind))
        moves = len(ledger)
    assert got.placements == (Replicate() if left is None else Partial(left),), f"{name}: {got.placements}"
    assert (moves == 0) == (left is not None), f"{name}: {list(ledger)}"
    torch.testing.assert_close(got.full_tensor(), want, equal_nan=True, msg=lambda m: f"{name} of a {kind}: {m}")


@pytest.mark.parametrize("kind", ["max", "min"])
def test_what_keeps_the_order_leaves_extremes_pending(kind):
    for name, func in UP.items():
        check(name, func, kind, kind)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_what_turns_the_order_around_leaves_the_other_extreme(kind):
    for name, func in DOWN.items():
        check(name, func, kind, TURNED[kind])


@pytest.mark.parametrize("kind", ["max", "min"])
def test_what_does_neither_takes_the_finished_value(kind):
    for name, func in FINISHED.items():
        check(name, func, kind, None)


def test_one_plan_serves_factors_of_both_signs():
    x = pending("max")
    assert [(x * by).placements[0].reduce_op for by in (2.5, -2.5, 0.5)] == ["max", "min", "max"]


def test_integers_wrap_around_so_they_are_finished():
    first, second = torch.tensor([2**62, 1, -(2**63)]), torch.tensor([1, 2**62, 3])
    for func in (lambda x: x * 2, lambda x: x + 2**62, lambda x: -x, lambda x: x.to(torch.int8)):
        got = func(pending("max", None, first, second))
        assert got.placements == (Replicate(),)
        assert torch.equal(got.full_tensor(), func(torch.maximum(first, second)))
    got = pending("max", None, first, second).relu().clamp(max=5).float()
    assert got.placements == (Partial("max"),)
    assert torch.equal(got.full_tensor(), torch.tensor([5.0, 5.0, 3.0]))


@pytest.mark.parametrize("kind", ["max", "min"])
def test_extremes_of_extremes(kind):
    """The greatest along a dim of greatest values stays pending; that of least values does not."""
    along, other = (torch.amax, torch.amin) if kind == "max" else (torch.amin, torch.amax)
    whole = REDUCED[kind](FIRST, SECOND)
    for func, stays in ((along, True), (other, False)):
        got = func(pending(kind)[3:, 3:], 1, keepdim=True)
        assert got.placements[0].is_partial() == stays
        assert torch.equal(got.full_tensor(), func(whole[3:, 3:], 1, keepdim=True))
    got = pending(kind)[3:, 3:].max()
    assert got.placements[0].is_partial() == (kind == "max")
    assert got.item() == whole[3:, 3:].max().item()


@pytest.mark.parametrize("kind", ["max", "min"])
def test_two_pending_extremes_meet(kind):
    mesh = simulate(2)
    x, y = pending(kind, mesh), pending(kind, mesh, FIRST.flip(0), SECOND.flip(1))
    a, b = REDUCED[kind](FIRST, SECOND), REDUCED[kind](FIRST.flip(0), SECOND.flip(1))
    for func, same in ((torch.maximum, kind == "max"), (torch.minimum, kind == "min")):
        got = func(x, y)
        assert got.placements[0].is_partial() == same
        torch.testing.assert_close(got.full_tensor(), func(a, b), equal_nan=True)


def test_a_cut_beside_what_is_pending_stays():
    mesh = simulate((2, 2))
    parts = [torch.tensor([float(n), -1.0]) for n in (1, 5, 2, 3)]
    cut = DTensor.from_local(RankTensor(parts), mesh, [Shard(0), Partial("max")])
    got = cut.exp() * -1.0
    assert got.placements == (Shard(0), Partial("min"))
    torch.testing.assert_close(got.full_tensor(), -torch.tensor([5.0, -1.0, 3.0, -1.0]).exp())


GRADIENTS = {
    "clamp at its bound": (lambda x: x.clamp(min=0.0), [0.0, 2.0, -3.0], [-1.0, 2.0, -4.0]),
    "exp that rounds": (lambda x: x.exp(), [1e-9, 1.0, 2.0], [2e-9, 1.0, 3.0]),
    "relu": (lambda x: F.relu(x) * 3, [-1.0, 0.0, 2.0], [-2.0, 1.0, 2.0]),
    "sigmoid": (lambda x: x.sigmoid(), [30.0, 0.1, -0.5], [31.0, 0.1, 0.5]),
    "neg": (lambda x: -x, [1.0, 2.0, 2.0], [3.0, 2.0, 1.0]),
    "neg, neg, exp": (lambda x: x.neg().neg().exp(), [1.0, 2.0, 2.0], [3.0, 2.0, 1.0]),
    "cast": (lambda x: x.double() * 2, [1.0, 2.0, 2.0], [3.0, 2.0, 1.0]),
    "negative factor": (lambda x: x * -0.1, [1.0, 2.0, 2.0], [3.0, 2.0, 1.0]),
    "maximum": (lambda x: torch.maximum(x, torch.tensor(2.0)), [1.0, 2.0, 2.0], [3.0, 2.0, 1.0]),
    "amax": (lambda x: x.amax(), [1.0, 3.0, 2.0], [3.0, 3.0, 1.0]),
}


@pytest.mark.parametrize("kind", ["max", "min"])
def test_gradients_go_to_the_parts_that_are_the_extreme(kind):
    reduce = {"max": torch.amax, "min": torch.amin}[kind]
    for name, (func, *parts) in GRADIENTS.items():
        mesh = simulate(2)
        rows = torch.tensor(parts, requires_grad=True)
        want = func(reduce(rows, 0))
        (want * torch.arange(1.0, 1 + want.numel())).sum().backward()
        leaf = torch.tensor(parts)
        each = RankTensor([leaf[i].clone() for i in range(2)]).requires_grad_()
        got = func(DTensor.from_local(each, mesh, [Partial(kind)])).redistribute(placements=[Replicate()])
        torch.testing.assert_close(got.full_tensor().detach(), want.detach(), msg=lambda m, name=name: f"{name}: {m}")
        (got * torch.arange(1.0, 1 + want.numel())).sum().backward()
        torch.testing.assert_close(torch.stack(each.grad.ranks), rows.grad, msg=lambda m, name=name: f"{name}: {m}")
