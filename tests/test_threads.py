"""A rank may be a thread: nothing process-global knows which rank this is. And threads may each have a simulated mesh."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shardwise import CommError, Replicate, Shard, clear_caches, debug, distribute_tensor, init_device_mesh, simulate
from tests.thread_ranks import run_threads
from tests.values import seeded
from tests.workers import device_mesh, run_ranks


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


def simulated(i):
    """Turns under autocast, in inference mode and with gradients, whose backward pass runs in another thread."""
    mesh = simulate([(4,), (2, 3)][i % 2])
    layouts = [Shard(i % 2), *[Replicate()] * (mesh.ndim - 1)], [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    call = lambda x, w: torch.cat([(y := torch.nn.functional.linear(x, w).cumsum(1)), y[1:3] * 2]).softmax(0)  # noqa: E731
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    for turn, mode in enumerate((torch.enable_grad(), autocast, torch.inference_mode()) * 2):
        values = seeded((5, 6), (7, 6), seed=turn, dtype=torch.float32)
        leaves = [v.clone().requires_grad_() for v in values]
        mine = [distribute_tensor(v, mesh, p).requires_grad_() for v, p in zip(values, layouts, strict=True)]
        with mode:
            want, got = call(*leaves), call(*mine)
        assert got.dtype == want.dtype and got.is_inference() == want.is_inference()
        close = {"rtol": 0.05, "atol": 0.05} if mode is autocast else {}
        torch.testing.assert_close(got.detach().full_tensor(), want.detach(), **close)
        if want.requires_grad:
            want.float().sin().sum().backward()
            with ThreadPoolExecutor(1) as another:
                another.submit(got.float().sin().sum().backward).result()
            for a, b in zip(mine, leaves, strict=True):
                torch.testing.assert_close(a.grad.full_tensor(), b.grad, **close)
    return True


def test_simulated_meshes_in_threads():
    clear_caches()
    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(simulated, range(6)))


def two_threads_of_rank_0(rank, world_size):
    """Which of two threads comes first is chance: the second is refused, and the first gets its value."""
    x = distribute_tensor(torch.arange(8.0), device_mesh((world_size,), ("dp",)), [Shard(0)], src_data_rank=None)
    assert torch.equal(x.full_tensor(), torch.arange(8.0))
    if rank == 1:
        time.sleep(1.0)
        return x.full_tensor().tolist()
    with ThreadPoolExecutor(1) as pool:
        first, started = pool.submit(x.full_tensor), threading.Event()
        started.wait(0.3)
        with pytest.raises(CommError, match="another thread is in full_tensor: all_gather on mesh axis 'dp'"):
            x.redistribute(placements=[Replicate()])
        return first.result().tolist()


def test_two_threads_do_not_take_each_others_values():
    everyone = run_ranks(two_threads_of_rank_0, 2)
    assert everyone == [list(range(8))] * 2
