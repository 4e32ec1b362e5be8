"""Makes the plan of a new kind of call: by its rule, by `out=`, by gathering, or by the ops that torch makes it of."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from shardwise.context import of_thread
from shardwise.engine import autocast
from shardwise.engine.call_shape import CallShape, asks_for_a_value, numbers_in, op_name, tensors_in
from shardwise.engine.extremes import pending_or_finished
from shardwise.engine.fallback import NO_RULE, rebound, replicated, written_back
from shardwise.engine.into_out import into_outs, takes_outs
from shardwise.engine.keys import ANY_FLOAT
from shardwise.engine.nothing_here import nothing_here
from shardwise.engine.overlap import minding_overlap
from shardwise.engine.plain_tensors import mesh_in, replicated_plain
from shardwise.engine.plan import Plan, build_plan
from shardwise.engine.saved import watched
from shardwise.engine.several_meshes import over_meshes
from shardwise.errors import ShardwiseError
from shardwise.functions import may_write, writes_first
from shardwise.strategy import registry
from shardwise.strategy.lost import LOST, lost_argument
from shardwise.strategy.relayout import Relayout
from shardwise.strategy.spec import Algorithm, Factors, Gathered, Operand
from shardwise.torch_private.autograd import without_transforms
from shardwise.torch_private.tensors import (
    OpOverload,
    are_transforms_active,
    fake_mode,
    schema_of,
    without_fake_mode,
    without_torch_function,
)
from shardwise.wrapper import Wrapper

_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x2": "other"}  # which torch takes too


def planned(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
    """The plan of a call. It is made outside of inference mode and of torch.func, because it is used after they end:
    tensors made inside have no bases, and autograd refuses some of them."""
    if are_transforms_active():
        with without_transforms():
            return planned(func, args, kwargs)
    if not torch.is_inference_mode_enabled() and fake_mode() is None:
        return make_plan(func, args, kwargs)
    with without_fake_mode(), torch.inference_mode(False):  # plans are made with real integers
        return make_plan(func, args, kwargs)


def make_plan(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
    """The plan of a call; of a function that loses an argument, one that looks for it first."""
    plan = _plan_as_given(func, args, kwargs)
    if func not in LOST:
        return plan
    lost = LOST[func]

    def run(args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> object:
        found = lost_argument(func, lost.name)
        if found is None:
            return plan(args, kwargs, local_args, local_kwargs)
        return lost.again(found, *args, **kwargs)

    return run


def _plan_as_given(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
    """What the rule of a call leads to, if there is one for this form of it."""
    if "out" not in kwargs:
        several = over_meshes(func, args, kwargs)
        if several is not None:
            return several
    call = CallShape(func, args, kwargs)
    plan = _plan_of(func, call)
    comm = call.mesh.comm
    overlaps = len(call.paths) > 1 and not (comm.outside or comm.outlined) and may_write(func, kwargs)
    return minding_overlap(func, call, plan) if overlaps else plan


def _plan_of(func: Callable[..., object], call: CallShape) -> Plan:
    kwargs = call.kwargs
    plan = _by_rule(func, call) if "out" not in kwargs or registry.is_users(func) else None
    if plan is not None:
        return plan
    if takes_outs(func, kwargs):
        return into_outs(func, call)
    if isinstance(func, OpOverload):
        if call.mesh.comm.outside:
            return nothing_here(func, None, call, writes_first(func))
        in_aten = getattr(func, "impl_aten", None)  # a primitive of torch's says which other function it is
        if in_aten is not None and call.meta_result() is not None:
            return lambda args, kwargs, local_args, local_kwargs: in_aten(*args, **kwargs)
        return _gathered(func, call)
    casts = autocast.casts_of(call) if autocast.is_on() else None
    if casts is not None and casts is not autocast.INSIDE:
        return autocast.cast_first(func, call, casts)
    return lambda args, kwargs, local_args, local_kwargs: _call_parts(func, args, kwargs)


def _gathered(
    func: Callable[..., object], call: CallShape, reason: str = NO_RULE, check: Callable[..., None] | None = None
) -> Plan:
    plan = replicated(func, call, reason, check)
    return watched(plan, call, {i: functools.partial(plan.moved_operand, i) for i in plan.moved})


def _by_rule(func: Callable[..., Any], call: CallShape) -> Plan | None:
    """The plan of the function's rule; None without a rule, or where it has none for this form of the call."""
    found = registry.find(func)
    if found is None:
        return None
    if found.any_float:
        ANY_FLOAT.add(func)
    numbers = {i for i, path in enumerate(call.paths) if path[0] in found.numbers}
    if numbers:
        return with_item_values(func, numbers)
    try:
        return _ruled(func, call, found)
    except RuntimeError as error:
        numbers = numbers_in(call) if asks_for_a_value(error) else set()
        if not numbers:
            raise
        return with_item_values(func, numbers)


def _ruled(func: Callable[..., Any], call: CallShape, found: registry.Found) -> Plan | None:
    placed = placed_for(found.rule, *call.with_tensors(call.operands))
    if placed is not None and is_out_of_order(call, *placed):
        return reordered(func, found.rule)
    spec = spec_of(found.rule, call, *placed) if placed is not None else None
    if spec is None:
        return None
    if found.in_place and (isinstance(spec, Relayout) or (isinstance(spec, Algorithm) and spec.is_view)):
        return rebound(func)
    if autocast.is_on():
        casts = autocast.casts_of(call)
        if casts is autocast.INSIDE:
            return None
        if casts is not None and not autocast.done_by_ranks(spec, call, casts):
            return autocast.cast_first(func, call, casts)
    if call.mesh.comm.outside:
        return nothing_here(func, spec, call, found.in_place or registry.in_place_flag(func, call.args, call.kwargs))
    if isinstance(spec, Gathered):
        return _gathered(func, call, spec.reason, spec.check)
    in_place = found.in_place or registry.in_place_flag(func, call.args, call.kwargs)
    try:
        plan = build_plan(func, spec, call, in_place) or watched(written_back(func, call), call, {}, is_copied=True)
        if isinstance(spec, Factors):
            plan = pending_or_finished(func, spec, call, in_place, plan)
    except ShardwiseError:
        raise
    # torch cannot tell the result's shape; if it cannot compute it either, it raises when the plan runs
    except NotImplementedError:
        return _gathered(func, call)
    schema = schema_of(func)
    return plan if schema is None or schema.returns or not in_place else _returning_nothing(plan)


def spec_of(rule: registry.Rule, call: CallShape, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The rule's answer. Where a call is wrong in a way the rule did not foresee, the error is torch's own."""
    try:
        return rule(*args, **kwargs)
    except ShardwiseError:
        raise
    except Exception:
        call.check()
        raise


def _returning_nothing(plan: Plan) -> Plan:
    def run(args: Any, kwargs: Any, local_args: Any, local_kwargs: Any) -> None:
        plan(args, kwargs, local_args, local_kwargs)

    return run


def _call_parts(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """No rule for the whole function: torch calls the aten ops it is made of, and each of those comes back to us."""
    if not are_transforms_active():
        with without_torch_function():
            result = func(*args, **kwargs)
    else:  # transforms have wrapped the local tensors: see `transforms.py`
        with without_torch_function(), without_transforms() as hidden:
            outer, of_thread.hidden = of_thread.hidden, hidden
            try:
                result = func(*args, **kwargs)
            finally:
                of_thread.hidden = outer
    if type(result) is torch.Tensor:  # made from shapes alone
        mesh = mesh_in(args, kwargs)
        return result if mesh is None else replicated_plain(result, mesh)
    return result


# -- forms of the arguments that a rule does not take as they are ------------------------------------------------
def placed_for(
    rule: registry.Rule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """The arguments in the order in which the rule takes them, torch's `input` first; None if it lacks a name."""
    if not kwargs:
        return args, kwargs
    signature = inspect.signature(rule)
    kwargs = {_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}
    first = next(iter(signature.parameters.values()))
    if not args and "input" in kwargs and first.kind is first.POSITIONAL_OR_KEYWORD:
        args = (kwargs.pop("input"),)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    return bound.args, bound.kwargs


def is_out_of_order(call: CallShape, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a rule takes the tensors in another order than the call names them, or the first one by position only."""
    ordered = [op.index for _, op in tensors_in(args, kwargs, Operand)]
    return (bool(args) and not call.args) or ordered != [op.index for op in call.operands]


def reordered(func: Callable[..., Any], rule: registry.Rule) -> Plan:
    """The plan of a call that names its tensors in another order than the rule does: call it again in that order."""

    def run(args: Any, kwargs: Any, local_args: Any, local_kwargs: Any) -> Any:
        placed = placed_for(rule, args, kwargs)
        assert placed is not None  # it was not None when the plan was made
        return func(*placed[0], **placed[1])

    return run


def with_item_values(func: Callable[..., Any], which: set[int]) -> Plan:
    """The plan of a call with 0-d tensors where torch takes numbers: call it again with the numbers of `which`."""
    called = getattr(func, "overloadpacket", func)  # another overload may be the one for numbers

    def number(tensor: Wrapper) -> Any:
        if tensor.requires_grad:
            raise TypeError(f"{op_name(func)}: a number is needed, not a tensor that requires grad")
        return tensor.item()

    def run(args: Any, kwargs: Any, local_args: Any, local_kwargs: Any) -> Any:
        count = itertools.count()
        args = tuple(tuple(a) if isinstance(a, list) else a for a in args)  # x[[i, j]] is x[i, j] for tensors only
        args, kwargs = tree_map_only(Wrapper, lambda t: number(t) if next(count) in which else t, (args, dict(kwargs)))
        return called(*args, **kwargs)

    return run
