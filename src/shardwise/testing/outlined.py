"""Is an op without values what it is with them? Layouts, shapes, dtypes and bytes on an outlined mesh and simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from shardwise.argument_types import MeshArgument
from shardwise.comm.rank_tensor import RankTensor
from shardwise.debug.ledger import Ledger
from shardwise.errors import OutlineError
from shardwise.layout import Partial
from shardwise.mesh import outline, simulate
from shardwise.tensor import DTensor
from shardwise.testing.spread import Combination
from shardwise.testing.trial import REFUSED, RIGHT, WRONG, Outcome, Sample, laid_out

ASKS = "asks for values"
NO_GRADIENT = "without its gradient, which simulation refuses"

Described = tuple[Any, ...]


@dataclass
class Ran:
    """What a call gave: results and gradients, what each played rank holds of them, every communication."""

    results: list[Described] = field(default_factory=list)
    held: list[list[Described]] = field(default_factory=list)
    entries: list[Described] = field(default_factory=list)
    error: Exception | None = None


def compare_without_values(sample: Sample, shape: Sequence[int], layouts: Combination, seed: int = 0) -> Outcome:
    """Run a call and its gradient on a simulated mesh, and on an outlined one that plays each of its ranks in turn.

    Returns:
        RIGHT where results and gradients are laid out alike, have the same shapes (also of what each rank holds) and
        dtypes, and every communication is the same with the same bytes; WRONG with a message; "asks for values" where
        the op cannot run without them; REFUSED where the simulated mesh refuses the call, so that there is nothing to
        compare with. Of a call whose gradient alone is refused, the call is compared; the message says so.
    """
    expected = _run(sample, simulate(tuple(shape)), layouts, seed)
    differentiates = expected.error is None
    if not differentiates:
        expected = _run(sample, simulate(tuple(shape)), layouts, seed, differentiates=False)
    if expected.error is not None:
        return Outcome(REFUSED, f"{type(expected.error).__name__}: {expected.error}")
    played = []
    for rank in range(math.prod(shape)):
        found = _run(sample, outline(tuple(shape), play=rank), layouts, seed, differentiates)
        if isinstance(found.error, OutlineError):
            return Outcome(ASKS, str(found.error))
        if found.error is not None:
            return Outcome(WRONG, f"rank {rank}: {type(found.error).__name__}: {found.error}")
        if found.results != expected.results:
            return Outcome(WRONG, f"rank {rank}: {found.results} instead of {expected.results}")
        if found.held[0] != expected.held[rank]:
            return Outcome(WRONG, f"rank {rank}: holds {found.held[0]} instead of {expected.held[rank]}")
        played.append(found.entries)
    return _compare_entries(played, expected.entries) or Outcome(RIGHT, "" if differentiates else NO_GRADIENT)


def _compare_entries(played: Sequence[Sequence[Described]], expected: Sequence[Described]) -> Outcome | None:
    """WRONG where the communications of all ranks do not add up to those of the simulated mesh."""
    if {len(mine) for mine in played} != {len(expected)}:
        return Outcome(WRONG, f"{[len(mine) for mine in played]} communications instead of {len(expected)}")
    for at, entry in enumerate(expected):
        same = [mine[at] for mine in played]
        total = (*same[0][:-1], sum(one[-1] for one in same))
        if total != entry:
            return Outcome(WRONG, f"{total} instead of {entry}")
    return None


def _run(sample: Sample, mesh: MeshArgument, layouts: Combination, seed: int, differentiates: bool = True) -> Ran:
    log = Ledger()
    try:
        with laid_out(sample, mesh, layouts, seed) as mine, log:
            got = tree_flatten(sample.call(mine))[0]
            roots = [x for x in got if isinstance(x, DTensor) and x.requires_grad]
            # a pending product has no gradient of its own, only its factors have
            wanted = [x for x in mine if x.requires_grad and Partial("product") not in x.placements]
            if roots and wanted and differentiates:
                got += torch.autograd.grad(roots, wanted, [torch.ones_like(x) for x in roots], allow_unused=True)
    except Exception as error:
        return Ran(error=error)
    tensors = [x for x in got if isinstance(x, DTensor)]
    ranks = max((len(_held(x)) for x in tensors), default=math.prod(mesh.shape))
    held = [[_held(x)[rank] for x in tensors] for rank in range(ranks)]
    entries = [(e.op, e.kind, e.axis, e.backward, e.reason, e.bytes) for e in log if e.op != "random"]
    return Ran([_described(x) for x in got], held, entries)


def _held(x: DTensor) -> list[Described]:
    """Shape and dtype of what each rank that is played here holds."""
    local = x._local
    ranks = local.ranks if isinstance(local, RankTensor) else (local,)
    return [(tuple(value.shape), value.dtype) for value in ranks]


def _described(x: object) -> Described:
    if not isinstance(x, DTensor):
        return (type(x).__name__ if not isinstance(x, torch.Tensor) else "tensor",)
    return tuple(x.shape), x.dtype, x.stride(), tuple(map(str, x.placements)), x.requires_grad
