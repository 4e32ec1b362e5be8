"""An op without a rule: its operands are gathered and every rank computes all of it. (Composite functions never come
here: torch calls the ops that they are made of.)

This is always right, but expensive. The ledger shows it with its reason, and strict() refuses it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only

from shardwise.comm.record import Note
from shardwise.context import is_strict
from shardwise.engine.aliasing import (
    COPIES,
    after_write,
    as_it_is,
    became,
    before_write,
    copies_leaf,
    note_copies,
)
from shardwise.engine.call_shape import CallShape, Path, fetch, op_name, put, tensors_in
from shardwise.engine.keys import said_by_key
from shardwise.engine.local_copies import LOCAL_COPIES
from shardwise.engine.plain_tensors import replicated_like
from shardwise.engine.plan import Plan, refuse
from shardwise.engine.results import Memory
from shardwise.errors import AutogradError
from shardwise.functions import writes_first
from shardwise.layout import contiguous_stride
from shardwise.move import plan_steps, run_move
from shardwise.protocols import LocalValue
from shardwise.strategy.empty_ranks import turn_into, view_at
from shardwise.strategy.memory import copied_stride, stored_as
from shardwise.strategy.registry import in_place_flag
from shardwise.torch_private.autograd import is_recorded, is_transforming
from shardwise.torch_private.tensors import schema_of, storage_id
from shardwise.wrapper import Wrapper, origin_of, rebind, wrap

NO_RULE = "gather, since there is no rule for it, and compute it on every rank"


class replicated:
    """The plan that gathers every operand, computes the op on all ranks and writes back what the op changes. `check`
    sees the arguments of each call first. It keeps what it needs of the call, but not the call, which holds tensors."""

    def __init__(
        self, func: Callable[..., Any], call: CallShape, reason: str = NO_RULE, check: Callable[..., None] | None = None
    ) -> None:
        self.func, self.name, self.paths, self.now = func, call.name, call.paths, call.layouts
        self.mesh, self.comm = call.mesh, call.mesh.comm
        self.reason, self.check = reason, check
        self.note = Note(call.name, reason, called_with=said_by_key(func, call.args, call.kwargs))
        self.whole = [layout.replicated() for layout in call.layouts]
        moves = [(i, plan_steps(a, b), False) for i, (a, b) in enumerate(zip(self.now, self.whole, strict=True))]
        self.moves = [(i, steps, flag) for i, steps, flag in moves if steps]
        self.moved = {i: steps for i, steps, _ in self.moves}
        self.written = _written_paths(func, call)
        self.viewed = _viewed_path(func, call) if self.moves else None
        self.invoke = self.comm.bind(func)
        self.memory = Memory(call, call.meta_result())
        strides = {i: copied_stride(self.whole[i].shape, self.whole[i].stride) for i in self.moved}
        self.in_order = {
            i: self.comm.bind(functools.partial(stored_as, stride=stride))  # some ops read memory in its order
            for i, stride in strides.items()
            if stride != contiguous_stride(self.whole[i].shape)
        }

    def __call__(
        self, args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]
    ) -> Any:
        if self.moves and is_strict():
            refuse(self.name, self.moves, self.now, self.whole, [self.reason] * len(self.mesh.shape))
        if self.check is not None:
            self.check(*args, **kwargs)
        recorded = torch.is_grad_enabled() and any(t.requires_grad for _, t in tensors_in(args, kwargs))
        for i in self.written:
            before_write(fetch(args, kwargs, self.paths[i]), self.name, recorded)
        for i in self.moved:
            path = self.paths[i]
            put(local_args, local_kwargs, path, self.moved_operand(i, fetch(args, kwargs, path)._local))
        result = self.invoke(*local_args, **local_kwargs)
        written = [self._write_back(i, (args, kwargs), (local_args, local_kwargs)) for i in self.written]
        after_write(*(tensor for _, tensor in written))
        wrapped = tree_map_only(torch.Tensor, lambda x: self._wrapped(x, written), result)
        if not self.written:
            self.memory.report(wrapped, args)
        if self.viewed is not None:
            note_copies(self.func, args, kwargs, self.viewed, wrapped, self.name)
        return wrapped

    def moved_operand(self, i: int, local: LocalValue) -> LocalValue:
        """The whole operand, with the strides that it has in plain torch."""
        value = run_move(local, self.comm, self.moved[i], self.note)
        return self.in_order[i](value) if i in self.in_order else value

    def _write_back(self, i: int, call: tuple[Any, Any], local_call: tuple[Any, Any]) -> tuple[LocalValue, Wrapper]:
        """The whole value that the op has written, and the distributed tensor that it belongs to, which gets its part
        of it."""
        tensor, value = fetch(*call, self.paths[i]), fetch(*local_call, self.paths[i])
        if i in self.moved:
            back = run_move(value, self.comm, plan_steps(self.whole[i], self.now[i]), self.note)
            self.comm.bind(torch.Tensor.copy_)(tensor._local, back)
        return value, tensor

    def _wrapped(self, local: LocalValue, written: Sequence[tuple[LocalValue, Wrapper]]) -> Any:
        """A local result as a distributed tensor: the written operand, if the result is that operand."""
        for value, tensor in written:
            if self.comm.same(local, value):
                return tensor
        return wrap(local, replicated_like(self.comm.first(local), self.mesh))


def _argument(schema: Any, path: Path) -> Any:
    """The argument of a schema at which a path starts: by its name or its number."""
    return next((a for a in schema.arguments if a.name == path[0]), None) or schema.arguments[path[0]]


def _viewed_path(func: Callable[..., Any], call: CallShape) -> Path | None:
    """The path to the tensor whose memory torch's result would share, if any."""
    schema = schema_of(func)
    if schema is None or schema.is_mutable or not any(r.alias_info is not None for r in schema.returns):
        return None
    return next((path for path in call.paths if _argument(schema, path).alias_info is not None), None)


def _written_paths(func: Callable[..., Any], call: CallShape) -> list[int]:
    """Which tensors of the call the op writes into."""
    if not writes_first(func):
        return []
    schema = schema_of(func)
    if schema is None:
        return [i for i, path in enumerate(call.paths) if path[0] == 0]
    infos = [_argument(schema, path).alias_info for path in call.paths]
    return [i for i, info in enumerate(infos) if info is not None and info.is_write]


def written_back(func: Callable[..., Any], call: CallShape) -> Plan:
    """The plan of an in-place op whose result has another layout than its target: out of place, then copied into it."""
    name = call.name
    functional = not_in_place(func) if in_place_flag(func, call.args, call.kwargs) else functional_form(func)

    if functional is None:
        return replicated(func, call)

    def run(args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        target = args[0]
        # the backward pass needs the value from before the write
        recorded = any(is_recorded(t) for _, t in tensors_in(args, kwargs))
        to_outlive = torch.clone if recorded else lambda target: target
        if not isinstance(target, (list, tuple)):
            value = functional(to_outlive(target), *args[1:], **kwargs)
            if recorded and is_differentiable(target.dtype) and not is_differentiable(value.dtype):
                copy = target.clone().redistribute(placements=value.placements)
                value = func(copy, *args[1:], **kwargs)  # autograd records x.eq_(y), but not x.eq(y)
            return write(target, value)
        if recorded and len(target) > 1 and (each := _one_by_one(len(target), args[1:], kwargs)) is not None:
            # in torch each result has its own node, which does not wait for the gradients of the others
            values = [functional([one.clone()], *a, **k)[0] for one, (a, k) in zip(target, each, strict=True)]
        else:
            values = functional([to_outlive(one) for one in target], *args[1:], **kwargs)
        for one, value in zip(target, values, strict=True):
            write(one, value)
        return target

    def write(target: Any, value: Any) -> Any:
        if not torch.can_cast(value.dtype, target.dtype):
            raise RuntimeError(f"{name}: result type {value.dtype} can't be cast to the target's {target.dtype}")
        return target.copy_(value)

    return run


def _one_by_one(
    count: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[tuple[list[Any], dict[str, Any]]] | None:
    """The other arguments of a list op, one set per tensor; None where one tensor holds the numbers of all
    positions."""
    given = [*args, *kwargs.values()]
    if any(isinstance(x, torch.Tensor) and x.dim() for x in given):
        return None
    part = lambda x, i: [x[i]] if isinstance(x, (list, tuple)) and len(x) == count else x  # noqa: E731
    return [([part(x, i) for x in args], {k: part(x, i) for k, x in kwargs.items()}) for i in range(count)]


def is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _no_view(tensor: Wrapper) -> None:
    """Have the ranks hold the same memory and versions in tensors that are no views of others."""
    comm, local = tensor._layout.mesh.comm, tensor._local
    tensor._local = comm.rebuild(local, [value.detach() for value in comm.values(local)])


def rebound(func: Callable[..., Any]) -> Plan:
    """The plan of an in-place op that changes its target's shape (unsqueeze_, t_): the target becomes the view."""
    functional = functional_form(func)

    def run(args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        target = args[0]
        base = target._layout.mesh.comm.first(target._local)._base
        of_leaf = copies_leaf(target) if base is None else base.is_leaf
        if torch.is_grad_enabled() and target.requires_grad and (target.is_leaf or of_leaf):
            view_of = "" if target.is_leaf else "view of a "
            raise RuntimeError(f"a {view_of}leaf Variable that requires grad is being used in an in-place operation.")
        if target.retains_grad:
            raise AutogradError(
                f"{op_name(func)} after retain_grad(): the gradient that would be kept is that of the tensor of shape "
                f"{tuple(target.shape)} that it is now; call retain_grad() after {op_name(func)}, or on a clone"
            )
        before = as_it_is(target)
        turns = target.requires_grad and not is_transforming()
        if not turns:
            # torch counts it as a write. Done first: later it would count as a write to the view's base
            _count_write(target)
        view = functional(before, *args[1:], **kwargs)
        turned = _turned(target, view) if turns else None
        if turns and turned is None:
            _count_write(target)
        if not turns and base is None and not is_transforming():
            _no_view(view)  # as in torch, where the target is what it was
        was, now = turned or (before, view)
        if COPIES:
            became(target, was, view)
        return rebind(target, now)

    return run


def _count_write(target: Wrapper) -> None:
    for value in target._layout.mesh.comm.values(target._local):
        if not value.is_inference():
            increment_version(value)


def _turned(target: Wrapper, view: Wrapper) -> tuple[Wrapper, Wrapper] | None:
    """Change the local tensors of `target` in place into their views, so that autograd does what it does in torch:
    gradients of earlier views go through the new tensor, hooks stay with the old one. Returns the old and the new
    tensor; None where a rank's local result is no view."""
    comm, local = target._layout.mesh.comm, target._local
    mine, views = comm.values(local), comm.values(view._local)
    if comm.structure(local) != comm.structure(view._local):
        return None
    if any(storage_id(x) != storage_id(y) or storage_id(x) in LOCAL_COPIES for x, y in zip(mine, views, strict=True)):
        return None
    places = [(x.shape, x.stride(), x.storage_offset()) for x in mine]
    for x, y in zip(mine, views, strict=True):
        turn_into(x, y)
    with torch.enable_grad():
        was = [view_at(x, *place) for x, place in zip(mine, places, strict=True)] if COPIES else mine
    now = wrap(comm.rebuild(local, mine), view._layout, view._offset)
    now._origin = origin_of(view)
    before = wrap(comm.rebuild(local, was), target._layout, target._offset)
    before._origin = origin_of(target)
    return before, now


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
        return packet  # it accepts all that the in-place overload accepts; Tensor.index_put would refuse None
    return getattr(torch.Tensor, base, None) or getattr(torch, base, None)


def _starts_with_tensor(packet: Any) -> bool:
    """Whether the op takes its tensor first: polygamma takes a number first."""
    arguments = schema_of(getattr(packet, packet.overloads()[0])).arguments
    return bool(arguments) and "Tensor" in str(arguments[0].type)
