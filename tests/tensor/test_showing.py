"""What `print` shows of distributed tensors: the values once, as torch prints them, and where they live."""

import re
import time

import pytest
import torch

from shardwise import DTensor, Partial, RankTensor, Replicate, Shard, debug, distribute_tensor, outline, simulate
from shardwise.comm.shown import numbers_of, picked
from tests.workers import device_mesh, run_ranks

R = Replicate()
MANY = simulate((32, 32))
LINE = simulate(1024)
GRID = simulate((2, 4), axis_names=("dp", "tp"))


def body(text, kind):
    """The values in a repr: what is between the class and the first fact, at torch's indentation."""
    text = text.removeprefix(kind)
    return re.split(r",\s+(?:shape|dtype|size)=|\)$", text)[0]


VALUES = {
    "floats": torch.linspace(-3, 9, 15).view(5, 3),
    "whole floats": torch.arange(15.0).view(5, 3),
    "wide floats": torch.tensor([[1e-9, 3.0], [2e7, -1.0]]).repeat(15, 2),
    "odd floats": torch.tensor([float("nan"), float("inf"), -float("inf"), 1.5, 0.0]).repeat(9),
    "zeros": torch.zeros(7, 9),
    "ints": torch.arange(-50, 50).view(10, 10),
    "bools": torch.arange(60).view(6, 10) % 3 == 0,
    "halves": torch.linspace(0, 1, 64).half().view(8, 8),
    "bfloat16": torch.linspace(-100, 1, 64).bfloat16().view(8, 8),
    "complex": torch.randn(3, 4, dtype=torch.complex64),
    "a number": torch.tensor(2.5),
    "nothing": torch.zeros(0, 3),
    "large": torch.randn(200, 300),
    "long": torch.arange(5000),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_printed_as_torch_prints_them(name):
    value = VALUES[name]
    places = [[R, R]] + ([[Shard(0), Shard(value.ndim - 1)], [R, Shard(0)], [Shard(0), Shard(0)]] if value.ndim else [])
    for placements in places:
        shown = repr(distribute_tensor(value, GRID, placements))
        expected = body(repr(value), "tensor(").replace("\n ", "\n  ")
        assert body(shown, "DTensor(") == expected, shown
        assert shown.count("\n") == expected.count("\n") + 2
        facts = [line.strip() for line in shown.splitlines()[-2:]]
        assert facts[0] == f"shape={tuple(value.shape)}, dtype={value.dtype},"
        assert facts[1].startswith("placements=[") and facts[1].endswith("mesh=mesh(dp=2, tp=4))")


def test_pieces_out_of_order():
    rows = [[[(2, 3)], [(0, 2)], [], []], [[(6, 7)], [], [(0, 2)], [(2, 6)]]]
    x = distribute_tensor(torch.arange(10), GRID, [Shard(0, sizes=(3, 7)), Shard(0, pieces=rows)])
    assert repr(x).startswith("DTensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9],\n")


def test_print_options_are_obeyed():
    x = distribute_tensor(torch.arange(2000.0) / 3, GRID, [Shard(0), R])
    before = torch._tensor_str.PRINT_OPTS
    kept = (before.precision, before.threshold, before.edgeitems, before.linewidth)
    try:
        torch.set_printoptions(precision=2, edgeitems=1)
        assert repr(x).startswith("DTensor([  0.00,  ..., 666.33],\n")
        torch.set_printoptions(threshold=10_000)
        assert repr(x).count("\n") > 100 and "..." not in repr(x)
    finally:
        torch.set_printoptions(precision=kept[0], threshold=kept[1], edgeitems=kept[2], linewidth=kept[3])


MADE = {
    "numbers": lambda: distribute_tensor(torch.arange(1000.0), LINE, [Shard(0)]),
    "some numbers": lambda: distribute_tensor(torch.randn(250), LINE, [Shard(0)]),
    "a column": lambda: distribute_tensor(torch.randn(1000, 1), LINE, [Shard(0)]),
    "a matrix": lambda: distribute_tensor(torch.randn(1024, 1024), MANY, [Shard(0), Shard(1)]),
    "a small matrix": lambda: distribute_tensor(torch.randn(30, 30), MANY, [Shard(1), Shard(0)]),
    "3 dims": lambda: distribute_tensor(torch.randn(40, 40, 40), MANY, [Shard(0), Shard(2)]),
    "5 dims": lambda: distribute_tensor(torch.randn(6, 6, 6, 6, 6), MANY, [Shard(3), Shard(1)]),
    "7 dims": lambda: distribute_tensor(torch.randn(3, 3, 3, 3, 3, 3, 3), MANY, [Shard(3), Shard(1)]),
    "parts": lambda: DTensor.from_local(torch.randn(30, 30), MANY, [Partial(), Shard(0)]),
    "a parameter": lambda: torch.nn.Parameter(distribute_tensor(torch.randn(34, 3), MANY, [Shard(1), Shard(0)])),
    "uneven": lambda: DTensor.from_local(RankTensor([torch.randn(i % 5, 3) for i in range(1024)]), LINE, [Shard(0)]),
}


@pytest.mark.parametrize("name", MADE)
def test_few_lines_and_little_time_on_1024_ranks(name):
    x = MADE[name]()
    for shown in (x, x.to_local(), x.layout):
        best = 1.0
        for _ in range(20):
            started = time.thread_time()  # of this thread: others may be busy
            text = repr(shown)
            best = min(best, time.thread_time() - started)
        assert text.count("\n") < 40 and len(text) < 5000, text
        assert best < 0.025, (best, text)  # 5 ms on a quiet machine; what grows with the ranks takes far longer


def test_a_pending_sum_says_so():
    loss = distribute_tensor(torch.ones(4, 4), GRID, [Shard(0), Shard(1)]).sum()
    assert repr(loss) == (
        "DTensor(2.,\n        rank 0's part of a pending sum over 'dp' and 'tp' (8 parts);\n"
        "        .full_tensor() gives the value,\n        shape=(), dtype=torch.float32,\n"
        "        placements=[Partial(sum), Partial(sum)], mesh=mesh(dp=2, tp=4))"
    )
    with debug.ledger() as log:
        print(loss, loss.to_local(), loss.layout)
    assert not len(log)


@pytest.mark.parametrize("width", [72, 80, 200])
def test_lines_are_as_long_as_torch_is_told(width):
    x = distribute_tensor(torch.zeros(64, 64), GRID, [Shard(0), Shard(1)]).requires_grad_()
    torch.set_printoptions(linewidth=width)
    try:
        shown = [repr(x), repr(x.sum()), repr(torch.nn.Parameter(x.detach()))]
    finally:
        torch.set_printoptions(profile="default")
    for text in shown:
        placed = [line for line in text.splitlines() if "placements=" in line]
        assert len(placed) == 1 and "mesh=mesh(dp=2, tp=4)" in placed[0]  # the two stay in one line
        others = [line for line in text.splitlines() if line not in placed]
        assert max(map(len, [*others, *placed])) <= width, text


def test_a_pending_sum_of_many_dims_fits_into_80_columns():
    x = distribute_tensor(torch.zeros(12, 11, 10, 9), simulate((2, 2, 2)), [Partial()] * 3)
    lines = [line for line in repr(x).splitlines() if "placements=" not in line]
    assert "        rank 0's part at [0:12, 0:11, 0:10, 0:9]" in lines
    assert "        of a pending sum over '0' and '1' and '2' (8 parts);" in lines
    assert max(map(len, lines)) <= 80


def test_a_sub_mesh_says_whose_values_are_shown():
    parts = RankTensor([torch.full((1,), float(rank)) for rank in range(8)])
    shown = repr(DTensor.from_local(parts, GRID["tp"], [Shard(0)]))
    assert "DTensor([0., 1., 2., 3.],\n        the values of ranks 0, 1, 2, 3; the other group of this sub-mesh may hold others,\n" in shown
    assert "may hold" not in repr(distribute_tensor(torch.ones(3), GRID, [R, Shard(0)]))


def test_a_tensor_inside_of_transforms_and_without_values():
    x = distribute_tensor(torch.randn(4, 3), GRID, [Shard(0), R])
    seen = []
    torch.func.grad(lambda t: (seen.append(repr(t)), t.square().sum())[1])(x)
    assert "shape=(4, 3)" in seen[0]
    assert repr(distribute_tensor(torch.ones(2), simulate(2, device="meta"), [Shard(0)])).startswith("DTensor(...,")


def test_rank_tensors():
    local = distribute_tensor(torch.arange(5), simulate(4), [Shard(0)]).to_local()
    assert (
        repr(local)
        == "RankTensor of 4 ranks: (2,) on ranks 0, 1, (1,) on rank 2, (0,) on rank 3; .ranks[0] is\ntensor([0, 1])"
    )


def test_long_ledgers_are_abbreviated():
    x = distribute_tensor(torch.ones(8), simulate(4), [Shard(0)])
    lines = "\n".join(f"x.redistribute(placements=[R])  # {i}" for i in range(50))
    with debug.ledger() as log:
        exec(compile(lines, "long.py", "exec"), {"x": x, "R": R, "__name__": "long"})
    assert repr(log).count("\n") < 40 and "20 more rows" in repr(log) and log.table().row_count == 50


def shown_on_processes(rank, world_size):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    x = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0), R], src_data_rank=None)
    with debug.ledger() as log:
        found = [repr(t) for t in (x, x.redistribute(placements=[R, R]), x.sum(), x[:1])]
        late = x.redistribute(placements=[R, Shard(1)], async_op=True)
        found.append(repr(late))
        late.wait()
    return found, len(log)


def test_on_processes_the_local_part_is_shown():
    everyone = run_ranks(shown_on_processes, 4)
    for rank, ((x, whole, total, row, late), communications) in enumerate(everyone):
        first = rank // 2 * 2
        assert f"rank {rank} holds [{first}:{first + 2}, 0:3],\n" in x
        assert whole.startswith("DTensor([[ 0.,  1.,  2.],\n         [ 3.,  4.,  5.],\n") and "holds" not in whole
        assert f"rank {rank}'s part of a pending sum over 'dp' (2 parts);\n        .full_tensor() gives" in total
        assert f"rank {rank} holds {'[0:1, 0:3]' if rank < 2 else 'no elements'}" in row
        assert "the values are on their way here" in late
        assert communications == 2  # the two moves


def test_the_corners_are_the_right_ones():
    value = torch.arange(7 * 9 * 11).view(7, 9, 11)
    shown = numbers_of((7, 9, 11), lambda wanted: picked(value, wanted), 7)
    assert shown.startswith("[[[  0,   1,  ...,   9,  10],") and shown.endswith("[682, 683,  ..., 691, 692]]]")


def test_without_values():
    mesh = outline((64, 2), play=3)
    for value, places in (
        (torch.ones(128, 2), [Shard(0), R]),
        (torch.ones(3), [R, R]),
        (torch.ones(()), [Partial(), R]),
    ):
        for x in (distribute_tensor(value, mesh, places), distribute_tensor(value, mesh, places).requires_grad_()):
            assert repr(x).startswith("DTensor(...,\n") and f"shape={tuple(x.shape)}" in repr(x)
