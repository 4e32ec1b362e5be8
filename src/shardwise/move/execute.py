"""Running a move on local values, differentiably."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.comm.autograd import run_steps
from shardwise.comm.record import Note
from shardwise.layout import Layout
from shardwise.move.planner import plan_steps
from shardwise.move.steps import AllReduce, GatherParts, MoveStep


def move(local: Any, src: Layout, dst: Layout, note: Note, spread: tuple[int, ...] = ()) -> Any:
    """What the ranks hold under `dst`, from what they hold under `src`."""
    return run_move(local, src.mesh.comm, plan_steps(src, dst, spread), note)


def run_move(local: Any, comm: Any, steps: tuple[MoveStep, ...], note: Note) -> Any:
    """The local value after the steps of one plan."""
    if not any(isinstance(step, AllReduce) and step.reduce_op != "sum" for step in steps):
        return run_steps(comm, steps, local, note)
    for step in steps:
        if isinstance(step, AllReduce) and step.reduce_op != "sum" and _needs_grad(comm, local):
            # max, min and product have no partner step: gather the parts and let autograd see the reduction
            local = run_steps(comm, (GatherParts(step.layout, step.axis),), local, note)
            local = comm.bind(_REDUCE_STACKED[step.reduce_op])(local)
        else:
            local = run_steps(comm, (step,), local, note)
    return local


def _needs_grad(comm: Any, local: Any) -> bool:
    return torch.is_grad_enabled() and any(v.requires_grad for v in comm.values(local))


_REDUCE_STACKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda parts: parts.prod(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}
