"""The two entry points of a call on distributed tensors.

`call_function` is fast and sees whole torch functions; `call_overload` is complete, because every aten op arrives
there. Both look up a plan by the function, the layouts of the tensors and the other arguments (`keys.py`), and run it.
Where there is none yet, `planner.py` makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_map_only

import shardwise.rules  # noqa: F401  (importing them registers them)
from shardwise.comm.capturing import unwritten
from shardwise.comm.flight import flights
from shardwise.comm.watch import errors
from shardwise.context import of_thread
from shardwise.engine import autocast
from shardwise.engine.call_shape import op_name, tensors_in
from shardwise.engine.into_out import out_names, resize_plain
from shardwise.engine.keys import (
    ANY_FLOAT,
    ODD_FLOATS,
    NumpyNumberError,
    PlainTensorError,
    as_number,
    freeze,
    freeze_kwargs,
)
from shardwise.engine.plain_tensors import mesh_in, refuse_own_batches, with_plain_wrapped
from shardwise.engine.planner import planned
from shardwise.engine.results import checked
from shardwise.engine.transforms import call_transformed
from shardwise.errors import AutogradError, ShardwiseError
from shardwise.functions import writes_first
from shardwise.torch_private.autograd import reentrant, with_transforms
from shardwise.torch_private.tensors import (
    are_transforms_active,
    is_forward_grad_enabled,
    schema_of,
    with_torch_function,
)
from shardwise.wrapper import Wrapper, wrap

SPECIAL: dict[Any, Callable[..., Any]] = {}  # functions that the tensor class handles itself: backward, item, repr, ...
_NO_KWARGS: dict[str, Any] = {}
_is_any_autocast_enabled = autocast.is_on
_is_grad_enabled = torch.is_grad_enabled
_get_default_dtype = torch.get_default_dtype


def call_function(cls: type, func: Any, types: tuple[type, ...], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    """`__torch_function__`: a torch function on distributed tensors runs its cached plan, or makes one."""
    special = SPECIAL.get(func)
    if special is not None:
        try:
            return special(*args, **kwargs) if kwargs else special(*args)
        except Exception as error:
            errors.add(op_name(func), error)
            raise
    key: list[Any] = [func]
    local_args: list[Any] = []
    local_kwargs = _NO_KWARGS
    layout = None
    try:
        for arg in args:
            kind = type(arg)
            if kind is cls:
                layout = arg._layout
                key.append(layout)
                local_args.append(arg._local)
            elif kind is int or arg is None:
                key.append(arg)
                local_args.append(arg)
            elif kind is float:
                key.append(float if func in ANY_FLOAT and arg not in ODD_FLOATS else (float, arg))
                local_args.append(arg)
            else:
                frozen, local = freeze(arg, func)
                key.append(frozen)
                local_args.append(local)
        if kwargs:
            local_kwargs = freeze_kwargs(kwargs, func, key)
        else:
            kwargs = _NO_KWARGS
    except PlainTensorError:
        return _call_with_plain_tensors(cls, func, types, args, kwargs)
    except NumpyNumberError:
        args, kwargs = tree_map_only((numpy.integer, numpy.ndarray), as_number, (tuple(args), kwargs or {}))
        return call_function(cls, func, types, args, kwargs)
    if _is_any_autocast_enabled():
        key.append(autocast.state())
    if _get_default_dtype() is not torch.float32:  # what integers become in a division
        key.append(_get_default_dtype())
    if not _is_grad_enabled() and not is_forward_grad_enabled():
        _check_gradient_is_kept(func, args)
    whole_key = tuple(key)
    mesh = mesh_in(args, kwargs) if layout is None else layout.mesh
    if mesh is None:  # deep in a container
        return planned(func, args, kwargs)(args, kwargs, local_args, local_kwargs)
    plans = mesh.plans
    try:
        plan = plans.get(whole_key)
    except TypeError:  # an argument without a hash: the plan cannot be cached
        return planned(func, args, kwargs)(args, kwargs, local_args, local_kwargs)
    try:
        if plan is None:
            with unwritten():
                plan = planned(func, args, kwargs)
            first = plan if not flights else partial(flights[0].run_op, func, op_name, plan)
            plan, result = checked(op_name(func), plan, first(args, kwargs, local_args, local_kwargs))
            plans.add(whole_key, plan)
            return result
        plans.hits += 1
        if flights:
            return flights[0].run_op(func, op_name, plan, args, kwargs, local_args, local_kwargs)
        return plan(args, kwargs, local_args, local_kwargs)
    except Exception as error:
        errors.add(op_name(func), error)
        _check_not_a_leaf(func, args, error)
        raise


def _check_not_a_leaf(func: Callable[..., Any], args: Sequence[Any], error: Exception) -> None:
    """Raise torch's error about a write into a leaf, which comes before any other error of the call."""
    target = args[0] if args and torch.is_grad_enabled() and writes_first(func) else None
    if not isinstance(target, Wrapper) or not isinstance(error, (RuntimeError, IndexError, ValueError)):
        return
    says_so = isinstance(error, ShardwiseError) or "require grad" in str(error)
    says_so = says_so or func is torch.Tensor.__setitem__  # `__setitem__` checks its indices before it writes
    if target.requires_grad and target.is_leaf and not says_so:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.") from error


def _check_gradient_is_kept(func: Callable[..., Any], args: Sequence[Any]) -> None:
    """Raise if `func` is called inside of a Function that C++ autograd, which does not see the local tensors, applied
    to a distributed one: by an `apply` that the program stored before `custom_function` replaced it. To be called
    where grad mode and forward-mode grad are both off, as in a Function's forward and in inference mode only."""
    if of_thread.applying or torch.is_inference_mode_enabled():
        return
    for arg in args:
        if isinstance(arg, Wrapper) and arg._layout.mesh.comm.first(arg._local).requires_grad:
            raise AutogradError(
                f"{op_name(func)} on a distributed tensor that requires grad inside a torch.autograd.Function whose "
                f"`apply` was taken before shardwise was imported: its gradient would be lost. Import shardwise before "
                f"the module that defines the Function, or call MyFunction.apply(x) itself"
            )


def _call_with_plain_tensors(cls: type, func: Any, types: tuple[type, ...], args: Sequence[Any], kwargs: Any) -> Any:
    """The same call with every plain tensor among the arguments made a Replicate one."""
    if are_transforms_active():
        result = call_transformed(func, args, kwargs)
        if result is not NotImplemented:
            return result
    refuse_own_batches(func, args, kwargs)
    args, wrapped = with_plain_wrapped(op_name(func), args, kwargs)
    result = call_function(cls, func, types, args, wrapped)
    for name in out_names(func) if kwargs else ():
        if name in kwargs:
            resize_plain(kwargs[name], wrapped[name])
    return result


def call_overload(cls: type, func: Any, types: tuple[type, ...], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    """`__torch_dispatch__`: an aten op on distributed tensors, recorded by autograd on the local tensors."""
    if args and type(args[0]) is torch.Tensor and args[0].requires_grad and schema_of(func).is_mutable:
        raise AutogradError(
            f"{op_name(func)}: a function of torch writes a distributed tensor into a plain one that it made and that "
            f"requires grad by now: the gradient would be lost. Write the function's parts in Python"
        )
    with reentrant(), with_torch_function():
        if of_thread.hidden is not None:
            result = _call_in_hidden_transforms(cls, func, types, args, kwargs)
        elif not _is_any_autocast_enabled():
            result = call_function(cls, func, types, args, kwargs)
        else:  # autocast has cast the arguments already, on the way down to this op
            with autocast.off():
                result = call_function(cls, func, types, args, kwargs)
    if not torch.is_inference_mode_enabled():
        return result
    of_inference = all(tensor.is_inference() for _, tensor in tensors_in(args, kwargs or _NO_KWARGS))
    return result if of_inference else tree_map_only(Wrapper, _not_inference, result)


def _call_in_hidden_transforms(
    cls: type, func: object, types: tuple[type, ...], args: Sequence[Any], kwargs: object
) -> Any:
    """`call_function` inside of transforms, which were hidden from torch while it took a function apart."""
    hidden, of_thread.hidden = of_thread.hidden, None
    try:
        with with_transforms(hidden), autocast.off() if _is_any_autocast_enabled() else nullcontext():
            return call_function(cls, func, types, args, kwargs)
    finally:
        of_thread.hidden = hidden


def _not_inference(result: Wrapper) -> Wrapper:
    """A wrapper that C++ may make a view of a tensor from outside of inference mode."""
    if not result.is_inference():
        return result
    with torch.inference_mode(False):
        return wrap(result._local, result._layout)
