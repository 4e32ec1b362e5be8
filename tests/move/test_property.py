"""Random layouts to random layouts on random meshes: values, gradients, and a plan that says exactly what happens."""

import random
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise import DTensor, plan_move
from shardwise.comm.messages import ALL_GATHER
from shardwise.comm.record import Recorder
from tests.layout.brute import deal, grid
from tests.move.cases import all_parts, check_holds, source
from tests.move.test_moves_gloo import check_gradients
from tests.workers import device_mesh, run_ranks

MESHES = ((2,), (3,), (5,), (2, 2), (2, 3), (3, 2), (1, 4), (2, 2, 2), (2, 1, 3), (3, 2, 2))
OPS = (("sum",), ("sum", "avg"), ("max",), ("min",), ())


def draw(seed, meshes=MESHES):
    """A pair of layouts of one tensor."""
    rng = random.Random(seed)
    mesh_shape = rng.choice(meshes)
    shape = tuple(rng.choice((0, 1, 2, 3, 5, 8, 13)) for _ in range(rng.choice((0, 1, 2, 2, 2, 3))))
    src, dst = (deal(rng, mesh_shape, shape, partial_ops=rng.choice(OPS)) for _ in range(2))
    return src, dst


def received(heard):
    return sum(entry.bytes for entry in heard)


@pytest.mark.parametrize("block", range(20))
def test_simulated(block):
    for seed in range(block * 100, block * 100 + 100):
        src, dst = draw(seed)
        plan, heard = plan_move(src.layout(), dst.layout()), []
        given = source(src, requires_grad=True, seed=seed)
        recorder = Recorder(heard.append)
        recorder.open()
        try:
            moved = given.on(src).redistribute(placements=dst.placements)
        finally:
            recorder.close()
        check_holds([v.detach() for v in moved.to_local().ranks], dst, given.whole.detach())
        extremes = any(p.is_partial("max") or p.is_partial("min") for p in src.placements)
        ranks = range(len(grid(src.mesh_shape)))
        if not extremes:  # their gradient wants to know who shares it, which a plan for values does not say
            assert received(heard) == sum(map(plan.bytes_in, ranks)) == sum(map(plan.bytes_out, ranks)), (src, dst)
        assert sum(map(plan.bytes_in, ranks)) >= sum(map(plan.lower_bound, ranks)), (src, dst)
        full = moved.full_tensor()
        weight = torch.rand(full.shape, dtype=full.dtype, generator=torch.Generator().manual_seed(seed))
        (found,) = torch.autograd.grad((full.sin() * weight).sum(), given.root, retain_graph=True)
        (expected,) = torch.autograd.grad((given.whole.sin() * weight).sum(), given.root)
        torch.testing.assert_close(found, expected)


class Counted:
    """Counts the bytes this rank gets from others, at torch.distributed's own functions."""

    def __init__(self):
        self.bytes = 0
        self.real = {n: getattr(dist, n) for n in ("all_to_all_single", ALL_GATHER, "all_reduce")}
        self.receive = dist.ProcessGroup.recv

    def all_to_all_single(self, out, given, sizes=None, counts=None, group=None, **how):
        me = dist.get_rank(group)
        self.bytes += (sum(sizes) - sizes[me]) * out.element_size()
        return self.real["all_to_all_single"](out, given, sizes, counts, group=group, **how)

    def all_gather(self, out, given, group=None, **how):
        self.bytes += out.nbytes - given.nbytes
        return self.real[ALL_GATHER](out, given, group=group, **how)

    def all_reduce(self, x, op=dist.ReduceOp.SUM, group=None, **how):
        k = dist.get_world_size(group)
        self.bytes += 2 * (k - 1) * x.nbytes // k
        return self.real["all_reduce"](x, op, group=group, **how)

    def __enter__(self):
        self.stack = ExitStack()
        for name, stand_in in (
            ("all_to_all_single", self.all_to_all_single),
            (ALL_GATHER, self.all_gather),
            ("all_reduce", self.all_reduce),
        ):
            self.stack.enter_context(mock.patch.object(dist, name, stand_in))
        counted = self

        def recv(group, tensors, *args):
            counted.bytes += sum(x.nbytes for x in tensors)
            return counted.receive(group, tensors, *args)

        self.stack.enter_context(mock.patch.object(dist.ProcessGroup, "recv", recv))
        return self

    def __exit__(self, *exc):
        self.stack.close()


def on_processes(rank, world_size, meshes, seeds):
    for seed in seeds:
        src, dst = draw(seed, meshes)
        mesh = device_mesh(src.mesh_shape)
        coords = grid(src.mesh_shape)[rank]
        parts = all_parts(src, seed=seed)
        local = parts.at(coords)
        x = DTensor.from_local(local, mesh, src.placements, shape=src.shape)
        plan = plan_move(x.layout, x.layout.replace(placements=dst.placements))
        with Counted() as counted:
            x.redistribute(placements=dst.placements)
        assert counted.bytes == plan.bytes_in(rank), (seed, counted.bytes, plan)
        x = DTensor.from_local(local.requires_grad_(), mesh, src.placements, shape=src.shape)
        moved = x.redistribute(placements=dst.placements)
        assert tuple(moved.to_local().shape) == dst.local_shape(coords)
        check_gradients(parts, coords, local, moved.full_tensor())
    return True


@pytest.mark.parametrize("block", range(4))
def test_processes(block):
    meshes = ((4,), (2, 2), (4, 1), (1, 2, 2))
    seeds = range(10_000 + block * 50, 10_050 + block * 50)
    assert run_ranks(on_processes, 4, meshes, seeds) == [True] * 4
