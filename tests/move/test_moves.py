"""Every change of layout on simulated meshes: values, gradients, second derivatives, and what the plan says of it."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise import (
    DTensor,
    LayoutError,
    Partial,
    RankTensor,
    Replicate,
    Shard,
    distribute_tensor,
    plan_move,
    simulate,
)
from shardwise.comm.record import Note, Recorder
from shardwise.layout.region import region_size
from shardwise.move import move
from shardwise.move.exchange import Exchange
from tests.layout.brute import Dealt, deal, deterministic, grid, mesh_shapes, rngs, shapes
from tests.move.cases import PARTIALS, PLAIN, UNEVEN, check_holds, placed, source

EVERY = (*PLAIN, *UNEVEN, *PARTIALS)


def check_move(src: Dealt, dst: Dealt, second=False):
    """Values and gradients of one move, against plain torch on the whole value."""
    given = source(src, requires_grad=True)
    moved = given.on(src).redistribute(placements=dst.placements)
    assert moved.layout is dst.layout()
    check_holds([v.detach() for v in moved.to_local().ranks], dst, given.whole.detach())
    full = moved.full_tensor()
    torch.testing.assert_close(full, given.whole)
    weight = torch.rand(src.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    check_gradients(given.root, full, given.whole, weight, second)
    if all(not p.is_partial() or p.is_partial("sum") for p in dst.placements):
        check_typed_gradient(given, moved, dst, weight)


def check_gradients(root, ours, theirs, weight, second):
    """A nonlinear function of both has the same gradient in `root`, and the same second derivative."""
    found = torch.autograd.grad((ours.sin() * weight).sum(), root, create_graph=second, retain_graph=True)[0]
    expected = torch.autograd.grad((theirs.sin() * weight).sum(), root, create_graph=second, retain_graph=True)[0]
    torch.testing.assert_close(found, expected)
    if second:
        found = torch.autograd.grad((found.cos() * weight).sum(), root, retain_graph=True)[0]
        expected = torch.autograd.grad((expected.cos() * weight).sum(), root, retain_graph=True)[0]
        torch.testing.assert_close(found, expected)


def check_typed_gradient(given, moved, dst, weight):
    """A gradient laid out as the result (parts of a sum all have the whole one) comes back as that of the value."""
    locals_ = moved.to_local().ranks
    seeds = [dst.part(weight, coords) for coords in grid(dst.mesh_shape)]
    found = torch.autograd.grad(locals_, given.root, seeds, retain_graph=True)[0]
    torch.testing.assert_close(found, torch.autograd.grad(given.whole, given.root, weight, retain_graph=True)[0])


# -- all pairs ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (2, 3), (0, 3)], ids=str)
@pytest.mark.parametrize("before", EVERY)
def test_all_pairs_on_one_axis(before, shape):
    for ranks in (4, 1):
        for after in EVERY:
            check_move(placed((ranks,), shape, [before], 1), placed((ranks,), shape, [after], 2))


@pytest.mark.parametrize("before", ["R", "S0", "S1", "S0 sizes", "S1 pieces", "P sum", "P avg"])
def test_second_derivatives(before):
    for after in ("R", "S0", "S1", "S0 sizes", "S1 pieces", "P sum", "P avg"):
        for shape in ((5, 3), (2, 3)):
            check_move(placed((4,), shape, [before], 1), placed((4,), shape, [after], 2), second=True)


def test_second_derivatives_of_other_reductions():
    for before, after in itertools.product(("P product", "P max", "P min", "S0"), repeat=2):
        check_move(placed((3,), (4, 2), [before], 1), placed((3,), (4, 2), [after], 2), second=True)


TWO_AXES = list(itertools.product((*PLAIN, "P sum"), repeat=2))


@pytest.mark.parametrize("before", TWO_AXES, ids=str)
def test_all_pairs_on_two_axes(before):
    for after in TWO_AXES:
        check_move(placed((2, 3), (5, 7), before), placed((2, 3), (5, 7), after))


def test_two_axes_with_fewer_rows_than_ranks_and_empty():
    for before, after in itertools.product(itertools.product(("R", "S0", "S1"), repeat=2), repeat=2):
        for shape in ((1, 3), (3, 0)):
            check_move(placed((2, 3), shape, before), placed((2, 3), shape, after))


def test_all_pairs_on_three_axes():
    """Values only: 27 x 27 layouts, cut up to three times on one dim."""
    layouts = [placed((2, 2, 2), (7, 3), kinds) for kinds in itertools.product(("R", "S0", "S1"), repeat=3)]
    whole = torch.arange(21.0).view(7, 3)
    for src in layouts:
        x = distribute_tensor(whole, simulate((2, 2, 2)), src.placements)
        for dst in layouts:
            check_holds(x.redistribute(placements=dst.placements).to_local().ranks, dst, whole)


@deterministic(500)
@given(mesh_shapes, shapes, rngs)
def test_any_layout_to_any_layout(mesh_shape, shape, rng):
    ops = rng.choice((("sum", "avg"), ("max",), ("product",), ()))
    other = rng.choice((("sum", "avg"), ("min",), ("product",), ()))
    src, dst = deal(rng, mesh_shape, shape, partial_ops=ops), deal(rng, mesh_shape, shape, partial_ops=other)
    check_move(src, dst, second=rng.random() < 0.3)


@deterministic(100)
@given(mesh_shapes, shapes, rngs)
def test_there_and_back(mesh_shape, shape, rng):
    """A walk through several layouts ends with the values it began with."""
    src = deal(rng, mesh_shape, shape)
    given = source(src)
    x = given.on(src)
    for _ in range(4):
        x = x.redistribute(placements=deal(rng, mesh_shape, shape, partial_ops=("sum",)).placements)
    check_holds(x.redistribute(placements=src.placements).to_local().ranks, src, given.whole)


# -- gradients that need a closer look ---------------------------------------------------------------------
@pytest.mark.parametrize("op", ["max", "min"])
def test_ties_share_the_gradient_as_in_torch(op):
    parts = [torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([1.0, 5.0, 3.0], requires_grad=True)]
    plain = [part.detach().clone().requires_grad_() for part in parts]
    x = DTensor.from_local(RankTensor(parts), simulate(2), [Partial(op)])
    (x.full_tensor() * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    whole = getattr(torch.stack(plain), f"a{op}")(0)
    (whole * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    for ours, theirs in zip(parts, plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_product_with_zeros():
    parts = [torch.tensor([0.0, 0.0, 3.0], requires_grad=True), torch.tensor([2.0, 0.0, 4.0], requires_grad=True)]
    DTensor.from_local(RankTensor(parts), simulate(2), [Partial("product")]).full_tensor().sum().backward()
    assert parts[0].grad.tolist() == [2.0, 0.0, 4.0]
    assert parts[1].grad.tolist() == [0.0, 0.0, 3.0]


def test_a_leaf_gets_a_gradient_laid_out_as_itself():
    whole = torch.randn(5, 3, dtype=torch.float64)
    for before, after in itertools.product(("R", "S0", "S1", "S0 sizes"), repeat=2):
        src, dst = placed((2,), (5, 3), [before], 1), placed((2,), (5, 3), [after], 2)
        x = distribute_tensor(whole, simulate(2), src.placements).requires_grad_()
        x.redistribute(placements=dst.placements).full_tensor().sin().sum().backward()
        assert x.grad.placements == x.placements
        torch.testing.assert_close(x.grad.full_tensor(), whole.cos())


@pytest.mark.parametrize("before", ["R", "S0", "S1", "S0 sizes", "S1 pieces", "P sum", "P avg", "P max"])
def test_a_spread_value_gets_the_sum_of_the_gradients(before):
    """A Replicate operand of a call that each rank does differently: the ranks' gradients add up, twice."""
    src, dst = placed((3,), (5, 4), [before], 1), placed((3,), (5, 4), ["R"])
    given = source(src, requires_grad=True)
    weights = torch.rand(3, 5, 4, dtype=torch.float64)
    layout = given.on(src).layout
    spread = move(given.on(src)._local, layout, dst.layout(), Note("test"), spread=(0,))
    ours = sum((local.sin() * w).sum() for local, w in zip(spread.ranks, weights, strict=True))
    theirs = sum((given.whole.sin() * w).sum() for w in weights)
    for _ in range(2):
        (ours,) = torch.autograd.grad(ours.sum(), given.root, create_graph=True)
        (theirs,) = torch.autograd.grad(theirs.sum(), given.root, create_graph=True)
        torch.testing.assert_close(ours, theirs)


def test_no_graph_where_nothing_needs_one():
    x = distribute_tensor(torch.ones(4), simulate(2), [Shard(0)])
    assert not x.redistribute(placements=[Replicate()]).requires_grad
    y = x.detach().requires_grad_()
    assert y.redistribute(placements=[Replicate()]).requires_grad
    with torch.no_grad():
        assert not y.redistribute(placements=[Replicate()]).requires_grad


def test_a_move_to_the_same_layout_is_the_tensor_itself():
    x = distribute_tensor(torch.ones(4), simulate(2), [Shard(0)])
    assert x.redistribute(placements=[Shard(-1)]) is x
    with pytest.raises(LayoutError, match="placements is needed for redistribute!"):
        x.redistribute()
    assert x.redistribute(forward_dtype=torch.float64).placements == (Shard(0),)
    assert x.redistribute(placements=[Shard(0, sizes=(2, 2))]) is x


def test_the_result_owns_its_memory():
    """Writing to what a move gave leaves the source as it was."""
    for before, after in itertools.permutations(("R", "S0", "S1", "P sum", "P avg", "P max"), 2):
        src, dst = placed((2,), (4, 2), [before]), placed((2,), (4, 2), [after])
        given = source(src)
        kept = {coords: value.clone() for coords, value in given.local.items()}
        for value in given.on(src).redistribute(placements=dst.placements).to_local().ranks:
            value.zero_()
        for coords, value in given.local.items():
            assert torch.equal(value, kept[coords]), (before, after)


def test_sub_meshes_move_apart_from_each_other():
    """On mesh["tp"] of a 2x3 world each tp group moves by itself."""
    mesh = simulate((2, 3), axis_names=("dp", "tp"))["tp"]
    whole = [torch.randn(5, 4), torch.randn(5, 4)]
    parts = [part.clone().requires_grad_() for x in whole for part in x.split([2, 2, 1])]
    x = DTensor.from_local(RankTensor(parts), mesh, [Shard(0)])
    assert x.shape == (5, 4)
    moved = x.redistribute(placements=[Shard(1)]).to_local().ranks
    expected = [part for x in whole for part in x.split([2, 2, 0], 1)]
    for ours, theirs in zip(moved, expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs)


# -- dtypes and memory formats -----------------------------------------------------------------------------
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    kinds = ["R", "S0", "S1", "S0 sizes", "S1 pieces"]
    if dtype != torch.bool:
        kinds += ["P sum", "P product"]
    if dtype.is_floating_point or dtype.is_complex:
        kinds += ["P avg"]
    if not dtype.is_complex and dtype != torch.bool:
        kinds += ["P max", "P min"]
    for before, after in itertools.product(kinds, repeat=2):
        src, dst = placed((3,), (5, 2), [before], 1), placed((3,), (5, 2), [after], 2)
        given = source(src, dtype)
        moved = given.on(src).redistribute(placements=dst.placements)
        assert moved.dtype == dtype and all(v.dtype == dtype for v in moved.to_local().ranks)
        check_holds(moved.to_local().ranks, dst, given.whole, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("op", ["band", "bor", "bxor", "max", "min"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16], ids=str)
def test_bitwise_reductions(op, dtype):
    parts = [torch.tensor([0, 1, 1, 0, 1]).to(dtype), torch.tensor([1, 1, 0, 0, 1]).to(dtype), torch.ones(5).to(dtype)]
    expected = {
        "band": parts[0] & parts[1] & parts[2],
        "bor": parts[0] | parts[1] | parts[2],
        "bxor": parts[0] ^ parts[1] ^ parts[2],
        "max": parts[0] | parts[1] | parts[2],
        "min": parts[0] & parts[1] & parts[2],
    }[op]
    x = DTensor.from_local(RankTensor(parts), simulate(3), [Partial(op)])
    assert torch.equal(x.full_tensor(), expected)
    assert [v.tolist() for v in x.redistribute(placements=[Shard(0)]).to_local().ranks] == [
        part.tolist() for part in expected.split(2)
    ]
    back = distribute_tensor(expected, simulate(3), [Replicate()]).redistribute(placements=[Partial(op)])
    assert back.placements == (Partial(op),) and torch.equal(back.full_tensor(), expected)


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_nan_stays_a_nan(op):
    parts = [torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([float("nan"), 2.0, 4.0])]
    x = DTensor.from_local(RankTensor(parts), simulate(2), [Partial(op)])
    assert x.full_tensor().isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("before", ["R", "S0", "S1", "P sum", "P avg", "P max"])
def test_locals_that_are_not_contiguous(before):
    for after in ("R", "S0", "S1", "S1 pieces", "P sum", "P avg", "P max"):
        src, dst = placed((3,), (5, 4), [before]), placed((3,), (5, 4), [after], 2)
        given = source(src)
        twisted = {coords: value.t().contiguous().t() for coords, value in given.local.items()}
        x = DTensor.from_local(RankTensor([twisted[c] for c in grid((3,))]), simulate(3), src.placements, shape=(5, 4))
        assert x.stride() == (1, 5)
        moved = x.redistribute(placements=dst.placements)
        check_holds(moved.to_local().ranks, dst, given.whole)
        if after != before:  # what the result says of itself is true of its locals
            assert moved.is_contiguous() and all(v.is_contiguous() for v in moved.to_local().ranks), (before, after)


def test_expanded_and_strided_locals():
    wide = torch.arange(12.0).view(3, 4)
    ranks = [wide[:, ::2], wide[:1, :].expand(3, 4)[:, 1::2], wide.t()[1:3].t()]
    x = DTensor.from_local(RankTensor(ranks), simulate(3), [Shard(0)])
    whole = torch.cat([r.contiguous() for r in ranks])
    assert x.shape == (9, 2)
    torch.testing.assert_close(x.full_tensor(), whole)
    for got, expected in zip(x.redistribute(placements=[Shard(1)]).to_local().ranks, whole.split(1, 1), strict=False):
        torch.testing.assert_close(got, expected)


def test_conjugated_locals():
    parts = [torch.randn(2, 3, dtype=torch.complex64) for _ in range(2)]
    x = DTensor.from_local(RankTensor([part.conj() for part in parts]), simulate(2), [Shard(0)])
    torch.testing.assert_close(
        x.redistribute(placements=[Shard(1)]).full_tensor(), torch.cat(parts).conj().resolve_conj()
    )


def test_strided_moves_in_fake_mode_leave_nothing_behind():
    """What a move in a fake or meta setting makes is not used later by a real one."""
    strided = Shard(0, pieces=[[[(0, 1), (5, 6)], [(1, 5)]]])
    name = ("met first in a fake mode",)
    with FakeTensorMode():
        mesh = simulate(2, axis_names=name)
        assert distribute_tensor(torch.empty(6), mesh, [strided]).full_tensor().shape == (6,)
    with torch.device("meta"):
        assert distribute_tensor(torch.empty(6), mesh, [strided]).full_tensor().is_meta
        assert simulate((2, 2), axis_names=("first", "meta"))["meta"].mesh.tolist() == [0, 1]
    assert torch.equal(distribute_tensor(torch.arange(6), mesh, [strided]).full_tensor(), torch.arange(6))


# -- from what the ranks hold ------------------------------------------------------------------------------
@deterministic(80)
@given(mesh_shapes, shapes, rngs)
def test_from_local_finds_the_true_shape(mesh_shape, shape, rng):
    """Without a shape, uneven locals give the global shape and sizes they really have."""
    dealt = deal(rng, mesh_shape, shape, kinds=("replicate", "chunk", "sizes"), partial_ops=("sum",))
    given = source(dealt)
    names = [Shard(p.dim - len(shape)) if p.is_shard() else p for p in dealt.placements]  # sizes not told
    ranks = RankTensor([given.local[coords] for coords in grid(mesh_shape)])
    for places in (names, dealt.placements):
        x = DTensor.from_local(ranks, simulate(mesh_shape), places)
        assert x.layout is dealt.layout()
        torch.testing.assert_close(x.full_tensor(), given.whole)


def test_from_local_trusts_strided_pieces():
    strided = Shard(0, pieces=[[[(0, 1), (2, 3)], [(1, 2), (3, 4)]]])
    x = DTensor.from_local(RankTensor([torch.tensor([0, 2]), torch.tensor([1, 3])]), simulate(2), [strided])
    assert x.full_tensor().tolist() == [0, 1, 2, 3]


def test_from_local_assume_even():
    x = DTensor.from_local(torch.ones(2, 3), simulate((2, 2)), [Shard(0), Shard(0)], assume_even=True)
    assert x.shape == (8, 3) and x.placements == (Shard(0), Shard(0))


def test_from_local_takes_replicas_from_the_first_rank():
    ranks = RankTensor([torch.full((2,), float(i)) for i in range(4)])
    x = DTensor.from_local(ranks, simulate((2, 2)), [Shard(0), Replicate()], run_check=True)
    assert [v.tolist() for v in x.to_local().ranks] == [[0, 0], [0, 0], [2, 2], [2, 2]]


# -- what a plan says --------------------------------------------------------------------------------------
@pytest.fixture
def ledger():
    entries = []
    recorder = Recorder(entries.append)
    recorder.open()
    yield entries
    recorder.close()


def test_plans_say_what_the_ledger_records(ledger):
    rng = random.Random(0)
    for _ in range(250):
        mesh_shape = rng.choice(((4,), (2, 3), (3, 2), (2, 2, 2)))
        shape = (rng.randrange(9), rng.randrange(1, 6))
        ops = rng.choice((("sum", "avg"), ("max",), ()))
        src, dst = deal(rng, mesh_shape, shape, partial_ops=ops), deal(rng, mesh_shape, shape, partial_ops=ops)
        plan = plan_move(src.layout(), dst.layout())
        ledger.clear()
        source(src).on(src).redistribute(placements=dst.placements)
        ranks = range(len(grid(mesh_shape)))
        assert sum(entry.bytes for entry in ledger) == sum(plan.bytes_in(rank) for rank in ranks)
        assert [entry.kind for entry in ledger] == [step.kind for step in plan.steps if step.kind != "local"]
        assert [entry.axis for entry in ledger] == [
            "+".join(map(str, step.axes)) for step in plan.steps if step.kind != "local"
        ]
        assert all(entry.op == "redistribute" and not entry.backward for entry in ledger)
        assert all("test_moves.py:" in entry.source for entry in ledger)
        assert sum(map(plan.bytes_out, ranks)) == sum(map(plan.bytes_in, ranks))
        assert sum(map(plan.bytes_in, ranks)) >= sum(map(plan.lower_bound, ranks)) >= 0
        for rank in ranks:
            assert not plan.steps or plan.peak_bytes(rank) >= local_bytes(dst, rank)


def local_bytes(dealt, rank):
    n = 8
    for size in dealt.local_shape(grid(dealt.mesh_shape)[rank]):
        n *= size
    return n


@deterministic(100)
@given(mesh_shapes, shapes, rngs)
def test_lower_bound_counts_what_is_missing(mesh_shape, shape, rng):
    src, dst = deal(rng, mesh_shape, shape), deal(rng, mesh_shape, shape)
    plan = plan_move(src.layout(), dst.layout())
    for rank, coords in enumerate(grid(mesh_shape)):
        have, need = [
            set(itertools.product(*(dealt.held(coords, dim) for dim in range(len(shape))))) for dealt in (src, dst)
        ]
        assert plan.lower_bound(rank) == 8 * len(need - have)


def test_the_ledger_hears_the_backward(ledger):
    x = distribute_tensor(torch.ones(4, 4), simulate(2), [Shard(0)]).requires_grad_()
    y = x.redistribute(placements=[Shard(1)])
    y.full_tensor().sum().backward()
    assert [(e.kind, e.backward, e.bytes) for e in ledger] == [
        ("all_to_all", False, 32),
        ("all_gather", False, 64),
        ("all_to_all", True, 32),
    ]
    assert [e.op for e in ledger] == ["redistribute", "full_tensor", "redistribute"]


@pytest.mark.parametrize(
    ("before", "after", "bytes_in"),
    [
        ("S0", "R", [3 * 64] * 4),
        ("R", "S0", [0] * 4),
        ("P sum", "R", [2 * 3 * 256 // 4] * 4),
        ("P sum", "S0", [3 * 64] * 4),
        ("P avg", "S1", [3 * 64] * 4),
        ("P max", "S0", [2 * 3 * 256 // 4] * 4),
        ("S0", "S1", [48] * 4),
        ("R", "P sum", [0] * 4),
        ("S1", "S1", [0] * 4),
    ],
)
def test_bytes(before, after, bytes_in):
    """8x4 doubles on 4 ranks: 256 bytes in all, 64 a rank; a ring all-reduce of b bytes counts 2(k-1)/k b."""
    src, dst = placed((4,), (8, 4), [before]).layout(), placed((4,), (8, 4), [after]).layout()
    assert [plan_move(src, dst).bytes_in(rank) for rank in range(4)] == bytes_in


def test_uneven_bytes():
    src = Dealt((3,), (6,))
    src.keep(Shard(0, sizes=(1, 5, 0)))
    plan = plan_move(src.layout(), src.layout().replace(placements=[Replicate()]))
    assert [plan.bytes_in(rank) for rank in range(3)] == [40, 8, 48]
    assert [plan.lower_bound(rank) for rank in range(3)] == [40, 8, 48]


def test_explain():
    mesh = simulate((2, 2), axis_names=("dp", "tp"))
    x = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0), Partial()])
    plan = plan_move(x.layout, x.layout.replace(placements=[Replicate(), Shard(1)]))
    assert plan.explain().splitlines() == [
        "[S(0), P(sum)] -> [R, S(1)], shape (8, 4), mesh(dp=2, tp=2)",
        "  step                                      bytes in  bytes out  result",
        "  1. reduce_scatter on tp (P(sum) -> S(1))        32         32      32",
        "  2. all_gather on dp (S(0) -> R)                 32         32      64",
        "  busiest rank                                    64         64        ",
        "  lower bound 64 bytes in; at most 96 bytes of memory beyond the source",
    ]
    assert repr(plan) == plan.explain()
    assert "nothing to do" in plan_move(x.layout, x.layout).explain()


@deterministic(100)
@given(mesh_shapes, shapes, rngs)
def test_bytes_out_are_those_of_all_peers(mesh_shape, shape, rng):
    src, dst = deal(rng, mesh_shape, shape, partial_ops=("sum",)), deal(rng, mesh_shape, shape)
    for step in plan_move(src.layout(), dst.layout()).steps:
        if not isinstance(step, Exchange) or step.kind == "local":
            continue
        for coords in grid(mesh_shape):
            sent = sum(region_size(region) for peer, region in step.outgoing(coords).items() if peer != coords)
            assert step.bytes_out(coords) == sent * step.dst.dtype.itemsize, (step, coords)


@pytest.mark.parametrize("places", [[Shard(0)], [Partial()], [Shard(0, sizes=(3, *[1] * 1023))]], ids=str)
def test_a_plan_of_many_ranks_is_shown_without_a_look_at_every_peer(places):
    layout = distribute_tensor(torch.zeros(1026, 2), simulate(1024), places).layout
    for target in ([Replicate()], [Shard(1)], [Shard(0)]):
        plan = plan_move(layout, layout.replace(placements=target))
        lines = repr(plan).splitlines()
        assert len(lines) <= 6 and max(map(len, lines)) < 100
        looked_up = {key[0] for step in plan.steps if isinstance(step, Exchange) for key in step.kept}
        assert not {"in", "out", "buffers"} & looked_up
        assert ".explain() says how much memory" in lines[-1] and "bytes of memory" in plan.explain()


def test_plans_of_equal_layouts_are_made_once():
    src, dst = placed((4,), (5, 3), ["S0"]).layout(), placed((4,), (5, 3), ["S1"]).layout()
    assert plan_move(src, dst).steps is plan_move(src, dst).steps


def test_a_chosen_dtype_on_the_way():
    whole = torch.randn(5, 3)
    x = distribute_tensor(whole, simulate(2), [Shard(0)]).requires_grad_()
    y = x.redistribute(placements=[Replicate()], forward_dtype=torch.float64)
    assert y.dtype == torch.float64
    y.full_tensor().sin().sum().backward()
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad.full_tensor(), whole.cos())
