"""Look-ups and writes at indices: in a dim that is cut every rank does its share, and nothing large moves."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard, distribute_tensor, simulate, strict
from shardwise.context import implicit_replication
from shardwise.debug import ledger
from shardwise.rules.index import of_index
from shardwise.testing import check_rule
from tests.values import seeded
from tests.workers import device_mesh, run_ranks

A, B, CUBE, VECTOR = seeded((7, 5), (7, 5), (4, 6, 3), (8,))
INTS = (A * 10).long()
ROWS = torch.tensor([6, 0, 2, 2, 5, 0])
COLUMNS = torch.tensor([4, 1, 1])
GRID = torch.tensor([[0, 6, 3], [2, 2, 6]])
PLACES = torch.tensor([[0, 6, 3, 1, 1], [2, 2, 6, 0, 5], [0, 0, 0, 6, 6]])
DISTINCT = torch.tensor([[0, 6, 3, 1, 1], [2, 5, 6, 0, 5], [4, 0, 0, 2, 6]])
NEW = seeded((6, 5), (3, 5), seed=3)
WEIGHTS = seeded((6,), (3, 2), seed=4)


def pieces(a):
    """The same rows, twice: a rank holds several intervals."""
    return torch.cat([a, a * 2])


def reduces(kind, include_self, function="scatter_reduce"):
    where = ROWS if function == "index_reduce" else PLACES
    return lambda a, s: getattr(a, function)(0, where, s, kind, include_self=include_self)


CASES = {
    "index_select": (lambda a, i: a.index_select(0, i), [A, ROWS]),
    "index_select pieces": (lambda a, i: pieces(a).index_select(0, i + 4), [A, ROWS]),
    "index_select -1": (lambda a, i: a.index_select(-1, i), [A, COLUMNS]),
    "index_select bool": (lambda a, i: (a > 0).index_select(0, i), [A, ROWS]),
    "index_select int": (lambda a, i: a.index_select(0, i.int()), [INTS, ROWS]),
    "index_select complex": (lambda a, i: torch.complex(a, a * 2).index_select(0, i), [A, ROWS]),
    "index_select nothing": (lambda a, i: a.index_select(0, i[:0]), [A, ROWS]),
    "gather": (lambda a, i: a.gather(0, i), [A, PLACES]),
    "gather pieces": (lambda a, i: pieces(a).gather(0, i + 3), [A, PLACES]),
    "gather of fewer": (lambda a, i: torch.gather(a, 0, i), [A, PLACES[:, :3]]),
    "gather columns": (lambda a, i: a.gather(1, i), [A, PLACES[:, :4] % 5]),
    "gather 3-d": (lambda a, i: a.gather(1, i), [CUBE, (GRID % 4)[None, :, :].expand(3, 2, 3).contiguous()]),
    "take_along_dim": (lambda a, i: (torch.take_along_dim(a, i, 0), a.take_along_dim(i)), [A, PLACES]),
    "take": (lambda a, i: torch.take(a, i * 5 - 3), [A, GRID]),
    "take nothing": (lambda a, i: torch.take(a, i[:0]), [A, GRID]),
    "index": (lambda a, i: a[i], [A, GRID]),
    "index pieces": (lambda a, i: pieces(a)[i - 7], [A, GRID]),
    "index two": (lambda a, i, j: a[i, j % 5 - 2], [A, ROWS, ROWS]),
    "index broadcast": (lambda a, i, j: a[i[:, None], j], [A, ROWS, COLUMNS]),
    "index middle": (lambda a, i: a[:, i - 1], [CUBE, COLUMNS]),
    "index apart": (lambda a, i: a[i % 4, :, i % 3], [CUBE, COLUMNS]),
    "index bool": (lambda a, i: (a > 0)[i], [A, ROWS]),
    "index True": (lambda a: (a[True], a[False], a[None, True, 2], a[torch.tensor(True)]), [A]),
    "unsafe masked": (
        lambda a, i: torch.ops.aten._unsafe_masked_index(a, i < 4, [i + 2], 0.5),
        [VECTOR, ROWS],
    ),
    "embedding": (lambda t, i: F.embedding(i, t), [A, GRID]),
    "embedding pieces": (lambda t, i: F.embedding(i + 4, pieces(t), padding_idx=6), [A, GRID]),
    "embedding max_norm": (lambda t, i: F.embedding(i, t * 1, max_norm=1.0), [A, GRID]),
    "bag mean": (lambda t, i: F.embedding_bag(i, t), [A, GRID]),
    "bag pieces": (lambda t, i: F.embedding_bag(i + 4, pieces(t), mode="sum", padding_idx=-7), [A, GRID]),
    "bag max": (lambda t, i: F.embedding_bag(i, t, mode="max"), [A, GRID]),
    "bag offsets": (
        lambda t, i: F.embedding_bag(i, t, torch.tensor([0, 2, 2, 6]), include_last_offset=True, padding_idx=2),
        [A, ROWS],
    ),
    "bag weights": (
        lambda t, i, w: F.embedding_bag(i, t, torch.tensor([0, 4]), mode="sum", per_sample_weights=w),
        [A, ROWS, WEIGHTS[0]],
    ),
    "bag weights 2-d": (
        lambda t, i, w: F.embedding_bag(i.T, t, mode="sum", per_sample_weights=w),
        [A, GRID, WEIGHTS[1]],
    ),
    "index_add": (lambda a, i, s: a.index_add(0, i, s, alpha=2.5), [A, ROWS, NEW[0]]),
    "index_add pieces": (lambda a, i, s: pieces(a).index_add(0, i + 4, s), [A, ROWS, NEW[0]]),
    "index_add -1": (lambda a, i, s: a.index_add(-1, i, s), [A, COLUMNS, A[:, :3]]),
    "index_add 0-d": (lambda a, i, s: a.index_add(0, i[0], s[:1]), [A, ROWS, NEW[0]]),
    "index_copy": (lambda a, i, s: a.index_copy(0, i[[0, 1, 2, 4]], s[:4]), [A, ROWS, NEW[0]]),
    "index_copy 1-d": (lambda a, i, s: a.index_copy(0, i[0], s[0]), [VECTOR, ROWS, VECTOR]),
    "index_fill": (lambda a, i: a.index_fill(0, i - 7, 2.0), [A, ROWS]),
    "index_fill tensor": (lambda a, i, v: a.index_fill(1, i, v[2]), [A, COLUMNS, VECTOR]),
    "scatter": (lambda a, i, s: a.scatter(0, i, s), [A, DISTINCT, NEW[1]]),
    "scatter value": (lambda a, i: a.scatter(0, i, 1.5), [A, PLACES]),
    "scatter of fewer": (lambda a, i, s: a.scatter(0, i, s), [A, DISTINCT[:2, :3], NEW[1][:2, :3]]),
    "scatter pieces": (lambda a, i, s: pieces(a).scatter(0, i + 3, s), [A, DISTINCT, NEW[1]]),
    "scatter_add": (lambda a, i, s: a.scatter_add(0, i, s), [A, PLACES, NEW[1]]),
    "scatter_add of fewer": (lambda a, i, s: a.scatter_add(0, i, s), [A, PLACES[:2, :3], NEW[1][:2, :3]]),
    "scatter_add longer source": (lambda a, i, s: a.scatter_add(0, i, s.detach()), [A, PLACES[:2, :3], NEW[1]]),
    "scatter_add pieces": (lambda a, i, s: pieces(a).scatter_add(0, i + 3, s), [A, PLACES, NEW[1]]),
    "scatter_add columns": (lambda a, i, s: a.scatter_add(1, i % 5, s), [A, PLACES, NEW[1]]),
    "index_put": (lambda a, i, s: a.index_put((i[[0, 1, 2, 4]] - 7,), s[:4]), [A, ROWS, NEW[0]]),
    "index_put add": (lambda a, i, s: a.index_put((i,), s, accumulate=True), [A, ROWS, NEW[0]]),
    "index_put two": (
        lambda a, i, j, s: a.index_put((i[:, None], j), s[:, :3], accumulate=True),
        [A, ROWS, COLUMNS, NEW[0]],
    ),
    "index_put apart": (
        lambda a, i, s: torch.ops.aten.index_put(a, [i % 4, None, i % 3], s[:3, :1], True),
        [CUBE, COLUMNS, NEW[0]],
    ),
    "index_put pieces": (lambda a, i, s: pieces(a).index_put((i + 4,), s, accumulate=True), [A, ROWS, NEW[0]]),
    "put": (lambda a, i, s: a.put(i * 5 - 3, s, accumulate=True), [A, GRID, CUBE[0, :2]]),
    "masked_scatter": (lambda a, b, s: a.masked_scatter(b > 0, s), [A, B, CUBE]),
    "masked_scatter broadcast": (lambda a, b, s: a.masked_scatter(b[0] > 0, s), [A, B, CUBE]),
    "setitem": (lambda a, i, s: set_item(a, i, s), [A, ROWS, NEW[0]]),
    "setitem number": (lambda a, i: set_item(a, (slice(1, 6), i), 2.0), [A, COLUMNS]),
    "setitem mask": (lambda a, b: set_item(a, b > 0, 2.0), [A, B]),
    "setitem mask rows": (lambda a, b, v: set_item(a, b[:, 0] > 0, v[3]), [A, B, VECTOR]),
    "setitem mask columns": (lambda a, b: set_item(a, (slice(None), b[0] > 0), 3.0), [A, B]),
    "setitem masked values": (lambda a, b, v: set_item(a, b > 0, v.reshape(-1)[: int((B > 0).sum())]), [A, B, CUBE]),
    "index_add_": (lambda a, i, s: (a * 1).index_add_(0, i, s), [A, ROWS, NEW[0]]),
    "scatter_add_": (lambda a, i, s: (a * 1).scatter_add_(0, i, s), [A, PLACES, NEW[1]]),
    "scatter_add_ transposed": (lambda a, i, s: (a * 1).T.scatter_add_(1, i.T, s.T), [A, PLACES, NEW[1]]),
    "index_put_": (lambda a, i, s: (a * 1).index_put_((i,), s, accumulate=True), [A, ROWS, NEW[0]]),
    "out=": (lambda a, i: torch.index_select(a, 0, i, out=torch.zeros_like(a)[:6]), [A.long(), ROWS]),
    **{
        f"{function} {kind} {include}": (reduces(kind, include, function), [A, NEW[0 if "index" in function else 1]])
        for function in ("scatter_reduce", "index_reduce")
        for kind in ("sum", "prod", "mean", "amin", "amax")
        for include in (True, False)
        if kind != "sum" or function == "scatter_reduce"
    },
}


def set_item(a, index, value):
    a = a * 1
    a[index] = value
    return a


@pytest.mark.parametrize("mesh", [(3,), (2, 2), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_simulated(name, mesh):
    function, tensors = CASES[name]
    grad = not name.endswith("out=")
    check_rule(
        function,
        [tensors],
        [simulate(mesh)],
        limit=8 if len(mesh) < 3 else 3,
        seed=len(name),
        grad=grad,
        tolerance=1e-10,
    )


def on_gloo(rank, world_size, shape):
    for name, (function, tensors) in CASES.items():
        check_rule(
            function,
            [tensors],
            [device_mesh(shape)],
            limit=1,
            seed=len(name) + 1,
            grad=not name.endswith("out="),
            tolerance=1e-10,
        )


@pytest.mark.parametrize("shape", [(2,)], ids=str)
def test_gloo(shape):
    run_ranks(on_gloo, 2, shape)


WRITES = {
    "index_add_": lambda a: a.index_add_(0, ROWS, NEW[0]),
    "index_copy_": lambda a: a.index_copy_(0, ROWS, NEW[0]),
    "index_fill_": lambda a: a.index_fill_(0, ROWS, 1.0),
    "scatter_": lambda a: a.scatter_(0, PLACES, 1.0),
    "scatter_add_": lambda a: a.scatter_add_(0, PLACES, NEW[1]),
    "scatter_reduce_": lambda a: a.scatter_reduce_(0, PLACES, NEW[1], "amax"),
    "index_put_": lambda a: a.index_put_((ROWS,), NEW[0], accumulate=True),
    "setitem": lambda a: a.__setitem__(ROWS, 1.0),
    "put_": lambda a: a.put_(ROWS, NEW[0][:, 0], accumulate=True),
}
READS = {
    "index_select": lambda a: a.index_select(0, ROWS),
    "gather": lambda a: a.gather(0, PLACES),
    "take": lambda a: a.take(GRID),
    "index": lambda a: a[ROWS, ROWS % 5],
    "embedding": lambda a: F.embedding(GRID, a),
    "embedding_bag": lambda a: F.embedding_bag(GRID, a),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(0, sizes=(0, 6, 1))], ids=str)
@pytest.mark.parametrize("name", WRITES | READS)
def test_nothing_moves(name, placement):
    x = distribute_tensor(A.clone(), simulate((3,)), [placement])
    memory = [local.data_ptr() for local in x.to_local().ranks]
    with ledger() as log:
        out = (WRITES | READS)[name](x)
    assert not len(log), log
    assert x.placements == (placement,)
    if name in WRITES and name != "put_":
        assert [local.data_ptr() for local in x.to_local().ranks] == memory
    elif name in READS and placement.dim == 0:
        assert out.placements == (Partial(),)


def test_cut_source_adds_up_in_parts():
    mesh = simulate((3,))
    table = distribute_tensor(A, mesh, [Replicate()])
    rows, source = (distribute_tensor(t, mesh, [Shard(0)]) for t in (ROWS, NEW[0]))
    with strict():
        out = table.index_add(0, rows, source)
    assert out.placements == (Partial(),)
    torch.testing.assert_close(out.full_tensor(), A.index_add(0, ROWS, NEW[0]))


def test_numbers_are_not_remembered():
    x = distribute_tensor(A, simulate((3,)), [Shard(0)])
    for number in (1.5, 2.5):
        got = x.index_add(0, ROWS, NEW[0], alpha=number), x.index_fill(0, ROWS, number), x.scatter(0, PLACES, number)
        want = A.index_add(0, ROWS, NEW[0], alpha=number), A.index_fill(0, ROWS, number), A.scatter(0, PLACES, number)
        torch.testing.assert_close([g.full_tensor() for g in got], list(want))


def test_names_of_arguments():
    x = distribute_tensor(A, simulate((3,)), [Shard(0)])
    with strict(), implicit_replication():
        x.index_fill(dim=0, index=ROWS, value=1.0)
        x.index_add(dim=0, index=ROWS, source=NEW[0])
        x.scatter(dim=0, index=PLACES, value=1.0)
        x.scatter(dim=0, index=PLACES, src=NEW[1])
        x.scatter_reduce(dim=0, index=PLACES, src=NEW[1], reduce="sum", include_self=False)
        x.index_reduce(dim=0, index=ROWS, source=NEW[0], reduce="amax")
        torch.index_select(input=x, dim=0, index=ROWS)
        torch.gather(index=PLACES, dim=0, input=x)
        F.embedding_bag(weight=x, input=GRID)


OUTSIDE = {
    "index_select": lambda a, i: a.index_select(0, i),
    "gather": lambda a, i: a.gather(0, i[:, None]),
    "take": lambda a, i: a.take(i * 99),
    "index": lambda a, i: a[i * 9],
    "embedding": lambda a, i: F.embedding(i, a),
    "embedding_bag": lambda a, i: F.embedding_bag(i[None], a),
    "index_add": lambda a, i: a.index_add(0, i, a[:1]),
    "index_copy": lambda a, i: a.index_copy(0, i, a[:1]),
    "index_fill": lambda a, i: a.index_fill(0, i * 9, 1.0),
    "scatter": lambda a, i: a.scatter(0, i[:, None], 1.0),
    "index_put": lambda a, i: a.index_put((i * 9,), a[:1]),
}


@pytest.mark.parametrize("bad", [7, -1])
@pytest.mark.parametrize("name", OUTSIDE)
def test_out_of_range_raises_what_torch_raises(name, bad):
    index = torch.tensor([bad])
    with pytest.raises((IndexError, RuntimeError)) as plain:
        OUTSIDE[name](A, index)
    x = distribute_tensor(A, simulate((3,)), [Shard(0)])
    with pytest.raises(plain.type, match="out of"):
        OUTSIDE[name](x, index)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Shard(2)], ids=str)
def test_an_index_without_dims_among_others_is_no_number(placement):
    """aten puts the looked-up dims first, where x[1, :, rows] takes the one element before it looks up."""
    x, rows = seeded((4, 3, 5))[0], torch.tensor([0, 2, 4])
    spread = distribute_tensor(x, simulate(2), [placement])
    for indices in (
        [torch.tensor(1), None, rows],
        [torch.tensor(1), None, torch.tensor(3)],
        [rows % 4, None, torch.tensor(3)],
    ):
        want, got = torch.ops.aten.index(x, indices), torch.ops.aten.index(spread, indices)
        assert torch.equal(got.full_tensor(), want) and got.stride() == want.stride()
    assert torch.equal(spread[torch.tensor(1), :, rows].full_tensor(), x[torch.tensor(1), :, rows])


@pytest.mark.parametrize(
    "x, index",
    [
        (torch.ones(3).as_strided((1, 1, 3), (1, 1, 1)), torch.zeros(1, 2, dtype=torch.long)),
        (torch.ones(8).as_strided((1, 2, 2, 2), (1, 2, 4, 1)), torch.tensor([1, 0]).as_strided((2, 1, 1), (1, 1, 1))),
    ],
)
def test_strides_of_look_ups_where_dims_have_size_1(x, index):
    want = torch.ops.aten.index(x, [None, index])
    result = torch.empty(want.shape, device="meta")
    of_index(result, x, [None, index])
    assert result.stride() == want.stride()
