"""Pictures of layouts."""

import contextlib
import io

import pytest
import torch

from shardwise import LayoutError, Partial, Replicate, Shard, distribute_tensor, simulate
from shardwise.debug import visualize_sharding
from tests.workers import device_mesh, run_ranks

R = Replicate()


def picture(mesh, shape, placements, **options):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        visualize_sharding(distribute_tensor(torch.zeros(shape), mesh, placements), **options)
    return out.getvalue().splitlines()


GRID = simulate((2, 2), axis_names=("dp", "tp"))


def test_rows():
    assert picture(simulate(4), (7, 5), [Shard(0)], header="weight") == [
        "weight",
        "shape (7, 5), placements [S(0)], mesh(0=4)",
        "         Col 0-4",
        "-------  -------",
        "Row 0-1  rank 0",
        "Row 2-3  rank 1",
        "Row 4-5  rank 2",
        "Row 6    rank 3",
    ]


def test_blocks():
    assert picture(GRID, (4, 6), [Shard(0), Shard(1)])[1:] == [
        "         Col 0-2  Col 3-5",
        "-------  -------  -------",
        "Row 0-1  rank 0   rank 1",
        "Row 2-3  rank 2   rank 3",
    ]


def test_replicas_share_a_cell():
    assert picture(GRID, (4, 6), [R, Shard(1)])[1:] == [
        "         Col 0-2     Col 3-5",
        "-------  ----------  ----------",
        "Row 0-3  ranks 0, 2  ranks 1, 3",
    ]


def test_parts_say_so_in_the_placements():
    lines = picture(GRID, (4, 6), [Partial(), Shard(1)])
    assert lines[0] == "shape (4, 6), placements [P(sum), S(1)], mesh(dp=2, tp=2)"
    assert lines[-2:] == ["Row 0-3  Σ ranks 0, 2  Σ ranks 1, 3", "not reduced yet (Σ): P(sum) on 'dp'"]


def test_one_dim_and_ranks_that_hold_nothing():
    assert picture(simulate(4), (5,), [Shard(0, sizes=(2, 0, 3, 0))])[1:] == [
        "Row 0-1  Row 2-4",
        "-------  -------",
        "rank 0   rank 2",
        "holding nothing: ranks 1, 3",
    ]


def test_several_pieces():
    pieces = ((((0, 2), (4, 6)), ((2, 4), (6, 7))),)
    assert picture(simulate(2), (7,), [Shard(0, pieces=pieces)])[1:] == [
        "Row 0-1  Row 2-3  Row 4-5  Row 6",
        "-------  -------  -------  ------",
        "rank 0   rank 1   rank 0   rank 1",
    ]


def test_no_dims_and_no_elements():
    assert picture(GRID, (), [R, R])[1:] == ["value", "----------------", "ranks 0, 1, 2, 3"]
    assert picture(GRID, (0, 3), [R, Shard(0)])[1:] == ["no elements"]


def test_rich():
    lines = "\n".join(picture(GRID, (4, 6), [Shard(0), Shard(1)], use_rich=True))
    assert all(f"rank {i}" in lines for i in range(4)) and "Row 2-3" in lines


def test_more_dims_are_slices():
    lines = picture(GRID, (4, 3, 2), [Shard(0), Shard(2)])
    assert [line for line in lines if line.startswith("[")] == ["[0:2, :, :]", "[2:4, :, :]"]
    assert lines[-1] == "Row 0-2  rank 2  rank 3"


def test_only_tensors_have_one():
    with pytest.raises(LayoutError, match="expected a DTensor, got Tensor"):
        visualize_sharding(torch.zeros(2))


def on_gloo(rank, world_size):
    return picture(device_mesh((2, 2), ("dp", "tp")), (4, 6), [Shard(0), R])


def test_first_rank_prints():
    first, *others = run_ranks(on_gloo, 4)
    assert first == picture(GRID, (4, 6), [Shard(0), R])
    assert others == [[], [], []]
