"""Calls on a rank that is outside of the mesh. It holds nothing, so it computes nothing.

Results have the sizes that they have on the mesh's ranks, and their placements where the rule or its program tells
them. Else those are a guess, and a move to another mesh, in which all ranks must agree, is refused. This rank's local
results are empty tensors (zeros if they have no dims). They have a graph, so that a backward pass reaches the moves
that brought a tensor here: every rank takes part in their gradients. Random numbers are drawn as on the other ranks.
Whatever depends on values (the size of `nonzero`, `item()`) raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwise.comm.outside import held_of
from shardwise.context import running
from shardwise.engine.call_shape import CallShape, fetch
from shardwise.engine.plan import Plan
from shardwise.engine.results import Results
from shardwise.errors import MeshError
from shardwise.layout import Layout
from shardwise.layout.placement import REPLICATE
from shardwise.strategy.spec import Algorithm, Gathered, Spec
from shardwise.torch_private.tensors import schema_of
from shardwise.wrapper import wrap


def nothing_here(
    func: Callable[..., Any], spec: Spec | Algorithm | Gathered | None, call: CallShape, in_place: bool
) -> Plan:
    """The plan of a call on a mesh that this rank is not in. An op that writes leaves its argument as it is."""
    if in_place:
        schema = schema_of(func)
        silent = schema is not None and not schema.returns
        stay: Plan = lambda args, kwargs, local_args, local_kwargs: None if silent else args[0]  # noqa: E731
        return _program(spec, call.name, stay) if isinstance(spec, Algorithm) and spec.writes else stay
    if spec is not None and not isinstance(spec, (Algorithm, Gathered)):
        results = Results(spec, call, in_place)
        assignment = spec.assign(call.operands, results.metas, in_place)
        if assignment is not None and all(results.is_tensor):
            return _empty(call, results.layouts(call, assignment.outputs), results.tree, guessed=False)
    guess = _guess(call)
    return guess if not isinstance(spec, Algorithm) else _program(spec, call.name, guess)


def _program(algorithm: Algorithm, name: str, guess: Plan) -> Plan:
    """Run the program of an op, in which every call does nothing. Where it looks at values, guess the results."""

    def run(args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        try:
            with running(name):
                return algorithm.run(*args, **kwargs)
        except Exception:  # it looked at values, which this rank does not have
            return guess(args, kwargs, local_args, local_kwargs)

    return run


def _guess(call: CallShape) -> Plan:
    """Results of the sizes that torch's meta kernels give, all Replicate."""
    described = call.meta_result()
    flat, tree = tree_flatten(described)
    if not flat or not all(isinstance(out, torch.Tensor) for out in flat):
        error = MeshError(
            f"{call.name}: this rank is outside of the mesh of ranks {list(call.mesh.ranks)} and holds nothing of its "
            f"operands, and what it gives depends on their values; call it on those ranks only"
        )
        return lambda args, kwargs, local_args, local_kwargs: _raise(error)
    whole = (REPLICATE,) * len(call.mesh.shape)
    layouts = [Layout.make(call.mesh, whole, tuple(o.shape), o.dtype, o.stride(), call.mesh.device) for o in flat]
    return _empty(call, layouts, tree, guessed=True)


def _empty(call: CallShape, layouts: Sequence[Layout], tree: TreeSpec, guessed: bool) -> Plan:
    """`guessed`: whether the placements on the ranks of the mesh may be others."""
    paths = call.paths

    def run(args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        operands = [fetch(args, kwargs, path) for path in paths]
        made = [wrap(held_of(layout, [op._local for op in operands]), layout) for layout in layouts]
        if guessed or any(op._guessed for op in operands):
            for tensor in made:
                tensor._guessed = True
        return tree_unflatten(made, tree)

    return run


def _raise(error: MeshError) -> NoReturn:
    raise error
