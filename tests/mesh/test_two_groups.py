"""Two meshes of the same ranks, each with a process group of its own, used by two threads at once."""

import threading

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor
from shardwise.mesh import as_mesh
from tests.workers import run_ranks

ROUNDS = 30


def in_two_threads(rank, world_size):
    meshes = [DeviceMesh.from_group(dist.new_group(range(world_size)), "cpu") for _ in range(2)]
    assert as_mesh(meshes[0]) is not as_mesh(meshes[1])
    assert as_mesh(meshes[0]).comm.group(0) is not as_mesh(meshes[1]).comm.group(0)
    wrong, done = [], []

    def work(number, mesh):
        try:
            for i in range(ROUNDS):  # one thread is slower than the other, differently on each rank
                value = torch.arange(24.0).view(6, 4) + 1000 * number + i
                x = distribute_tensor(value, mesh, [Shard(0)]).requires_grad_()
                later = x.redistribute(placements=[Shard(1)], async_op=True)
                summed = DTensor.from_local(value / 2, mesh, [Partial()]).redistribute(placements=[Replicate()])
                torch.randn(64 * (1 + (number + rank + i) % 3), 64).mm(torch.randn(64, 64))
                (x * later.redistribute(placements=[Shard(0)])).sum().backward()
                got = later.full_tensor(), summed.full_tensor(), x.grad.full_tensor()
                for one, want in zip(got, (value, value, 2 * value), strict=True):
                    if not torch.equal(one.detach(), want):
                        wrong.append((number, i))
                assert later.device_mesh is mesh and x.grad._layout.mesh is as_mesh(mesh)
            done.append(number)
        except BaseException as error:
            wrong.append((number, repr(error)))

    threads = [threading.Thread(target=work, args=(n, mesh)) for n, mesh in enumerate(meshes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    return wrong, sorted(done)


def test_threads_with_a_group_each():
    assert run_ranks(in_two_threads, 2) == [([], [0, 1])] * 2
