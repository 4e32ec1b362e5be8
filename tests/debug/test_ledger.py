"""The ledger lists what is communicated: op, collective, axis, bytes, the user's line, the pass and the reason."""

import threading
from pathlib import Path

import pytest
import torch

from shardwise import Partial, Replicate, Shard, distribute_tensor, simulate
from shardwise.debug import ledger
from tests.workers import device_mesh, run_ranks

R, P = Replicate(), Partial()
HERE = Path(__file__)


def line_of(text):
    """file:line of the one line of this file that ends in the mark."""
    lines = [i for i, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# {text}")]
    assert len(lines) == 1
    return f"{HERE}:{lines[0]}"


def moved(mesh, shape, source, target):
    """The entries of one redistribute of a float32 tensor."""
    x = distribute_tensor(torch.ones(shape), mesh, source)
    with ledger() as log:
        x.redistribute(placements=target)
    return [(e.kind, e.axis, e.bytes) for e in log]


# 4 ranks, float32: (7, 5) is 140 bytes and is cut 2, 2, 2, 1; (8, 8) is 256 bytes.
MOVES = [
    ((7, 5), [Shard(0)], [R], "all_gather", 3 * 140),  # each rank receives what it does not hold
    ((8, 8), [P], [R], "all_reduce", 4 * (2 * 3 * 256 // 4)),  # a ring: 2 (k - 1) / k of the tensor a rank
    ((8, 8), [P], [Shard(1)], "reduce_scatter", 4 * 3 * 64),
    ((8, 8), [Shard(0)], [Shard(1)], "all_to_all", 4 * 3 * 16),
]


@pytest.mark.parametrize("shape, source, target, kind, total", MOVES)
def test_bytes_of_each_collective(shape, source, target, kind, total):
    assert moved(simulate(4), shape, source, target) == [(kind, "0", total)]


def on_gloo(rank, world_size):
    return [moved(device_mesh((4,)), *case[:3]) for case in MOVES]


def test_a_process_counts_its_own_bytes():
    ranks = run_ranks(on_gloo, 4)
    for i, (*_, kind, total) in enumerate(MOVES):
        entries = [rank[i] for rank in ranks]
        assert all(len(e) == 1 and e[0][0] == kind for e in entries)
        assert sum(e[0][2] for e in entries) == total
    assert [rank[0][0][2] for rank in ranks] == [100, 100, 100, 120]  # the last rank holds least, so receives most


def test_axes_of_a_2d_mesh():
    mesh = simulate((2, 3), axis_names=("dp", "tp"))
    assert moved(mesh, (6, 4), [Shard(0), R], [R, R]) == [("all_gather", "dp", 6 * 48)]
    assert moved(mesh, (6, 4), [R, Shard(0)], [R, R]) == [("all_gather", "tp", 6 * 64)]
    both = moved(mesh, (6, 6), [Shard(0), Shard(1)], [R, R])
    assert [(kind, axis) for kind, axis, _ in both] == [("all_gather", "dp+tp")]


@pytest.mark.parametrize(
    "source, target", [([R], [Shard(0)]), ([R], [P]), ([Shard(0)], [Shard(0)])], ids=["slice", "to partial", "same"]
)
def test_nothing_moves_nothing_recorded(source, target):
    assert moved(simulate(4), (8, 4), source, target) == []


def test_a_mesh_of_one_is_silent():
    assert moved(simulate(1), (8, 4), [Shard(0)], [R]) == []


def test_forward_and_backward_of_a_parallel_linear():
    mesh = simulate((2, 2), axis_names=("dp", "tp"))
    x = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0), R]).requires_grad_()
    w = distribute_tensor(torch.ones(6, 8), mesh, [R, Shard(0)]).requires_grad_()
    with ledger() as log:
        y = torch.nn.functional.linear(x, w)  # the linear
        assert len(log) == 0
        y = y.redistribute(placements=[Shard(0), R])  # the gather
        assert len(log) == 1
        y.sum().backward()
    forward, backward = [e for e in log if not e.backward], [e for e in log if e.backward]
    assert [(e.op, e.kind, e.axis, e.source) for e in forward] == [
        ("redistribute", "all_gather", "tp", line_of("the gather"))
    ]
    found = {(e.op, e.kind, e.axis, e.bytes, e.source) for e in backward}
    assert found == {
        ("linear", "all_reduce", "tp", 4 * 64, line_of("the linear")),  # of x's gradient, 2 x 8 a rank
        ("linear", "all_reduce", "dp", 4 * 96, line_of("the linear")),  # of w's gradient, 3 x 8 a rank
    }
    assert log.total_bytes == sum(e.bytes for e in log)


def test_forward_inside_backward_outside():
    x = distribute_tensor(torch.ones(8), simulate(4), [Partial()]).requires_grad_()
    with ledger() as log:
        y = x.redistribute(placements=[Shard(0)])
    y.sum().backward()
    assert [e.backward for e in log] == [False]


def test_nested_ledgers():
    x = distribute_tensor(torch.ones(8), simulate(4), [Shard(0)])
    with ledger() as outer:
        x.full_tensor()
        with ledger() as inner:
            x.redistribute(placements=[R])
        x.full_tensor()
    x.full_tensor()
    assert [e.op for e in outer] == ["full_tensor", "redistribute", "full_tensor"]
    assert [e.op for e in inner] == ["redistribute"]
    assert inner[0] is not outer[0] and inner[0] == outer[1]


def test_closed_after_an_error():
    x = distribute_tensor(torch.ones(8), simulate(4), [Shard(0)])
    log = ledger()
    with pytest.raises(KeyError), log:
        raise KeyError
    x.full_tensor()
    assert len(log) == 0


def test_other_threads_are_not_heard():
    x = distribute_tensor(torch.ones(8), simulate(4), [Shard(0)])
    with ledger() as log:
        thread = threading.Thread(target=x.full_tensor)
        thread.start()
        thread.join()
    assert len(log) == 0


@torch.library.custom_op("shardwise_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)


def test_reason_of_an_op_without_a_rule():
    x = distribute_tensor(torch.arange(8.0), simulate(4), [Shard(0)])
    with ledger() as log:
        y = doubled(x)
    assert y.full_tensor().tolist() == (torch.arange(8.0) * 2).tolist()
    assert [(e.kind, e.reason) for e in log] == [
        ("all_gather", "gather, since there is no rule for it, and compute it on every rank")
    ]
    assert "doubled" in log[0].op


def test_asked_for_communication_has_no_reason():
    with ledger() as log:
        distribute_tensor(torch.ones(8), simulate(4), [Shard(0)]).full_tensor()
    assert log[0].reason == ""


def test_table_and_repr(monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")  # wide enough for the path of this file, wherever it is
    x = distribute_tensor(torch.ones(1000), simulate(4), [Shard(0)])
    with ledger() as log:
        for _ in range(3):
            x.full_tensor()
    assert log.table().row_count == 1
    text = repr(log)
    assert text.startswith("3 communications, 36,000 bytes\n")
    for word in ("full_tensor", "all_gather", "forward", " 3 ", "36,000", "test_ledger.py"):
        assert word in text
    assert "reason" not in text  # there is none
    assert repr(ledger()) == "0 communications, 0 bytes"


def test_repr_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    x = distribute_tensor(torch.ones(8, 4), simulate((2, 2), axis_names=("data", "tensor")), [Shard(0), Shard(1)])
    with ledger() as log:
        x.redistribute(placements=[Shard(1), Shard(0)])
    lines = repr(log).splitlines()
    assert max(map(len, lines)) <= 80
    letters = "".join(line.split("│")[7].strip() for line in lines if line.startswith("│"))
    assert letters == log[0].source  # folded, not cut off


def test_gradients_that_come_in_are_backward():
    x = distribute_tensor(torch.ones(4), simulate(2), [R]).requires_grad_()
    with ledger() as log:
        x.to_local(grad_placements=[P]).sum().backward()
        x.full_tensor(grad_placements=[P]).sum().backward()
    assert [(e.op, e.kind, e.backward) for e in log] == [
        ("to_local", "all_reduce", True),
        ("full_tensor", "all_reduce", True),
    ]
