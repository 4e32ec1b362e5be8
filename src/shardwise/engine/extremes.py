"""Pending greatest and least values through ops that keep the order of numbers: they stay pending.

Which way an op goes may depend on the numbers of a call, and whether a gradient is recorded on its tensors, so both are
asked when a plan runs. Where a gradient is recorded, the value is finished first, unless the op keeps different numbers
apart: of clamp's results several parts may be the greatest, of its operands one, and the gradient is that one's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from shardwise.engine.call_shape import CallShape, tensors_in
from shardwise.engine.plan import Plan, build_plan
from shardwise.layout import Partial
from shardwise.strategy.spec import Factors, Order
from shardwise.torch_private.autograd import is_recorded
from shardwise.wrapper import Wrapper, wrap

TURNED = {Partial("max"): Partial("min"), Partial("min"): Partial("max")}


def pending_or_finished(
    func: Callable[..., Any], spec: Factors, call: CallShape, in_place: bool, finished: Plan
) -> Plan:
    """The plan that leaves greatest and least values pending where that is right, and else is `finished`."""
    order = spec.order
    if order is None or not _are_extremes(order, call):
        return finished
    kept = dataclasses.replace(spec, linear="joint", joint=_pending(call), extremes=True)
    pending = build_plan(func, kept, call, in_place)
    if pending is None:
        return finished
    name = call.name

    def run(args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> object:
        way = order.way(name, *args, **kwargs)
        recorded = not order.one_to_one and any(is_recorded(t) for _, t in tensors_in(args, kwargs))
        if not way or recorded or (in_place and way < 0):
            return finished(args, kwargs, local_args, local_kwargs)
        result = pending(args, kwargs, local_args, local_kwargs)
        return result if way > 0 else _turned(result)

    return run


def _pending(call: CallShape) -> frozenset[int]:
    """The operands of which something is pending."""
    return frozenset(i for i, layout in enumerate(call.layouts) if layout.is_partial)


def _are_extremes(order: Order, call: CallShape) -> bool:
    """Whether all that is pending are greatest or least values, in operands that the op may take so."""
    pending = _pending(call)
    kinds = {p for layout in call.layouts for p in layout.placements if p.is_partial()}
    if not pending or not kinds <= set(TURNED):
        return False
    return pending == {0} or (len(pending) == 1 and order.in_each) or kinds == {order.together}


def _turned(result: Wrapper) -> Wrapper:
    """The result of an op that reverses the order: pending greatest values become pending least values."""
    layout = result._layout
    places = tuple(TURNED.get(p, p) for p in layout.placements)  # type: ignore[call-overload]
    return wrap(result._local, layout.replace(placements=places))
