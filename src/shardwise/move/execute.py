"""Running a move on local values, differentiably."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shardwise.comm.record import Note
from shardwise.layout import Layout
from shardwise.move.limit import current_cap
from shardwise.move.node import Started, run_steps
from shardwise.move.planner import plan_steps
from shardwise.move.steps import AllReduce, GatherParts, MeshStep, Spread


def move(local: Any, src: Layout, dst: Layout, note: Note, spread: tuple[int, ...] = ()) -> Any:
    """What the ranks hold under `dst`, from what they hold under `src`."""
    return run_move(local, src.mesh.comm, plan_steps(src, dst, spread, current_cap()), note)


def start_move(
    local: Any, src: Layout, dst: Layout, note: Note, *, owned: bool = False
) -> tuple[Any, Callable[[], Any]]:
    """A move begun but not waited for: the local value there will be, and what waits for it. Where the ranks live in
    this process, or a reduction needs its gradient worked out, it is done at once. Who is `owned` the source away
    lets it be reduced in place."""
    comm, steps = src.mesh.comm, plan_steps(src, dst, memory=current_cap())
    if comm.simulated or any(isinstance(step, AllReduce) and step.reduce_op != "sum" for step in steps):
        return run_move(local, comm, steps, note), lambda: None
    started = Started(owned)
    return run_steps(comm, steps, local, note, run=started), started.finish


def run_move(local: Any, comm: Any, steps: tuple[MeshStep, ...], note: Note) -> Any:
    """The local value after the steps of one plan."""
    if not any(isinstance(step, AllReduce) and step.reduce_op != "sum" for step in steps):
        return run_steps(comm, steps, local, note)
    for step in steps:
        if isinstance(step, AllReduce) and step.reduce_op != "sum" and _needs_grad(comm, local):
            if step.reduce_op == "product":  # no partner step: gather the factors and let autograd see the product
                local = run_steps(comm, (GatherParts(step.layout, step.axes),), local, note)
                local = comm.bind(_product)(local)
            else:
                local = _extreme(comm, step, local, note)
        else:
            local = run_steps(comm, (step,), local, note)
    return local


def _product(parts: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.mul, [parts[i] for i in range(len(parts))])  # unbind of nothing has a wrong gradient


def _needs_grad(comm: Any, local: Any) -> bool:
    return torch.is_grad_enabled() and any(v.requires_grad for v in comm.values(local))


def _extreme(comm: Any, step: AllReduce, local: Any, note: Note) -> Any:
    """The greatest or least of the parts. Its gradient goes in equal shares to the parts that are it."""
    with torch.no_grad():
        found = run_steps(comm, (step,), local, note)
        wins = comm.bind(_is_it, step.axes)(local, found)
        counts = AllReduce(step.layout.replace(dtype=torch.int32), step.axes)
        winners = run_steps(comm, (counts,), comm.bind(torch.Tensor.int, step.axes)(wins), note)
    spread = Spread(step.layout, step.axes)  # each rank takes its own share of the gradient
    box = [comm, local, found, comm.bind(torch.where, step.axes)(wins, winners, 0), spread, note]
    if comm.simulated:
        local.used = True
    return comm.assemble(comm.structure(found), _Extreme.apply(box, *comm.values(local)))


def _is_it(part: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    return (part == found) | (part.isnan() & found.isnan())


class _Extreme(torch.autograd.Function):
    """`found` from the parts; `winners` is how many parts share the gradient where this one is among them, else 0."""

    @staticmethod
    def forward(ctx: Any, box: list[Any], *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        comm, local, found, ctx.winners, ctx.spread, ctx.note = box
        ctx.comm = comm
        ctx.before, ctx.after = comm.structure(local), comm.structure(found)
        return comm.values(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        share = lambda grad, n: torch.where(n > 0, grad / n.clamp(min=1), 0)  # noqa: E731
        axes = range(len(ctx.comm.shape))
        whole = run_steps(ctx.comm, (ctx.spread,), ctx.comm.assemble(ctx.after, grads), ctx.note)
        back = ctx.comm.bind(share, tuple(axes))(whole, ctx.winners)
        return None, *ctx.comm.pick_gradients(ctx.before, back)
