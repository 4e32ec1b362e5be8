"""The checked mode: ranks whose programs differ all raise the same error, before anything was sent, and can go on."""

import time

import pytest
import torch

from shardwise import CommError, Replicate, Shard, debug, distribute_tensor, simulate
from shardwise.errors import RanksDifferError
from shardwise.testing.faults.differences import DIFFERENCES, THE_END
from tests.workers import device_mesh, run_ranks


def differing(rank, world_size, mode):
    """For each way in which rank 2 may differ, what the ranks raise."""
    mesh = device_mesh((world_size,), ("dp",))
    x = distribute_tensor(torch.arange(72.0).view(12, 6), mesh, [Shard(0)], src_data_rank=None)
    said = {}
    for what, (usual, other) in DIFFERENCES.items():
        if what == THE_END:
            continue
        torch.manual_seed(0)
        with pytest.raises(RanksDifferError) as caught, debug.check_ranks(**mode):
            (other if rank == 2 else usual)(x)
            x.redistribute(placements=[Replicate()])
            x.redistribute(placements=[Shard(1)])
        said[what] = str(caught.value)
        assert torch.equal(x.full_tensor(), torch.arange(72.0).view(12, 6))  # the groups still work
    return said


@pytest.mark.parametrize("mode", [{}, {"lines": False}], ids=["lines", "no lines"])
def test_all_ranks_say_who_differs(mode):
    everyone = run_ranks(differing, 3, mode)
    for what, said in everyone[0].items():
        assert all(other[what] == said for other in everyone), what
        assert said.startswith("the ranks run different programs: rank 2 came to "), said
        assert (
            "; the others, ranks 0, 1, to " in said and "differences.py:" in said or "test_check_ranks.py:" in said
        ), said


def same_but_for_the_line(rank, world_size):
    """Two moves of one layout in another order: only their lines tell them apart."""
    mesh = device_mesh((world_size,), ("dp",))
    x, y = (distribute_tensor(torch.full((4, 2), v), mesh, [Shard(0)], src_data_rank=None) for v in (1.0, 2.0))
    with pytest.raises(RanksDifferError) as caught, debug.check_ranks():
        if rank == 0:
            x.redistribute(placements=[Replicate()])
            y.redistribute(placements=[Replicate()])
        else:
            y.redistribute(placements=[Replicate()])
            x.redistribute(placements=[Replicate()])
    with debug.check_ranks(lines=False):
        if rank == 0:
            x.redistribute(placements=[Replicate()])
        else:
            x.redistribute(placements=[Replicate()])
    return str(caught.value)


def test_lines():
    first, second = run_ranks(same_but_for_the_line, 2)
    assert first == second
    assert "rank 0 came to redistribute: all_gather on mesh axis 'dp' (2 ranks), Layout((4, 2) float32 [S(0)]" in first
    assert "; rank 1 came to redistribute: all_gather" in first


def going_on(rank, world_size):
    """After they all raised, the ranks go on; that one of them is slow then is nobody's fault."""
    mesh = device_mesh((world_size,), ("dp",))
    x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(RanksDifferError), debug.check_ranks():
        x.redistribute(placements=[Replicate() if rank == 0 else Shard(1)])
    for _ in range(2):
        if rank == 1:
            time.sleep(2)
        assert torch.equal(x.full_tensor(), torch.arange(8.0).view(4, 2))
    return True


def test_ranks_that_catch_it_go_on():
    assert run_ranks(going_on, 2) == [True, True]


def leaving_early(rank, world_size):
    mesh = device_mesh((world_size,), ("dp",))
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(RanksDifferError) as caught, debug.check_ranks():
        x.redistribute(placements=[Replicate()])
        if rank == 0:
            x.redistribute(placements=[Shard(1)])
    return str(caught.value)


def test_a_rank_that_leaves_the_block_early():
    first, second = run_ranks(leaving_early, 2)
    assert first == second and "rank 1 came to end on check_ranks()" in first


def waiting(rank, world_size):
    mesh = device_mesh((world_size,), ("dp",))
    x, y = (distribute_tensor(torch.full((4, n), 1.0), mesh, [Shard(0)], src_data_rank=None) for n in (1, 2))
    with pytest.raises(RanksDifferError) as caught, debug.check_ranks():
        moves = [t.redistribute(placements=[Replicate()], async_op=True) for t in (x, y)]
        for move in moves if rank == 0 else reversed(moves):
            move.wait()
    for move in moves:
        move.wait()
    return str(caught.value)


def test_waits_in_another_order():
    first, second = run_ranks(waiting, 2)
    assert first == second and "rank 0 came to the wait for redistribute" in first


def recording(rank, world_size):
    mesh = device_mesh((world_size,), ("dp",))
    weight = distribute_tensor(torch.ones(3, 2), mesh, [Replicate()], src_data_rank=None).requires_grad_()
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None)
    with debug.check_ranks(keep=2) as checked:
        x.redistribute(placements=[Replicate()])
        (x @ weight).sum().backward()
        x.redistribute(placements=[Replicate()])
    repr(checked)
    return [(m.number - checked.record[0].number, m.op, m.kind, m.backward, m.layouts) for m in checked.record]


def test_the_record():
    found = run_ranks(recording, 2)
    assert found[0] == found[1]
    assert [row[2] for row in found[0]] == ["all_gather", "end"]
    assert found[0][0][1:] == (
        "redistribute",
        "all_gather",
        False,
        "Layout((4, 3) float32 [S(0)] on mesh(dp=2)) -> [R]",
    )


def costs(rank, world_size):
    """Seconds of a training step, without and with the mode."""
    mesh = device_mesh((world_size,), ("dp",))
    weights = [distribute_tensor(torch.randn(256, 256), mesh, [Replicate()]).requires_grad_() for _ in range(4)]
    x = distribute_tensor(torch.randn(128, 256), mesh, [Shard(0)], src_data_rank=None)

    def step():
        h = x
        for weight in weights:
            h = torch.tanh(h @ weight)
        h.square().mean().backward()

    best = [1e9, 1e9]
    for _ in range(8):
        for i, mode in enumerate((None, debug.check_ranks())):
            with mode or torch.enable_grad():
                started = time.perf_counter()
                for _ in range(3):
                    step()
                best[i] = min(best[i], (time.perf_counter() - started) / 3)
    return best


def test_the_mode_is_cheap():
    plain, checked = run_ranks(costs, 2)[0]
    print(f"a training step takes {plain * 1e3:.1f} ms, checked {checked * 1e3:.1f} ms: {checked / plain:.2f} times")
    assert checked < 3 * plain  # a busy machine; alone it is below 1.5


def test_a_simulated_mesh_has_nothing_to_compare():
    x = distribute_tensor(torch.ones(4, 3), simulate(2), [Shard(0)])
    with debug.check_ranks() as checked:
        x.redistribute(placements=[Replicate()])
    assert not checked.record and isinstance(RanksDifferError("x"), CommError)
