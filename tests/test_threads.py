"""A rank may be a thread: nothing process-global knows which rank this is."""

import threading

import pytest
import torch
import torch.distributed as dist

from shardwise import Replicate, Shard, debug, distribute_tensor, init_device_mesh
from tests.harness import seeded

threads = pytest.importorskip(
    "torch.testing._internal.distributed.multi_threaded_pg", reason="needs torch's test tools"
)


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
    world = 4
    results, errors = {}, []
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threads._install_threaded_pg()
    try:
        store = dist.HashStore()

        def work(rank):
            try:
                dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
                results[rank] = program()
            except BaseException as error:
                errors.append((rank, error))
                threads.ProcessLocalGroup.exception_handle(error)

        running = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(timeout=60)
    finally:
        threads._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    assert not errors, errors
    assert len(results) == world and results[0]  # every rank kept a ledger of its own
