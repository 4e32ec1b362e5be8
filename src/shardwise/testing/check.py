"""check_rule: does an op give plain torch's answer on every layout? And in_double, to compare whole models with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardwise.argument_types import MeshArgument
from shardwise.errors import RuleError
from shardwise.mesh import as_mesh, simulate
from shardwise.testing.spread import Combination, combinations, with_spare_bits
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
    mesh_shapes: Sequence[tuple[int, ...] | MeshArgument] = ((3,), (2, 2)),
    *,
    limit: int = 40,
    grad: bool = True,
    seed: int = 0,
    tolerance: float | None = None,
    partial: bool | Collection[str] = True,
) -> int:
    """Try an op with every kind of layout of its tensors: values and gradients must be those of plain torch.

    Args:
        op: The function to try.
        samples: Arguments to try it with. Each is a tuple of arguments, a single tensor, or a pair (args, kwargs).
        mesh_shapes: The meshes to try it on: shapes of simulated meshes, or meshes. On a mesh of processes, every rank
            makes this call.
        limit: How many combinations of layouts to try, per sample and mesh.
        grad: Whether to compare gradients too.
        seed: Chooses the layouts, the parts of Partial tensors and the gradients to start from.
        tolerance: The largest difference that is none, relative and absolute; by default what the dtypes allow.
        partial: Whether to try Partial layouts too, or of which reductions. The parts of a product have gradients of
            their own, so an op that returns gradients is tried with ("sum",).

    Returns:
        The number of trials.

    Raises:
        AssertionError: At the first trial that differs from plain torch or raises; it says with which layouts.
        RuleError: For a sample that is none.

    >>> check_rule(torch.add, [(torch.randn(5, 3), torch.randn(3))], limit=4)
    8
    """
    trials = 0
    for n, sample in enumerate(samples):
        call = as_sample(op, *_arguments(sample, n), grad=grad, tolerance=tolerance)
        if not call.tensors:
            raise RuleError(f"check_rule: sample {n} = {sample!r} has no tensor; give the op's arguments as a tuple")
        expected = reference(call, seed)
        if expected is None:
            call.call([t.clone() for t in call.tensors])  # plain torch's own error
            raise RuleError(f"check_rule: plain torch cannot run sample {n}")
        for asked in mesh_shapes:
            mesh = simulate(tuple(asked)) if isinstance(asked, (tuple, list)) else asked
            shape = as_mesh(mesh).shape
            for layouts in combinations(call.tensors, shape, limit, f"{seed} {n}", partial):
                outcome = attempt(expected, mesh, layouts, seed)
                trials += 1
                if outcome.verdict != RIGHT:
                    raise AssertionError(_complaint(op, n, call, shape, layouts, outcome))
    return trials


def _arguments(sample: object, n: int) -> tuple[Sequence[Any], dict[str, Any]]:
    if isinstance(sample, torch.Tensor):
        return (sample,), {}
    if not isinstance(sample, (tuple, list)):
        raise RuleError(f"check_rule: sample {n} = {sample!r}; give the op's arguments as a tuple")
    if len(sample) == 2 and isinstance(sample[0], (tuple, list)) and isinstance(sample[1], dict):
        return sample[0], sample[1]
    return sample, {}


def _complaint(
    op: Callable[..., Any], n: int, call: Sample, shape: Sequence[int], layouts: Combination, outcome: Outcome
) -> str:
    name = getattr(op, "__name__", str(op))
    places = "\n".join(
        f"  operand {i} of shape {tuple(t.shape)}: [{', '.join(map(repr, p))}]"
        for i, (t, p) in enumerate(zip(call.tensors, layouts, strict=True))
    )
    return f"{name}: {outcome.verdict} on sample {n}, mesh {tuple(shape)}\n{places}\n  {outcome.message}"


class in_double(TorchFunctionMode):
    """Inside, float64 stays what it is: what asks torch for float32 gets float64, on plain tensors and DTensors.

    A model that computes a part of itself in float32, whatever its own dtype (a Llama does so in its norms), rounds
    there: two runs that differ in the last bit of a float64 may be 1e-8 apart, which says nothing. In double, what is
    wrong shows.

    >>> x = torch.ones(2, dtype=torch.float64)
    >>> with in_double():
    ...     x.to(torch.float32).dtype, x.float().dtype, x.softmax(0, dtype=torch.float32).dtype
    (torch.float64, torch.float64, torch.float64)
    """

    def __torch_function__(
        self, func: Any, types: tuple[type, ...], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        doubled = lambda value: torch.float64 if value is torch.float32 else value
        args, kwargs = tree_map(doubled, (tuple(args), kwargs or {}))
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)
