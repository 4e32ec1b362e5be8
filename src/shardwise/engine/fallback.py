"""An op without a rule: its operands are gathered and every rank computes all of it. (Composite functions never come
here: torch calls the ops that they are made of.)

That is always right and never cheap. The ledger shows it with its reason, and strict() refuses it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from shardwise.comm.record import Note
from shardwise.context import is_strict
from shardwise.engine.aliasing import after_write, before_write, note_copies
from shardwise.engine.call_shape import CallShape, Path, fetch, put
from shardwise.engine.plan import Plan, refuse
from shardwise.functions import writes_first
from shardwise.layout import Layout, contiguous_stride
from shardwise.layout.layout import dense_stride
from shardwise.layout.placement import REPLICATE
from shardwise.mesh import Mesh
from shardwise.move import plan_steps, run_move
from shardwise.protocols import LocalValue
from shardwise.strategy.registry import in_place_flag
from shardwise.torch_private import schema_of
from shardwise.wrapper import rebind, wrap

NO_RULE = "gather, since there is no rule for it, and compute it on every rank"


def replicated(
    func: Callable[..., Any], call: CallShape, reason: str = NO_RULE, check: Callable[..., None] | None = None
) -> Plan:
    """The plan that gathers every operand, computes the op on all ranks and writes back what the op changes.

    Args:
        func: The function that was called.
        call: The call.
        reason: Why, for the ledger.
        check: A function that sees the arguments of each call first, and may raise.
    """
    mesh, comm = call.mesh, call.mesh.comm
    whole = [layout.replace(placements=(REPLICATE,) * len(layout.placements)) for layout in call.layouts]
    moves = [(i, plan_steps(a, b), False) for i, (a, b) in enumerate(zip(call.layouts, whole, strict=True))]
    moves = [(i, steps, flag) for i, steps, flag in moves if steps]
    name, paths, layouts, moved = call.name, call.paths, call.layouts, {i for i, _, _ in moves}
    invoke = comm.bind(func)
    note = Note(call.name, reason)
    written = _written_paths(func, call)
    viewed = _viewed_path(func, call) if moves else None
    strides = {i: dense_stride(whole[i].shape, whole[i].stride) for i in moved}
    stored = {
        i: comm.bind(functools.partial(_stored, stride=stride))
        for i, stride in strides.items()
        if stride != contiguous_stride(whole[i].shape)
    }

    def run(args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        if moves and is_strict():
            refuse(name, moves, layouts, whole, [reason] * len(mesh.shape))
        if check is not None:
            check(*args, **kwargs)
        for i in written:
            before_write(fetch(args, kwargs, paths[i]), name)
        for i, steps, _ in moves:
            value = run_move(fetch(args, kwargs, paths[i])._local, comm, steps, note)
            put(local_args, local_kwargs, paths[i], stored[i](value) if i in stored else value)
        result = invoke(*local_args, **local_kwargs)
        originals = []
        for i in written:
            tensor, value = fetch(args, kwargs, paths[i]), fetch(local_args, local_kwargs, paths[i])
            if i in moved:
                back = run_move(value, comm, plan_steps(whole[i], layouts[i]), note)
                comm.bind(torch.Tensor.copy_)(tensor._local, back)
            after_write(tensor)
            originals.append((value, tensor))

        def rewrapped(x: LocalValue) -> Any:
            for value, tensor in originals:
                if comm.same(x, value):
                    return tensor
            return _wrap_replicated(x, mesh)

        wrapped = tree_map_only(torch.Tensor, rewrapped, result)
        if viewed is not None:
            note_copies(func, args, kwargs, viewed, wrapped, name)
        return wrapped

    return run


def _stored(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The value in the order in memory that it has on one device: some ops fill or read memory in that order."""
    if value.stride() == stride:
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _wrap_replicated(local: LocalValue, mesh: Mesh) -> Any:
    first = mesh.comm.first(local)
    places = [REPLICATE] * len(mesh.shape)
    return wrap(local, Layout.make(mesh, places, tuple(first.shape), first.dtype, first.stride(), first.device))


def _viewed_path(func: Callable[..., Any], call: CallShape) -> Path | None:
    """The path to the tensor whose memory torch's result would share, if any."""
    schema = schema_of(func)
    if schema is None or schema.is_mutable or not any(r.alias_info is not None for r in schema.returns):
        return None
    shared = [a.name for a in schema.arguments if a.alias_info is not None]
    index = {a.name: i for i, a in enumerate(schema.arguments)}
    return next((path for path in call.paths if path[0] in shared or path[0] in [index[n] for n in shared]), None)


def _written_paths(func: Callable[..., Any], call: CallShape) -> list[int]:
    """Which tensors of the call the op writes into."""
    if not writes_first(func):
        return []
    schema = schema_of(func)
    if schema is None:
        return [i for i, path in enumerate(call.paths) if path[0] == 0]
    found = []
    for i, path in enumerate(call.paths):
        named = [a for a in schema.arguments if a.name == path[0]]
        argument = named[0] if named else schema.arguments[path[0]]
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(i)
    return found


def written_back(func: Callable[..., Any], call: CallShape) -> Plan:
    """The plan of an in-place op whose result has another layout than its target: compute it out of place and copy it
    into the target, which moves it."""
    call_name = call.name
    functional = not_in_place(func) if in_place_flag(func, call.args, call.kwargs) else functional_form(func)

    def run(args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        target = args[0]
        if isinstance(target, (list, tuple)):
            values = functional([_to_outlive(one) for one in target], *args[1:], **kwargs)
            for one, value in zip(target, values, strict=True):
                write(one, value)
            return target
        return write(target, functional(_to_outlive(target), *args[1:], **kwargs))

    def write(target: Any, value: Any) -> Any:
        if not torch.can_cast(value.dtype, target.dtype):
            raise RuntimeError(f"{call_name}: result type {value.dtype} can't be cast to the target's {target.dtype}")
        return target.copy_(value)

    if functional is not None:
        return run
    return replicated(func, call)


def _to_outlive(target: Any) -> Any:
    """The target, or a copy where backward will need its value from before the write."""
    return target.clone() if torch.is_grad_enabled() and target.requires_grad else target


def rebound(func: Callable[..., Any]) -> Plan:
    """The plan of an in-place op that changes its target's shape (unsqueeze_, t_): the target becomes the view."""
    functional = functional_form(func)
    return lambda args, kwargs, local_args, local_kwargs: rebind(args[0], functional(*args, **kwargs))


def not_in_place(func: Callable[..., Any]) -> Callable[..., Any]:
    """`func`, which takes an argument `inplace`, with inplace=False."""
    signature = inspect.signature(func)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["inplace"] = False
        return func(*bound.args, **bound.kwargs)

    return call


def functional_form(func: Callable[..., Any]) -> Any:
    """The out-of-place form of an in-place function, or None."""
    schema = schema_of(func)
    name = schema.name.removeprefix("aten::") if schema is not None else getattr(func, "__name__", "")
    if name.startswith("__i") and name.endswith("__"):
        return getattr(torch.Tensor, "__" + name[3:], None)
    base = name.removesuffix("_")
    packet = getattr(torch.ops.aten, base, None)
    if schema is not None and packet is not None and _starts_with_tensor(packet):
        return packet  # it accepts what the in-place overload accepts, while Tensor.index_put refuses None
    return getattr(torch.Tensor, base, None) or getattr(torch, base, None)


def _starts_with_tensor(packet: Any) -> bool:
    """Whether the op takes its tensor first: polygamma takes a number first."""
    arguments = schema_of(getattr(packet, packet.overloads()[0])).arguments
    return bool(arguments) and "Tensor" in str(arguments[0].type)
