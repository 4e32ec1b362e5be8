"""Is an op without values what it is with them? Layouts, shapes, dtypes and bytes on an outlined mesh and simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from shardwise.argument_types import MeshArgument
from shardwise.debug.ledger import Ledger
from shardwise.errors import OutlineError
from shardwise.mesh import outline, simulate
from shardwise.tensor import DTensor
from shardwise.testing.spread import Combination
from shardwise.testing.trial import RIGHT, WRONG, Outcome, Sample, laid_out

ASKS = "asks for values"

Described = tuple[Any, ...]


def compare_without_values(sample: Sample, shape: Sequence[int], layouts: Combination, seed: int = 0) -> Outcome:
    """Run a call and its gradient on a simulated mesh, and on an outlined one that plays each of its ranks in turn.

    Returns:
        RIGHT where the results are laid out alike, have the same shapes and dtypes, and every communication is the same
        with the same bytes; WRONG with a message; "asks for values" where the op cannot run without them.
    """
    for differentiates in (True, False):  # of what has no gradient, the call alone is compared
        expected, entries = _run(sample, simulate(tuple(shape)), layouts, seed, differentiates)
        if expected is not None:
            break
    if expected is None:
        return Outcome(RIGHT, "simulation refuses it")
    played = []
    for rank in range(math.prod(shape)):
        try:
            found, mine = _run(sample, outline(tuple(shape), play=rank), layouts, seed, differentiates, raises=True)
        except OutlineError as error:
            return Outcome(ASKS, str(error))
        except Exception as error:
            return Outcome(WRONG, f"rank {rank}: {type(error).__name__}: {error}")
        if found != expected:
            return Outcome(WRONG, f"rank {rank}: {found} instead of {expected}")
        played.append(mine)
    if len({len(mine) for mine in played}) > 1 or len(played[0]) != len(entries):
        return Outcome(WRONG, f"{[len(mine) for mine in played]} communications instead of {len(entries)}")
    for at, entry in enumerate(entries):
        same = [mine[at] for mine in played]
        total = (*same[0][:-1], sum(one[-1] for one in same))
        if total != entry:
            return Outcome(WRONG, f"{total} instead of {entry}")
    return Outcome(RIGHT)


def _run(
    sample: Sample, mesh: MeshArgument, layouts: Combination, seed: int, differentiates: bool, raises: bool = False
) -> tuple[list[Described] | None, list[Described]]:
    """What the results are, and every communication."""
    log = Ledger()
    try:
        with laid_out(sample, mesh, layouts, seed) as mine, log:
            got = tree_flatten(sample.call(mine))[0]
            roots = [x for x in got if isinstance(x, DTensor) and x.requires_grad]
            wanted = [x for x in mine if x.requires_grad]
            if roots and wanted and differentiates:
                torch.autograd.grad(roots, wanted, [torch.ones_like(x) for x in roots], allow_unused=True)
    except Exception:
        if raises:
            raise
        return None, []
    described = [_described(x) for x in got]
    return described, [(e.op, e.kind, e.axis, e.backward, e.reason, e.bytes) for e in log if e.op != "random"]


def _described(x: object) -> Described:
    if not isinstance(x, DTensor):
        return (type(x).__name__ if not isinstance(x, torch.Tensor) else "tensor",)
    return tuple(x.shape), x.dtype, x.stride(), tuple(map(str, x.placements)), x.requires_grad
