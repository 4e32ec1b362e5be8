"""check_rule: does an op give plain torch's answer on every layout? For rules of one's own, and for ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.errors import RuleError
from shardwise.mesh import simulate
from shardwise.testing.spread import combinations, with_spare_bits
from shardwise.testing.trial import RIGHT, Outcome, Sample, attempt, reference


def as_sample(op: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None = None, **more: Any) -> Sample:
    """The call op(*args, **kwargs) with its tensors taken out, nested lists looked into."""
    leaves, tree = tree_flatten((tuple(args), kwargs or {}))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(tensors: list[Any]) -> Any:
        filled = list(leaves)
        for i, tensor in zip(where, tensors, strict=True):
            filled[i] = tensor
        args, kwargs = tree_unflatten(filled, tree)
        return op(*args, **kwargs)

    return Sample(call, [with_spare_bits(leaves[i].detach()) for i in where], **more)


def check_rule(
    op: Callable[..., Any],
    samples: Iterable[Any],
    mesh_shapes: Sequence[tuple[int, ...]] = ((3,), (2, 2)),
    *,
    limit: int = 40,
    grad: bool = True,
    seed: int = 0,
) -> int:
    """Try op(*sample) on simulated meshes with every kind of layout of its tensors (`limit` combinations a sample and
    mesh): values and gradients must be plain torch's. Returns the number of trials; raises AssertionError at the first
    that differs.

    A sample is a tuple of arguments, a single tensor, or (args, kwargs) with a dict last.

    >>> check_rule(torch.add, [(torch.randn(5, 3), torch.randn(3))], limit=4)
    8
    """
    trials = 0
    for n, sample in enumerate(samples):
        call = as_sample(op, *_arguments(sample, n), grad=grad)
        if not call.tensors:
            raise RuleError(f"check_rule: sample {n} = {sample!r} has no tensor; give the op's arguments as a tuple")
        expected = reference(call, seed)
        if expected is None:
            call.call([t.clone() for t in call.tensors])  # plain torch's own error
            raise RuleError(f"check_rule: plain torch cannot run sample {n}")
        for shape in mesh_shapes:
            mesh = simulate(tuple(shape))
            for layouts in combinations(call.tensors, tuple(shape), limit, f"{seed} {n}"):
                outcome = attempt(expected, mesh, layouts, seed)
                trials += 1
                if outcome.verdict != RIGHT:
                    raise AssertionError(_complaint(op, n, call, shape, layouts, outcome))
    return trials


def _arguments(sample: Any, n: int) -> tuple[Sequence[Any], dict[str, Any]]:
    if isinstance(sample, torch.Tensor):
        return (sample,), {}
    if not isinstance(sample, (tuple, list)):
        raise RuleError(f"check_rule: sample {n} = {sample!r}; give the op's arguments as a tuple")
    if len(sample) == 2 and isinstance(sample[0], (tuple, list)) and isinstance(sample[1], dict):
        return sample[0], sample[1]
    return sample, {}


def _complaint(op: Any, n: int, call: Sample, shape: Any, layouts: Any, outcome: Outcome) -> str:
    name = getattr(op, "__name__", str(op))
    places = "\n".join(
        f"  operand {i} of shape {tuple(t.shape)}: [{', '.join(map(repr, p))}]"
        for i, (t, p) in enumerate(zip(call.tensors, layouts, strict=True))
    )
    return f"{name}: {outcome.verdict} on sample {n}, mesh {tuple(shape)}\n{places}\n  {outcome.message}"
