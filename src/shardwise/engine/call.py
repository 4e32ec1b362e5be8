"""The way of a call. One engine, two entry points: `call_function` (fast, sees whole functions) and `call_overload`
(complete: every aten op arrives there). Both look a plan up by function, layouts and static arguments.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_flatten, tree_map_only

import shardwise.rules  # noqa: F401  (importing them registers them)
from shardwise.context import functions, refuses_plain
from shardwise.engine import autocast
from shardwise.engine.cache import PlanCache, register_cache
from shardwise.engine.call_shape import CallShape, asks_for_a_value, numbers_in, op_name, tensors_in
from shardwise.engine.fallback import rebound, replicated, written_back
from shardwise.engine.into_out import check_not_resized, into_outs, out_names, takes_outs
from shardwise.engine.plan import Plan, build_plan
from shardwise.errors import AutogradError, LayoutError, MeshError, ShardwiseError, StrictError
from shardwise.layout import Layout
from shardwise.layout.placement import REPLICATE
from shardwise.move import plan_steps
from shardwise.strategy import registry
from shardwise.strategy.relayout import Relayout
from shardwise.strategy.spec import Gathered, Operand
from shardwise.torch_private import (
    OpOverload,
    are_transforms_active,
    is_forward_grad_enabled,
    is_transformed,
    reentrant,
    schema_of,
    with_torch_function,
    without_torch_function,
)
from shardwise.wrapper import Wrapper, wrap

PLANS = PlanCache(maxsize=8192)
register_cache("plans", PLANS.info, PLANS.reset)
register_cache("moves", plan_steps.cache_info, plan_steps.cache_clear)

SPECIAL: dict[Any, Callable[..., Any]] = {}  # functions the tensor class answers itself: backward, item, repr, ...
_NO_KWARGS: dict[str, Any] = {}
ANY_FLOAT: set[Any] = set()  # functions whose plans do not depend on float arguments: a learning rate fills no cache
ODD_FLOATS = frozenset({0.0, math.inf, -math.inf})  # except on these: parts of a sum over zero have no sum
_TRUE, _FALSE = object(), object()  # True == 1 and hashes alike: plans must tell them apart
_is_any_autocast_enabled = autocast.is_on
_is_grad_enabled = torch.is_grad_enabled
_get_default_dtype = torch.get_default_dtype


class _PlainTensor(Exception):
    """A plain tensor among the arguments: it must be wrapped first."""


class _NumpyNumber(Exception):
    """An integer of numpy's among the arguments, which rules must take for Python's."""


def call_function(cls: type, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    """`__torch_function__`: a torch function on distributed tensors runs its cached plan, or makes one."""
    special = SPECIAL.get(func)
    if special is not None:
        return special(*args, **kwargs) if kwargs else special(*args)
    key: list[Any] = [func]
    locals: list[Any] = []
    local_kwargs = _NO_KWARGS
    whole_key: tuple[Any, ...] | None
    try:
        for arg in args:
            kind = type(arg)
            if kind is cls:
                key.append(arg._layout)
                locals.append(arg._local)
            elif kind is int or arg is None:
                key.append(arg)
                locals.append(arg)
            elif kind is float:
                key.append(float if func in ANY_FLOAT and arg not in ODD_FLOATS else (float, arg))
                locals.append(arg)
            elif kind is slice:
                arg = in_numbers(arg)
                key.append((slice, arg.start, arg.stop, arg.step))
                locals.append(arg)
            else:
                frozen, local = freeze(arg, func in ANY_FLOAT)
                key.append(frozen)
                locals.append(local)
        if kwargs:
            local_kwargs = {}
            for name, arg in kwargs.items():
                kind = type(arg)
                key.append(name)
                if arg is None or kind is int or kind is str:
                    key.append(arg)
                    local_kwargs[name] = arg
                elif kind is bool:
                    key.append(_TRUE if arg else _FALSE)
                    local_kwargs[name] = arg
                else:
                    frozen, local_kwargs[name] = freeze(arg, func in ANY_FLOAT)
                    key.append(frozen)
        else:
            kwargs = _NO_KWARGS
        if _is_any_autocast_enabled():
            key.append(autocast.state())
        if _get_default_dtype() is not torch.float32:  # what integers become in a division
            key.append(_get_default_dtype())
        whole_key = tuple(key)
        plan = PLANS.get(whole_key)
    except _PlainTensor:
        whole_key = None
    except _NumpyNumber:
        args, kwargs = tree_map_only(numpy.integer, int, (tuple(args), kwargs or {}))
        return call_function(cls, func, types, args, kwargs)
    if whole_key is None:
        if are_transforms_active() and _has_transformed(args, kwargs):
            with without_torch_function():  # functorch first: what it unwraps comes back by dispatch
                return func(*args, **(kwargs or _NO_KWARGS))
        args, wrapped = with_plain_wrapped(op_name(func), args, kwargs)
        result = call_function(cls, func, types, args, wrapped)
        for name in out_names(func) if kwargs else ():
            if name in kwargs:
                check_not_resized(op_name(func), kwargs[name], wrapped[name])
        return result
    if not _is_grad_enabled() and not is_forward_grad_enabled():
        check_custom_function(func, args)
    if plan is None:
        plan = _planned(func, args, kwargs)
        PLANS.add(whole_key, plan)
    else:
        PLANS.hits += 1
    return plan(args, kwargs, locals, local_kwargs)


def call_overload(cls: type, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    """`__torch_dispatch__`: an aten op on distributed tensors, recorded by autograd on the local tensors."""
    if args and type(args[0]) is torch.Tensor and args[0].requires_grad and schema_of(func).is_mutable:
        raise AutogradError(
            f"{op_name(func)}: a function of torch writes a distributed tensor into a plain one that it made and that "
            f"requires grad by now: the gradient would be lost. Write the function's parts in Python"
        )
    with reentrant(), with_torch_function():
        if not _is_any_autocast_enabled():
            result = call_function(cls, func, types, args, kwargs)
        else:  # it has cast what it casts on the way here
            with autocast.off():
                result = call_function(cls, func, types, args, kwargs)
    if not torch.is_inference_mode_enabled():
        return result
    born_there = all(tensor.is_inference() for _, tensor in tensors_in(args, kwargs or _NO_KWARGS))
    return result if born_there else tree_map_only(Wrapper, _not_inference, result)


def _not_inference(result: Any) -> Any:
    """A wrapper that C++ may make a view of a tensor from outside of inference mode."""
    if not result.is_inference():
        return result
    with torch.inference_mode(False):
        return wrap(result._local, result._layout)


def freeze(arg: Any, any_float: bool = False) -> tuple[Any, Any]:
    """A hashable key for an argument, and the argument with local values for tensors."""
    if isinstance(arg, Wrapper):
        return arg._layout, arg._local
    kind = type(arg)
    if kind in _PLAIN:
        return arg, arg
    if kind is bool:
        return (_TRUE if arg else _FALSE), arg
    if kind is float or kind is complex:
        return (kind if any_float and arg not in ODD_FLOATS else (kind, arg)), arg
    if isinstance(arg, torch.Tensor):
        raise _PlainTensor
    if kind is slice:
        arg = in_numbers(arg)
        return (slice, arg.start, arg.stop, arg.step), arg
    if isinstance(arg, (list, tuple)):
        if set(map(type, arg)) == {Wrapper.concrete}:  # thousands of parameters may stand here
            locals = [item._local for item in arg]
            return (kind, *[item._layout for item in arg]), locals if kind is list else tuple(locals)
        plain = [item if type(item) in _PLAIN else _slice_key(item) for item in arg]
        if _OTHER not in plain:
            return (kind, *plain), arg
        pairs = [freeze(item, any_float) for item in arg]
        frozen = (kind, *(k for k, _ in pairs))
        values = [v for _, v in pairs]
        return frozen, values if isinstance(arg, list) else tuple(values)
    if isinstance(arg, dict):
        return (dict, *((k, freeze(v)[0]) for k, v in arg.items())), {k: freeze(v)[1] for k, v in arg.items()}
    if isinstance(arg, numpy.integer):
        raise _NumpyNumber
    try:
        hash(arg)
    except TypeError:
        return (kind, id(arg)), arg
    return (kind, arg), arg  # numpy's 1.0 equals 1 and hashes alike


_PLAIN = frozenset({int, str, type(None), type(Ellipsis), torch.dtype, torch.device})
_OTHER = object()


def _slice_key(item: Any) -> Any:
    if type(item) is not slice or item is not in_numbers(item):
        return _OTHER
    return (slice, item.start, item.stop, item.step)


_BOUNDS = frozenset({int, type(None)})


def in_numbers(bounds: slice) -> slice:
    """The slice with numbers for the tensors among its bounds, whose values may change."""
    start, stop, step = bounds.start, bounds.stop, bounds.step
    if type(start) in _BOUNDS and type(stop) in _BOUNDS and type(step) in _BOUNDS:
        return bounds
    return slice(*(None if bound is None else operator.index(bound) for bound in (start, stop, step)))


def _planned(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
    """A plan outlives inference mode, whose tensors know no bases and may not meet those of autograd."""
    if not torch.is_inference_mode_enabled():
        return make_plan(func, args, kwargs)
    with torch.inference_mode(False):
        return make_plan(func, args, kwargs)


def make_plan(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
    """The plan for a call never seen before."""
    found = registry.find(func) if "out" not in kwargs else None
    call = CallShape(func, args, kwargs)
    if found is not None:
        if found.any_float:
            ANY_FLOAT.add(func)
        named = {i for i, path in enumerate(call.paths) if path[0] in found.numbers}
        if named:
            return _with_numbers(func, named)
        try:
            plan = _ruled(func, call, found)
        except RuntimeError as error:
            numbers = numbers_in(call) if asks_for_a_value(error) else None
            if not numbers:
                raise
            return _with_numbers(func, numbers)
        if plan is not None:
            return plan
    if takes_outs(func, kwargs):
        return into_outs(func, call)
    if isinstance(func, OpOverload):
        return replicated(func, call)
    casts = autocast.casts_of(call) if _is_any_autocast_enabled() else None
    if casts is not None and casts is not autocast.INSIDE:
        return autocast.cast_first(func, call, casts)
    return lambda args, kwargs, locals, local_kwargs: _lower(func, args, kwargs)


def _ruled(func: Any, call: CallShape, found: registry.Found) -> Plan | None:
    """The plan the rule leads to; None where the rule has none for this form of the call."""
    placed = placed_for(found.rule, *call.with_tensors(call.operands))
    if placed is not None and out_of_order(call, *placed):
        return _reordered(func, found.rule)
    spec = spec_of(found.rule, call, *placed) if placed is not None else None
    if spec is None:
        return None
    if found.in_place and isinstance(spec, Relayout):
        return rebound(func)
    if _is_any_autocast_enabled():
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
    schema = getattr(func, "_schema", None)
    return plan if schema is None or schema.returns or not in_place else _returning_nothing(plan)


def spec_of(rule: Callable[..., Any], call: CallShape, args: Any, kwargs: dict[str, Any]) -> Any:
    """What the rule says. Where a call is wrong in a way the rule did not foresee, the error is torch's own."""
    try:
        return rule(*args, **kwargs)
    except ShardwiseError:
        raise
    except Exception:
        call.check()
        raise


def _returning_nothing(plan: Plan) -> Plan:
    def run(args: Any, kwargs: Any, locals: Any, local_kwargs: Any) -> None:
        plan(args, kwargs, locals, local_kwargs)

    return run


_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x2": "other"}  # which torch takes too


def placed_for(rule: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """The arguments as the rule takes them: in its order, torch's `input` first. None where it does not know a name."""
    if not kwargs:
        return args, kwargs
    signature = inspect.signature(rule)
    kwargs = {_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}
    first = next(iter(signature.parameters.values()))
    if not args and "input" in kwargs and first.kind is first.POSITIONAL_OR_KEYWORD:
        args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    return bound.args, bound.kwargs


def out_of_order(call: CallShape, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a rule takes the tensors in another order than the call names them, or the first one by position only."""
    return (bool(args) and not call.args) or [op.index for _, op in tensors_in(args, kwargs, Operand)] != [
        op.index for op in call.operands
    ]


def _reordered(func: Any, rule: Callable[..., Any]) -> Plan:
    """A call that names its tensors in another order than the rule does."""

    def run(args: Any, kwargs: Any, locals: Any, local_kwargs: Any) -> Any:
        placed = placed_for(rule, args, kwargs)
        assert placed is not None  # it was when the plan was made
        return func(*placed[0], **placed[1])

    return run


def _with_numbers(func: Any, which: set[int]) -> Plan:
    """A call that gives 0-d tensors where torch takes numbers: those of the call's tensors. aten may have another
    overload for numbers."""
    called = getattr(func, "overloadpacket", func)

    def number(tensor: Any) -> Any:
        if tensor.requires_grad:
            raise TypeError(f"{op_name(func)}: a number is needed, not a tensor that requires grad")
        return tensor.item()

    def run(args: Any, kwargs: Any, locals: Any, local_kwargs: Any) -> Any:
        count = itertools.count()
        args = tuple(tuple(a) if isinstance(a, list) else a for a in args)  # x[[i, j]] is x[i, j] for tensors only
        given = tree_map_only(Wrapper, lambda t: number(t) if next(count) in which else t, (args, dict(kwargs)))
        return called(*given[0], **given[1])

    return run


def _lower(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """No rule at this level: let torch go on to its overloads, which come back one by one."""
    with without_torch_function():
        result = func(*args, **kwargs)
    if type(result) is torch.Tensor:  # made from shapes alone
        mesh = _mesh_in((*args, *kwargs.values()))
        return result if mesh is None else replicated_plain(result, mesh)
    return result


# -- plain tensors count as replicated ---------------------------------------------------------------------
def with_plain_wrapped(name: str, args: Sequence[Any], kwargs: Any) -> tuple[Any, Any]:
    """The arguments with every plain tensor wrapped as Replicate on the mesh of the others."""
    _refuse_if_strict(name)
    kwargs = kwargs or {}
    mesh = _mesh_in((*args, *kwargs.values()))
    if mesh is None:
        raise MeshError(f"{name}: no distributed tensor among the arguments")
    return tuple(_wrapped(a, mesh) for a in args), {k: _wrapped(v, mesh) for k, v in kwargs.items()}


def plain_wrapped(name: str, value: torch.Tensor, mesh: Any) -> Any:
    """A plain tensor that `name` is given, as a Replicate one on `mesh`."""
    _refuse_if_strict(name)
    return replicated_plain(value, mesh)


def _refuse_if_strict(name: str) -> None:
    if refuses_plain():
        raise StrictError(
            f"{name}: a plain tensor meets a distributed one under strict(); "
            f"make it a DTensor with distribute_tensor(x, mesh, [Replicate(), ...])"
        )


def _has_transformed(args: Sequence[Any], kwargs: Any) -> bool:
    """Whether a tensor of torch.func's transforms is among the arguments: it may hold a distributed one."""
    tensors, _ = tree_flatten((args, kwargs))
    return any(isinstance(t, torch.Tensor) and is_transformed(t) for t in tensors)


def _mesh_in(values: Any) -> Any:
    for value in values:
        if isinstance(value, Wrapper):
            return value._layout.mesh
        if isinstance(value, (list, tuple)):
            mesh = _mesh_in(value)
            if mesh is not None:
                return mesh
    return None


def _wrapped(value: Any, mesh: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, Wrapper):
        return replicated_plain(value, mesh)
    if isinstance(value, (list, tuple)) and any(isinstance(v, (torch.Tensor, list, tuple)) for v in value):
        return type(value)(_wrapped(v, mesh) for v in value) if type(value) in (list, tuple) else value
    return value


def replicated_plain(value: torch.Tensor, mesh: Any) -> Any:
    """A plain tensor as a Replicate one on `mesh`, sharing its memory and its autograd history."""
    comm = mesh.comm
    if hasattr(value, "ranks"):
        raise MeshError("a RankTensor meets a DTensor; say how it is laid out: DTensor.from_local(x, mesh, placements)")
    if value.layout is not torch.strided:
        raise LayoutError(f"a {value.layout} tensor meets a DTensor, which only dense ones can; use x.to_dense()")
    layout = Layout.make(
        mesh, [REPLICATE] * len(mesh.shape), tuple(value.shape), value.dtype, value.stride(), value.device
    )
    return wrap(comm.shared(value), layout)


def check_custom_function(func: Any, args: Sequence[Any]) -> None:
    """Inside torch.autograd.Function.forward (grad and forward-mode grad are both off, but not inference mode) a tensor
    that needs grad loses its gradient unless `custom_function` applied the Function: it knows the local tensors. It did
    not where someone took hold of torch's own `apply` before this package was imported."""
    if functions.applying or torch.is_inference_mode_enabled():
        return
    for arg in args:
        if isinstance(arg, Wrapper) and arg._layout.mesh.comm.first(arg._local).requires_grad:
            raise AutogradError(
                f"{op_name(func)} on a distributed tensor that requires grad inside a torch.autograd.Function whose "
                f"`apply` was taken before shardwise was imported: its gradient would be lost. Import shardwise before "
                f"the module that defines the Function, or call MyFunction.apply(x) itself"
            )
