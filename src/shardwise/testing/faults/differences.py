"""Ranks that run different programs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import NoReturn

import torch
from torch import nn

import shardwise
from shardwise import DeviceMesh, DTensor, Placement, Replicate, Shard, debug, distribute_tensor, init_device_mesh
from shardwise.testing.faults.scene import (
    Scene,
)


def _differ(scene: Scene, checked: bool, usual: Callable[..., object], other: Callable[..., object]) -> None:
    """Some steps; at one of them the faulty rank does the other thing."""
    scene.join()
    mesh, whole = scene.mesh(), scene.tensor(12, 6)
    x = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    with debug.check_ranks() if checked else nullcontext():
        for step in range(3):
            scene.check(x.redistribute(placements=[Replicate()]), whole)
            (other if scene.faulty and step == scene.seed % 3 else usual)(x)
            scene.check(x.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()]), whole)


def _gather(x: torch.Tensor) -> DTensor:
    return _move(x, Replicate())


def _move(x: torch.Tensor, to: Placement) -> DTensor:
    assert isinstance(x, DTensor)
    return x.redistribute(placements=[to])


def _backward(x: DTensor, swapped: bool = False) -> None:
    weights = [distribute_tensor(torch.ones(6, n), x.device_mesh, [Replicate()], src_data_rank=None) for n in (2, 3)]
    losses = [(x @ weight.requires_grad_()).square().sum() for weight in weights]  # the gradients are summed
    for loss in reversed(losses) if swapped else losses:
        loss.backward()


def _two_moves(x: DTensor) -> None:
    _gather(x)
    _gather(x.double())


def _two_moves_swapped(x: DTensor) -> None:
    _gather(x.double())
    _gather(x)


def _norm(x: torch.Tensor, p: float) -> torch.Tensor:
    return torch.linalg.vector_norm(x, p)


def _new(x: DTensor, rows: int = 6, dtype: torch.dtype = torch.float32, source: int = 0) -> DTensor:
    return distribute_tensor(torch.ones(rows, 4, dtype=dtype), x.device_mesh, [Shard(0)], src_data_rank=source)


def _on_mesh_of(x: DTensor, step: int) -> torch.Tensor:
    """A tensor on a mesh of its own, whose ranks ascend or descend."""
    ranks = x.device_mesh.mesh.tolist()[::step]
    whole = torch.arange(12.0).view(6, 2)
    return distribute_tensor(whole, DeviceMesh("cpu", ranks), [Shard(0)], src_data_rank=None).full_tensor()


def _without_waiting(x: DTensor) -> None:
    """A move in which this rank sends and gets nothing, so that it is past it at once."""
    mesh, me = x.device_mesh, x.device_mesh.get_local_rank()
    others = [rank for rank in range(mesh.size()) if rank != me]
    sizes = lambda n: tuple(n if rank == others[0] else 0 for rank in range(mesh.size()))  # noqa: E731
    held = Shard(0, sizes=sizes(12)), Shard(1, sizes=sizes(6))
    tensor = distribute_tensor(torch.ones(12, 6), mesh, [held[0]], src_data_rank=None)
    tensor.redistribute(placements=[held[1]])


def _on_one_rank(x: DTensor, rank: int) -> None:
    tiles, here = x.to_sharded(), x.device_mesh.get_rank()  # type: ignore[attr-defined]
    tiles.gather(rank, out=torch.empty(x.shape) if here == rank else None)


def _leave_early(x: DTensor) -> NoReturn:
    raise _Ahead


class _Ahead(Exception):
    """A rank goes to the end of its program."""


THE_END = "the end of the program"
DIFFERENCES: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "another op": (lambda x: torch.cumsum(x, 0), lambda x: torch.softmax(x, 0)),
    "a branch on data": (lambda x: None, lambda x: x.sum().item()),
    "another shape": (_gather, lambda x: _gather(x[:, :5])),
    "another dtype": (_gather, lambda x: _gather(x.double())),
    "another layout": (_gather, lambda x: x.redistribute(placements=[Shard(1)])),
    "another reduction": (lambda x: _gather(x.sum(0)), lambda x: _gather(x.amax(0))),
    "another size of a reduction": (lambda x: _gather(x.sum(0)), lambda x: _gather(x[:, 1:].sum(0))),
    "two moves swapped": (_two_moves, _two_moves_swapped),
    "a move left out": (_gather, lambda x: None),
    "a move in which it need not wait": (lambda x: None, _without_waiting),
    "backward passes swapped": (_backward, partial(_backward, swapped=True)),
    "a random op left out": (lambda x: _gather(torch.rand_like(x)), _gather),
    "another argument of an op": (partial(_norm, p=2.0), partial(_norm, p=1.0)),
    "another dtype of a new tensor": (_new, partial(_new, dtype=torch.float64)),
    "another shape of a new tensor": (_new, partial(_new, rows=9)),
    "another source of a new tensor": (_new, partial(_new, source=1)),
    "another order of the ranks": (partial(_on_mesh_of, step=1), partial(_on_mesh_of, step=-1)),
    "gathered on another rank": (partial(_on_one_rank, rank=0), partial(_on_one_rank, rank=1)),
    THE_END: (_gather, _leave_early),
}


def differs(scene: Scene, what: str, checked: bool = False) -> None:
    """A rank whose program differs from the others'."""
    with suppress(_Ahead):
        _differ(scene, checked, *DIFFERENCES[what])


def other_axis(scene: Scene) -> None:
    """A rank that communicates along another axis."""
    scene.join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = scene.tensor()
    x = distribute_tensor(whole, mesh, [Shard(0), Replicate()], src_data_rank=None)
    y = distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)
    for step in range(3):
        scene.check(y if scene.faulty and step == 1 else x, whole)
        scene.check(x, whole)
        scene.check(y, whole)


def other_seed(scene: Scene) -> None:
    """A rank whose random numbers are others."""
    scene.join()
    shardwise.manual_seed(7 if scene.faulty else 5)
    x = distribute_tensor(scene.tensor(), scene.mesh(), [Shard(0)], src_data_rank=None)
    _gather(nn.functional.dropout(x, 0.5))


def other_seed_later(scene: Scene) -> None:
    """A rank whose random numbers become others, after draws that ranks compare at once."""
    scene.join()
    x = distribute_tensor(scene.tensor(), scene.mesh(), [Shard(0)], src_data_rank=None)
    for step in range(12):
        if step == 9 and scene.faulty:
            shardwise.manual_seed(7)
        x = nn.functional.dropout(x, 0.1)  # type: ignore[assignment]
    _gather(x)


def waits_in_other_order(scene: Scene) -> None:
    """Asynchronous moves that ranks wait for in different orders."""
    scene.join()
    mesh, wholes = scene.mesh(), [scene.tensor(number=i) for i in range(3)]
    moves = [
        distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None).redistribute(placements=[Replicate()], async_op=True)
        for t in wholes
    ]
    pairs = list(zip(moves, wholes, strict=True))
    for move, whole in reversed(pairs) if scene.faulty else pairs:
        scene.check(move.wait().to_local(), whole)
