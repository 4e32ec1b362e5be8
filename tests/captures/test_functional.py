"""Moves as compilers see them: plain ops and functional collectives, on even and uneven layouts, with eager bits."""

import collections

import torch
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor
from tests.workers import run_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
ONE_AXIS = [(S0, R), (S1, R), (S0, S1), (P, R), (P, S0), (P, S1), (Shard(0, sizes=(0, 5, 1)), R), (S0, Shard(0, sizes=(2, 4, 0)))]


def compiled(func, counts):
    """A function whose graphs run as they are, with their collectives counted."""

    def backend(graph, inputs):
        counts.update(n.target.overloadpacket.__name__ for n in graph.graph.nodes if "c10d" in str(n.target))
        counts.update("move" for n in graph.graph.nodes if "shardwise" in str(n.target))
        return graph

    return torch.compile(func, backend=backend, fullgraph=True, dynamic=False)


def redistributes(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    found, wrong = collections.Counter(), []
    for rows in (6, 7, 2, 0):
        for dtype in (torch.float32, torch.bool, torch.complex64):
            for src, dst in ONE_AXIS:
                if rows != sum(getattr(src, "sizes", None) or getattr(dst, "sizes", None) or (rows,)):
                    continue
                generator = torch.Generator().manual_seed(rows)
                whole = torch.randn(rows, 5, generator=generator).to(dtype)
                if src is P and dtype is torch.bool:
                    continue
                x = DTensor.from_local(whole * (rank + 0.3), mesh, [P]) if src is P else distribute_tensor(whole, mesh, [src])

                def func(x, dst=dst):
                    y = (x.neg() if x.dtype is not torch.bool else x.logical_not()).redistribute(placements=[dst])
                    return y.logical_not().clone(), y

                call = compiled(func, found)
                want, got = func(x), [call(x) for _ in range(2)][-1]
                for a, b in zip(want if src is not P else want[1:], got if src is not P else got[1:], strict=True):
                    a, b = a.to_local(), b.to_local()
                    if a.shape != b.shape or a.stride() != b.stride() or not torch.equal(a, b):
                        wrong.append((rows, dtype, src, dst))
    return dict(found), wrong


def on_two_axes(rank, world_size):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("a", "b"))
    found, wrong = collections.Counter(), []
    places = [(R, R), (S0, R), (R, S0), (S0, S0), (S0, S1), (S1, S0), (S1, R)]
    for src in places:
        for dst in places:
            x = distribute_tensor(torch.arange(35.0).view(7, 5), mesh, src)

            def func(x, dst=dst):
                return (x.sin() + 1).redistribute(placements=dst).cos() * 2

            call = compiled(func, found)
            with shardwise.debug.ledger() as eager:
                want = func(x)
            call(x)
            with shardwise.debug.ledger() as replayed:
                got = call(x)
            same = [(e.kind, e.axis, e.bytes) for e in eager] == [(e.kind, e.axis, e.bytes) for e in replayed]
            if not same or not torch.equal(want.to_local(), got.to_local()):
                wrong.append((src, dst))
    return dict(found), wrong


def test_every_way_between_layouts():
    answers = run_ranks(redistributes, 3)
    assert all(wrong == [] for _, wrong in answers), answers
    assert all(found == answers[0][0] for found, _ in answers)
    assert {"all_gather_into_tensor", "all_to_all_single", "all_reduce", "wait_tensor"} <= answers[0][0].keys()


def test_on_two_axes_with_a_ledger():
    answers = run_ranks(on_two_axes, 4)
    assert all(answer == answers[0] and answer[1] == [] for answer in answers), answers
