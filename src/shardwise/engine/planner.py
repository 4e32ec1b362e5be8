"""From a call never seen before to its plan: by its rule, by `out=`, by gathering, or by torch's own parts of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.engine import autocast
from shardwise.engine.argument_forms import is_out_of_order, placed_for, reordered, with_item_values
from shardwise.engine.call_shape import CallShape, asks_for_a_value, numbers_in
from shardwise.engine.fallback import rebound, replicated, written_back
from shardwise.engine.into_out import into_outs, takes_outs
from shardwise.engine.keys import ANY_FLOAT
from shardwise.engine.plain_tensors import mesh_in, replicated_plain
from shardwise.engine.plan import Plan, build_plan
from shardwise.errors import ShardwiseError
from shardwise.strategy import registry
from shardwise.strategy.relayout import Relayout
from shardwise.strategy.spec import Gathered
from shardwise.torch_private import OpOverload, schema_of, without_torch_function


def planned(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
    """The plan of a call, made outside of inference mode: a plan outlives it, and tensors made in that mode know no
    bases and may not meet those of autograd."""
    if not torch.is_inference_mode_enabled():
        return make_plan(func, args, kwargs)
    with torch.inference_mode(False):
        return make_plan(func, args, kwargs)


def make_plan(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
    """The plan of a call: what its rule leads to, if there is one for this form of it."""
    call = CallShape(func, args, kwargs)
    plan = _by_rule(func, call) if "out" not in kwargs else None
    if plan is not None:
        return plan
    if takes_outs(func, kwargs):
        return into_outs(func, call)
    if isinstance(func, OpOverload):
        return replicated(func, call)
    casts = autocast.casts_of(call) if autocast.is_on() else None
    if casts is not None and casts is not autocast.INSIDE:
        return autocast.cast_first(func, call, casts)
    return lambda args, kwargs, local_args, local_kwargs: _call_parts(func, args, kwargs)


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
    if found.in_place and isinstance(spec, Relayout):
        return rebound(func)
    if autocast.is_on():
        casts = autocast.casts_of(call)
        if casts is autocast.INSIDE:
            return None
        if casts is not None and not autocast.done_by_ranks(spec, call, casts):
            return autocast.cast_first(func, call, casts)
    if isinstance(spec, Gathered):
        return replicated(func, call, spec.reason, spec.check)
    in_place = found.in_place or registry.in_place_flag(func, call.args, call.kwargs)
    try:
        plan = build_plan(func, spec, call, in_place) or written_back(func, call)
    except ShardwiseError:
        raise
    except NotImplementedError:  # torch cannot tell the result's shape; if it cannot compute it either, it says so then
        return replicated(func, call)
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
    with without_torch_function():
        result = func(*args, **kwargs)
    if type(result) is torch.Tensor:  # made from shapes alone
        mesh = mesh_in((*args, *kwargs.values()))
        return result if mesh is None else replicated_plain(result, mesh)
    return result
