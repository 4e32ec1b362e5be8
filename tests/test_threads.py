"""A rank may be a thread: nothing process-global knows which rank this is."""

import torch

from shardwise import Replicate, Shard, debug, distribute_tensor, init_device_mesh
from tests.harness import seeded
from tests.thread_ranks import run_threads


def program():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, up, down = seeded((5, 6), (7, 6), (6, 7))
    leaves = [t.clone().requires_grad_() for t in (x, up, down)]
    (torch.relu(leaves[0] @ leaves[1].t()) @ leaves[2].t()).square().mean().backward()
    mine = [
        distribute_tensor(t, mesh, p, src_data_rank=None).requires_grad_()
        for t, p in zip(
            (x, up, down), ([Shard(0), Replicate()], [Replicate(), Shard(0)], [Replicate(), Shard(1)]), strict=True
        )
    ]
    with debug.ledger() as log:
        (torch.relu(mine[0] @ mine[1].t()) @ mine[2].t()).square().mean().backward()
    for a, b in zip(mine, leaves, strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)
    return [(e.op, e.kind, e.axis, e.bytes) for e in log]


def test_ranks_as_threads():
    assert all(run_threads(program, 4))  # every rank kept a ledger of its own
