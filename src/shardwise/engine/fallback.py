"""What happens to an op without a rule: gather its operands and compute it everywhere alike. (Composite ops never get
here: torch takes them apart on the way down.)

Always right, never cheap: it shows in the ledger with its reason, and strict() refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.comm.record import Note
from shardwise.engine.aliasing import after_write, before_write, note_copy
from shardwise.engine.call_shape import CallShape, Path, fetch, put
from shardwise.engine.context import is_strict
from shardwise.engine.plan import Plan, refuse
from shardwise.layout import Layout
from shardwise.layout.placement import REPLICATE
from shardwise.move import plan_steps, run_move
from shardwise.rules.registry import writes_first
from shardwise.wrapper import rebind, wrap

NO_RULE = "gather, since there is no rule for it, and compute it on every rank"


def replicated(func: Any, call: CallShape, reason: str = NO_RULE) -> Plan:
    """Gather every operand, compute the op on all ranks, write back what the op changes."""
    mesh, comm = call.mesh, call.mesh.comm
    whole = [layout.replace(placements=(REPLICATE,) * len(layout.placements)) for layout in call.layouts]
    moves = [(i, plan_steps(a, b), False) for i, (a, b) in enumerate(zip(call.layouts, whole, strict=True))]
    moves = [(i, steps, flag) for i, steps, flag in moves if steps]
    name, paths, layouts, moved = call.name, call.paths, call.layouts, {i for i, _, _ in moves}
    invoke = comm.bind(func)
    note = Note(call.name, reason)
    written = _written_paths(func, call)
    viewed = _viewed_path(func, call) if moves else None

    def run(args: Sequence[Any], kwargs: dict[str, Any], locals: list[Any], local_kwargs: dict[str, Any]) -> Any:
        if moves and is_strict():
            refuse(name, moves, layouts, whole, [reason] * len(mesh.shape))
        for i in written:
            before_write(fetch(args, kwargs, paths[i]), name)
        for i, steps, _ in moves:
            put(locals, local_kwargs, paths[i], run_move(fetch(args, kwargs, paths[i])._local, comm, steps, note))
        result = invoke(*locals, **local_kwargs)
        originals = {}
        for i in written:
            tensor, value = fetch(args, kwargs, paths[i]), fetch(locals, local_kwargs, paths[i])
            if i in moved:
                back = run_move(value, comm, plan_steps(whole[i], layouts[i]), note)
                comm.bind(torch.Tensor.copy_)(tensor._local, back)
            after_write(tensor)
            originals[id(value)] = tensor

        def rewrapped(x: Any) -> Any:
            return originals[id(x)] if id(x) in originals else _wrap_replicated(x, mesh)

        wrapped = tree_map_only(torch.Tensor, rewrapped, result)
        if viewed is not None:
            for copy in tree_flatten(wrapped)[0]:
                note_copy(fetch(args, kwargs, viewed), copy, name)
        return wrapped

    return run


def _wrap_replicated(local: Any, mesh: Any) -> Any:
    first = mesh.comm.first(local)
    places = [REPLICATE] * len(mesh.shape)
    return wrap(local, Layout.make(mesh, places, tuple(first.shape), first.dtype, first.stride(), first.device))


def _viewed_path(func: Any, call: CallShape) -> Path | None:
    """The path to the tensor whose memory torch's result would share, if any."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable or not any(r.alias_info is not None for r in schema.returns):
        return None
    shared = [a.name for a in schema.arguments if a.alias_info is not None]
    index = {a.name: i for i, a in enumerate(schema.arguments)}
    return next((path for path in call.paths if path[0] in shared or path[0] in [index[n] for n in shared]), None)


def _written_paths(func: Any, call: CallShape) -> list[int]:
    """Which tensors of the call the op writes into."""
    if not writes_first(func):
        return []
    schema = getattr(func, "_schema", None)
    if schema is None:
        return [i for i, path in enumerate(call.paths) if path[0] == 0]
    found = []
    for i, path in enumerate(call.paths):
        named = [a for a in schema.arguments if a.name == path[0]]
        argument = named[0] if named else schema.arguments[path[0]]
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(i)
    return found


def written_back(func: Any, call: CallShape) -> Plan:
    """An in-place op whose result is not laid out like its target: compute it aside, move it, copy it in."""
    functional = functional_form(func)

    def run(args: Sequence[Any], kwargs: dict[str, Any], locals: list[Any], local_kwargs: dict[str, Any]) -> Any:
        target = args[0]
        return target.copy_(functional(*args, **kwargs))

    if functional is not None:
        return run
    return replicated(func, call)


def rebound(func: Any) -> Plan:
    """An in-place op that changes its target's shape (unsqueeze_, t_): the target becomes the view."""
    functional = functional_form(func)
    return lambda args, kwargs, locals, local_kwargs: rebind(args[0], functional(*args, **kwargs))


def functional_form(func: Any) -> Any:
    """The out-of-place form of an in-place function, or None."""
    schema = getattr(func, "_schema", None)
    name = schema.name.removeprefix("aten::") if schema is not None else getattr(func, "__name__", "")
    if name.startswith("__i") and name.endswith("__"):
        return getattr(torch.Tensor, "__" + name[3:], None)
    base = name.removesuffix("_")
    return getattr(torch.Tensor, base, None) or getattr(torch, base, None)
