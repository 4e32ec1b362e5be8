"""The small net of data_net, fully sharded block by block, for the tests of fully_shard."""

import functools

import torch

from shardwise import RankTensor, Shard, distribute_tensor
from shardwise.mesh import as_mesh
from shardwise.parallel import fully_shard
from tests.parallel.data_net import batch, loss_of

MESHES = [((4,), ("dp",)), ((1,), ("dp",)), ((2, 3), ("copies", "parts")), ((3, 1), ("copies", "parts"))]


def sharded(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def feed(value, mesh, typed=False):
    """Each rank's rows of a batch: over all axes of the mesh, however many."""
    if typed:
        return distribute_tensor(value, mesh, [Shard(0)] * mesh.ndim)
    comm = as_mesh(mesh).comm
    parts = value.chunk(mesh.size())
    numbers = [functools.reduce(lambda n, i: n * mesh.size(i) + c[i], range(mesh.ndim), 0) for c in comm.coords_here()]
    return RankTensor([parts[n] for n in numbers]) if comm.simulated else parts[numbers[0]]


def loss_on(model, mesh, step=0, typed=False):
    return loss_of(model, *(feed(v, mesh, typed) for v in batch(step)))


def steps(model, mesh, typed=False, count=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(count):
        optimizer.zero_grad()
        loss_on(model, mesh, step, typed).backward()
        optimizer.step()
    return model
