"""Views and their copies, rolls, diagonals, triangles, parts put back, and the elementwise ops that are not in `cases`."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard, simulate, strict
from shardwise.debug import ledger
from shardwise.testing import check_rule, spread_out
from tests.random.common import as_torch_draws
from tests.values import compare, seeded
from tests.versions import since_213
from tests.workers import device_mesh, run_ranks

MESHES = [(3,), (2, 2), (2, 1, 3)]
A, SQUARE, CUBE, ROW, PAIRS = seeded((5, 8), (6, 6), (4, 5, 6), (5,), (4, 3, 2))
aten = torch.ops.aten

# these move nothing, however their operand is cut
STAY = {
    "copies": lambda a: (torch.alias_copy(a), torch.detach_copy(a.detach()), torch.transpose_copy(a, 0, 1)),
    "copies of shapes": lambda a: (torch.unsqueeze_copy(a, 1), torch.squeeze_copy(a), torch.permute_copy(a, (1, 0))),
    "copies of parts": lambda a: (torch.slice_copy(a, 0, 1, 4), torch.narrow_copy(a, 1, 2, 3), torch.t_copy(a)),
    "copies of splits": lambda a: (*torch.split_copy(a, 2), *torch.split_with_sizes_copy(a, [3, 0, a.shape[1] - 3], -1)),
    "expand_copy": lambda a: torch.expand_copy(a, (2, *a.shape)),
    "select_copy": lambda a: torch.select_copy(a, 0, 2),
    "T": lambda a: (a.T, a.unsqueeze(1).T, a.unsqueeze(0).mT),
    "roll": lambda a: a.roll(2, 0),
    "roll far": lambda a: a.roll((-3, 11), (1, 0)),
    "roll one dim twice": lambda a: a.roll((1, 2), (0, 0)),
    "rot90": lambda a: tuple(a.rot90(k, (1, 0)) for k in range(-2, 4)),
    "repeat": lambda a: a.repeat(2, 3),
    "repeat new dims": lambda a: a.repeat((2, 1, 2)),
    "tile": lambda a: a.tile(2),
    "repeat never": lambda a: a.repeat(0, 2),
    "diagonal": lambda a: a.diagonal(),
    "diagonal above": lambda a: a.diagonal(offset=2),
    "diagonal below": lambda a: torch.linalg.diagonal(a, offset=-3),
    "diagonal outside": lambda a: a.diagonal(9),
    "diagonal_copy": lambda a: torch.diagonal_copy(a, 1),
    "diag": lambda a: torch.diag(a, -1),
    "trace": lambda a: a.trace(),
    "tril triu": lambda a: (a.tril(), a.triu(), a.tril(-2), torch.triu(a, diagonal=2)),
    "diag_embed": lambda a: torch.diag_embed(a),
    "diag_embed above": lambda a: torch.diag_embed(a, 2, 0, 2),
    "diag_embed below": lambda a: a.diag_embed(-1, dim1=1, dim2=0),
    "linear": lambda a: (a.deg2rad(), torch.rad2deg(a), torch.view_as_real(torch.complex(a, a))),
}  # fmt: skip

CASES = {
    "roll flat": (lambda a: a.roll(3), [A]),
    "roll 0-d and empty": (lambda a, b: (a[0, 0].roll(1), b.roll(2, 0), b.roll(1)), [A, torch.ones(0, 3)]),
    "rot90 3-d": (lambda a: a.rot90(1, [0, 2]), [CUBE]),
    "repeat size 1": (lambda a: a.narrow(1, 2, 1).repeat(1, 4), [A]),
    "view as bytes": (lambda a: a.view(torch.int32).view(torch.float32), [torch.arange(30).view(5, 6)]),
    "view_as_complex": (lambda a: torch.view_as_real(torch.view_as_complex(a) * 2j), [PAIRS]),
    "view_as_complex_copy": (lambda a: aten.view_as_complex_copy(a.detach()), [PAIRS]),
    "conj": (lambda a: torch.view_as_complex(a).conj().resolve_conj().imag, [PAIRS]),
    "unbind": (lambda a: torch.unbind_copy(a, 1), [A]),
    "diagonal 3-d": (lambda a: a.diagonal(1, -1, 0) * 2, [CUBE]),
    "diagflat": (lambda a: torch.diagflat(a, 1), [ROW]),
    "diag of a vector": (lambda a: torch.diag(a, -2), [ROW]),
    "diag_embed of nothing": (lambda a: torch.diag_embed(a, 2), [torch.ones(3, 0)]),
    "tril batched": (lambda a: a.tril(1) + a.triu(-1), [CUBE]),
    "slice_scatter": (lambda a, b: torch.slice_scatter(a, b, 0, 1, 4), [A, A[:3] * 2]),
    "slice_scatter step": (lambda a, b: a.slice_scatter(b, dim=1, start=1, step=3), [A, A[:, 1::3] * 2]),
    "select_scatter": (lambda a, b: torch.select_scatter(a, b, -1, -2), [A, ROW]),
    "diagonal_scatter": (lambda a, b: torch.diagonal_scatter(a, b, 1), [A, ROW]),
    "diagonal_scatter 3-d": (lambda a, b: a.diagonal_scatter(b, -1, 2, 0), [CUBE, seeded((5, 4))[0]]),
    "glu": (lambda a: (F.glu(a), F.glu(a.t(), 0)), [A]),
    "prelu": (lambda a, w: F.prelu(a, w), [CUBE, ROW]),
    "prelu one weight": (lambda a, w: F.prelu(a, w), [CUBE, seeded((1,))[0]]),
    "logsigmoid frexp": (lambda a: (F.logsigmoid(a), *torch.frexp(a.detach())), [A]),
    "rrelu": (lambda a: F.rrelu(a) + F.rrelu(a.clone(), inplace=True), [A]),
    "lerp": (lambda a, b, w: a.lerp(b, 0.3) + a.lerp(b, w), [A, A * 2, A + 1]),
    "special": (lambda a: torch.special.i1(a) + torch.special.entr(a.abs()) + torch.special.xlog1py(a, a.abs()), [A]),
    "special without grad": (lambda a: torch.special.hermite_polynomial_h(a.detach(), 3), [A]),
    "linspace": (lambda a, b: torch.linspace(a[0, 0], 3, 5) + torch.logspace(0, b[0], 5), [A.detach(), ROW]),
}  # fmt: skip
CASES |= {name: (function, [A]) for name, function in STAY.items()}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_simulated(name, mesh):
    function, tensors = CASES[name]
    check_rule(function, [tensors], [simulate(mesh)], limit=8, seed=len(name), grad=name != "linspace", tolerance=1e-10)


CUT = [
    [[Shard(0)], [Shard(1)], [Shard(0, sizes=(1, 0, 4))], [Partial()]],
    [[Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Shard(1), Partial()]],
]


@pytest.mark.parametrize("name", STAY)
def test_nothing_moves(name):
    for shape, layouts in zip([(3,), (2, 2)], CUT, strict=True):
        mesh = simulate(shape)
        for placements in layouts:
            x = spread_out(A, mesh, placements)
            with strict(), ledger() as log:
                STAY[name](x)
            assert not [e for e in log if e.bytes], (placements, log)


OLDER = {
    "trace": since_213("the gradient of tall matrices is wrong"),
    "copies of parts": since_213("narrow_copy has no derivative"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=OLDER.get(name, ())) for name in STAY])
def test_several_pieces(name):
    """Dims of which a rank holds several intervals, on one axis and on two."""
    for shape, placements in [((3,), [Shard(0)]), ((3,), [Shard(1)]), ((2, 2), [Shard(0), Shard(1)])]:
        mesh = simulate(shape)
        x, plain = (t.requires_grad_() for t in (spread_out(A, mesh, placements), A.clone()))
        results = [STAY[name](torch.cat([t, t * 2], placements[0].dim).roll(1, 0)) for t in (x, plain)]
        got, want = ([r] if isinstance(r, torch.Tensor) else r for r in results)
        for a, b in zip(got, want, strict=True):
            compare(a, b, f"{placements}", 1e-10)
        sum((t * t).sum() for t in got if t.requires_grad).backward()
        sum((t * t).sum() for t in want if t.requires_grad).backward()
        compare(x.grad, plain.grad, f"gradient, {placements}", 1e-10)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.complex64], ids=str)
def test_dtypes(dtype):
    x = (A * 3).to(dtype)
    for name, function in STAY.items():
        if name not in ("linear", "trace"):
            check_rule(
                function, [[x]], [simulate((3,))], limit=5, grad=not dtype.is_complex, partial=False, tolerance=1e-3
            )


def test_writes_reach_the_base():
    """A diagonal of contiguous parts is a view of them; a copy is none."""
    mesh = simulate((2, 2))
    for placements in ([Shard(0), Shard(1)], [Shard(1), Replicate()]):
        x, plain = spread_out(SQUARE, mesh, placements), SQUARE.clone()
        for t in (x, plain):
            t.diagonal(1).mul_(3)
            t.tril_(2)
            torch.diagonal_copy(t).zero_()
            for part in torch.split_copy(t, 4):
                part.zero_()
            torch.select_copy(t, 1, 0).zero_()
        compare(x, plain, f"{placements}", 0)
    out = spread_out(SQUARE, mesh, [Shard(1), Shard(0)])
    torch.triu(x, out=out)
    compare(out, plain.triu(), "out=", 0)


def test_a_diagonal_of_pieces_is_written():
    x = spread_out(SQUARE, simulate((3,)), [Shard(0)])
    pieces, plain = torch.cat([x, x]), torch.cat([SQUARE, SQUARE])
    part = torch.diagonal_scatter(pieces, torch.zeros(6))
    compare(part, torch.diagonal_scatter(plain, torch.zeros(6)), "pieces", 0)
    pieces.diagonal().zero_()
    plain.diagonal().zero_()
    compare(pieces, plain, "pieces", 0)


def test_copies_outlive_their_bases():
    """A tensor that gets the memory of a dead base is not that base: writing to it leaves the copy good."""
    for _ in range(100):
        base = spread_out(torch.ones(6, 6), simulate((3,)), [Shard(0)])
        copy = base.view(4, 9)
        del base
        spread_out(torch.ones(6, 6), simulate((3,)), [Shard(0)]).zero_()
        assert (copy == 1).all()


@as_torch_draws
def test_draws_what_one_device_draws():
    mean, std = A, A.abs()
    draws = {
        "normal": lambda m, s: torch.normal(m, s),
        "normal broadcast": lambda m, s: torch.normal(m, s[0]),
        "normal of numbers": lambda m, s: torch.normal(m, 2.0) + torch.normal(1.5, s),
        "bernoulli": lambda m, s: torch.bernoulli(s.clamp(max=1)),
        "multinomial": lambda m, s: torch.multinomial(s + 0.1, 3),
        "poisson": lambda m, s: torch.poisson(s),
        "rrelu": lambda m, s: F.rrelu(m, training=True),
        "native_dropout": lambda m, s: torch.native_dropout(m, 0.3, True),
    }
    for name, draw in draws.items():

        def seeded_draw(m, s, draw=draw):
            torch.manual_seed(3)
            return draw(m, s)

        check_rule(seeded_draw, [[mean, std]], [simulate((3,))], limit=5, grad=name != "bernoulli", tolerance=1e-10)
    with pytest.raises(RuntimeError, match="std >= 0"):
        torch.normal(0.0, spread_out(A, simulate((3,)), [Shard(0)]))


@pytest.mark.parametrize(
    "call",
    [
        lambda a: a.diagonal(0, 1, 1),
        lambda a: torch.slice_scatter(a, a, 0, 1, 3),
        lambda a: torch.select_scatter(a, a[0], 0, 9),
        lambda a: torch.diagonal_scatter(a, a),
        lambda a: a.roll((1, 2), (0,)),
        lambda a: a.rot90(1, (0,)),
        lambda a: a.repeat(2),
        lambda a: F.glu(a, 0),
        lambda a: a[0].trace(),
        lambda a: a[0].tril(),
    ],
)
def test_errors_are_torchs(call):
    with pytest.raises(Exception) as want:  # noqa: PT011
        call(A)
    with pytest.raises(type(want.value)) as got:
        call(spread_out(A, simulate((3,)), [Shard(0)]))
    assert str(got.value).split("\n")[0][:40] == str(want.value).split("\n")[0][:40]


def on_gloo(rank, world_size):
    for name, (function, tensors) in CASES.items():
        try:
            check_rule(
                function,
                [tensors],
                [device_mesh((2, 2))],
                limit=2,
                seed=len(name) + 1,
                grad=name != "linspace",
                tolerance=1e-10,
            )
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_gloo():
    run_ranks(on_gloo, 4)


@pytest.mark.parametrize(
    "places",
    [
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Shard(1, sizes=(1, 6)), Shard(0, sizes=(3, 2))),
        (Shard(0), Shard(0, sizes=((1, 2), (2, 0)))),
    ],
)
def test_a_dim_cut_on_two_axes_comes_apart_again(places):
    """flatten and unflatten of a batch cut on one axis and a sequence cut on the other: nothing moves."""
    x = seeded((5, 7, 3))[0]
    mine = spread_out(x, simulate((2, 2)), places)
    with strict():
        back = mine.flatten(0, 1).unflatten(0, (5, 7))
        deeper = mine.flatten(0, 1).view(5, 1, 7, 3)
    assert back.placements == mine.placements
    assert torch.equal(back.full_tensor(), x) and torch.equal(deeper.full_tensor(), x.view(5, 1, 7, 3))
    with ledger() as log:  # a shape that the cuts do not fit is gathered
        other = mine.flatten(0, 1).unflatten(0, (7, 5))
    assert len(log) and torch.equal(other.full_tensor(), x.view(7, 5, 3))
