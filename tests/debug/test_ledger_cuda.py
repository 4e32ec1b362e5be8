"""On a GPU autograd runs backward passes on a thread of its own: ledgers and `random.use` hold there too."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Replicate, Shard, distribute_tensor, simulate
from shardwise.debug import CommDebugMode, ledger

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_is_recorded(create_graph):
    runs = []
    for device in ("cpu", "cuda"):
        mesh, threads = simulate(4, device=device), set()
        x = distribute_tensor(torch.arange(1.0, 9), mesh, [Replicate()]).requires_grad_()
        weight = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        with ledger() as log, CommDebugMode() as mode:
            y = x.redistribute(placements=[Shard(0)]) ** 3
            y.register_hook(lambda grad, threads=threads: threads.add(threading.get_ident()))
            (grad,) = torch.autograd.grad((y * weight).sum(), x, create_graph=create_graph)
            if create_graph:
                grad.sum().backward()
        assert (threading.get_ident() in threads) == (device == "cpu")
        runs.append(([(e.op, e.kind, e.bytes, e.backward) for e in log], mode.get_total_counts()))
    assert runs[0] == runs[1] and any(backward for *_, backward in runs[0][0])


@pytest.mark.parametrize("stream", ["philox", "torch"])
def test_checkpointing_draws_from_the_same_stream(stream):
    mesh, grads = simulate(2, device="cuda"), []
    with shardwise.random.use(stream):
        for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
            torch.manual_seed(4)
            x = shardwise.ones(64, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
            run(lambda x: F.dropout(x, 0.5) ** 2, x).sum().backward()
            grads.append(x.grad.full_tensor())
    assert torch.equal(*grads)
