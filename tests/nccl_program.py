"""What test_nccl.py runs on every NCCL rank: moves, training and errors next to one device. Prints one word when done.

The ranks may share one GPU (see test_nccl.py). Run by hand: torchrun --nproc-per-node 4 -m tests.nccl_program
"""

import copy
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn

from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.errors import LayoutError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, data_parallel, fully_shard, parallelize_module


def moves(mesh):
    """From every layout to every other on two axes; sizes are uneven, and one is below the number of ranks."""
    ways = [Replicate(), Shard(0), Shard(1), Partial()]
    for shape in ((5, 7), (1, 3)):
        x = torch.arange(shape[0] * shape[1], dtype=torch.float64, device="cuda").reshape(shape)
        for source, target in itertools.product(itertools.product(ways, repeat=2), repeat=2):
            placed = distribute_tensor(x, mesh, [w if w != Partial() else Replicate() for w in source])
            moved = placed.redistribute(placements=source).redistribute(placements=target)
            if not torch.equal(moved.full_tensor(), x):
                raise AssertionError(f"{shape}: {source} -> {target} gives {moved.full_tensor()}")


def asynchronous(mesh):
    """Moves that are under way while other work is queued on the stream."""
    x = torch.randn(64, 33, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    placed = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    for _ in range(20):
        begun = placed.redistribute(placements=[Replicate(), Replicate()], async_op=True)
        torch.randn(512, 512, device="cuda").mm(torch.randn(512, 512, device="cuda"))
        torch.testing.assert_close(begun.to_local(), x)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 16), nn.GELU(), nn.Linear(16, 9), nn.Tanh()).double().cuda()


def train(model, rows):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        x = torch.randn(8, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).cuda()
        model(rows(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in found]


def training(mesh):
    dp, tp = mesh["dp"], mesh["tp"]
    want = train(build(), lambda x: x)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    mine = lambda x: x.chunk(dp.size())[dp.get_local_rank()]  # noqa: E731
    both = parallelize_module(build(), tp, plan)
    for layer in (both[0], both[2]):
        fully_shard(layer, mesh=dp)
    models = {
        "tensor parallel": (parallelize_module(build(), tp, plan), lambda x: x),
        "fully_shard over tensor parallel": (fully_shard(both, mesh=dp), mine),
    }
    for shard in ("none", "optimizer", "gradients", "parameters"):
        models[f"data_parallel {shard}"] = data_parallel(build(), dp, shard), mine
    for name, (model, rows) in models.items():
        for got, expected in zip(train(model, rows), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def errors(mesh):
    """A bad call raises on every rank, and the group is as good as before."""
    x = distribute_tensor(torch.ones(4, 4, device="cuda"), mesh, [Shard(0), Replicate()])
    try:
        x.redistribute(placements=[Shard(5), Replicate()])
    except (LayoutError, IndexError):
        pass
    else:
        raise AssertionError("Shard(5) of a matrix was accepted")
    assert copy.copy(x).sum().full_tensor().item() == 16


def main():
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    for check in (moves, asynchronous, training, errors):
        check(mesh)
    dist.barrier()
    dist.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    main()
