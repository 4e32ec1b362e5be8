"""What is handed to a backend's own collectives."""

import pytest
import torch

from shardwise import Partial, Replicate, Shard, simulate
from shardwise.comm.messages import Along
from shardwise.layout import Layout
from shardwise.mesh import as_mesh
from shardwise.move.planner import plan_steps
from shardwise.move.transfer import _by_peer


@pytest.mark.parametrize(
    "shape, dim, in_order",
    [((8, 3), 0, True), ((8,), 0, True), ((3, 8), 1, False), ((1, 8, 2), 1, True), ((2, 8, 2), 1, False)],
)
def test_a_reduce_scatter_takes_memory_as_it_is_where_the_parts_follow_each_other(shape, dim, in_order):
    mesh = as_mesh(simulate((4, 2)))
    src = Layout.make(mesh, [Partial(), Replicate()], shape, torch.float32)
    (step,) = plan_steps(src, src.replace(placements=[Shard(dim), Replicate()]))
    me = (2, 1)
    along = Along(tuple(step.peers(me)), (0, 2, 4, 6), None, "nccl")
    regions, found = _by_peer(step, me, along, shape)
    assert found == in_order
    assert [region[dim] for region in regions] == [((2 * i, 2 * i + 2),) for i in range(4)]
