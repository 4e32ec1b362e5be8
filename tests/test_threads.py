"""A rank may be a thread: nothing process-global knows which rank this is. And threads may each have a simulated mesh."""

from concurrent.futures import ThreadPoolExecutor

import torch

from shardwise import Replicate, Shard, clear_caches, debug, distribute_tensor, init_device_mesh, simulate
from tests.thread_ranks import run_threads
from tests.values import seeded


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
