"""torch.autograd.Function on distributed tensors: the functions people write, a module's full backward hooks,
checkpoint(use_reentrant=True).

To C++ a distributed tensor never requires grad; its local tensors do. So a Function is applied to those, as one node
over the local tensors of all arguments. The node passes distributed tensors to the user's forward and backward, and
takes the local tensors out of what they return. It is the `ctx` that they see and the `grad_fn` of the results.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction, Function
from torch.utils._pytree import tree_map_only

from shardwise.comm.rank_tensor import RankTensor, map_ranks
from shardwise.context import of_thread
from shardwise.custom_function.forms import by_form, flattened
from shardwise.custom_function.node import FunctionCall, finished, has_setup_context, on_locals, torchs_apply
from shardwise.custom_function.unwrapped import with_local_graph
from shardwise.engine.saved import Check
from shardwise.engine.transforms import is_outside, turn_in, turn_out
from shardwise.errors import AutogradError
from shardwise.torch_private.autograd import BackwardHookFunction, is_saving_for_hooks, is_transforming
from shardwise.torch_private.tensors import are_transforms_active, held_by_transforms
from shardwise.wrapper import Wrapper

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, list, tuple, dict, type(None)})


def take_functions() -> None:
    """Replace torch.autograd.Function.apply, which asks no tensor class, by one that takes distributed tensors."""
    Function.apply = classmethod(_apply)  # type: ignore[method-assign, assignment]


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    outer = of_thread.applying
    of_thread.applying = True
    try:
        for arg in args:
            if type(arg) not in _PLAIN and isinstance(arg, (Wrapper, RankTensor)):
                return _apply_distributed(cls, args, kwargs)
        result = torchs_apply(cls, *args, **kwargs)
    finally:
        of_thread.applying = outer
    if type(result) is tuple:
        return tuple([r if type(r) in _PLAIN else with_local_graph(r) for r in result])
    return result if type(result) in _PLAIN else with_local_graph(result)


def _apply_distributed(cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # hooks see all ranks at once; what simulated ranks hold, each of them applies it to for itself
    whole = cls is BackwardHookFunction or any(isinstance(arg, Wrapper) or _is_of_program(arg) for arg in args)
    if not whole:
        return map_ranks(cls.apply, args, kwargs, watched=True)
    if has_setup_context(cls):
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    if are_transforms_active():
        return _apply_transformed(cls, args, kwargs)
    if is_transforming():
        _refuse_tangents(cls, args)
    needed = torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    if kwargs or not needed:
        return torchs_apply(cls, *args, **kwargs)
    call = FunctionCall(tuple(finished(arg) for arg in args))
    flat = torchs_apply(on_locals(cls), call, *flattened(call.args, call.forms))
    _watch_finished(cls.__name__, call, args, flat)
    found = zip(call.results, call.result_forms, by_form(call.result_forms, flat), strict=True)
    written = {id(mine): arg for mine, arg in zip(call.args, args, strict=True) if id(mine) in call.dirty}
    results = tuple(
        _written(written[id(result)], result) if id(result) in written else form.value(parts)
        for result, form, parts in found
    )
    return results if call.several else results[0]


def _watch_finished(name: str, call: FunctionCall, args: Sequence[Any], flat: Sequence[Any]) -> None:
    """Have the backward pass raise if an argument was written that the Function has saved as what was made of it
    (`finished`): torch knows the writes to the argument itself only where that is what was saved."""
    replaced = [arg for mine, arg in zip(call.args, args, strict=True) if mine is not arg and id(mine) in call.saved]
    nodes = {part.grad_fn for part in flat if isinstance(part, torch.Tensor) and part.grad_fn is not None}
    if not replaced or is_saving_for_hooks():
        return
    check = Check(name, replaced)
    for node in nodes:
        BackwardCFunction.register_prehook(node, check)  # type: ignore[arg-type]


def _is_of_program(value: object) -> bool:
    """Whether an argument is a function of the program (checkpoint takes one). It may compute with what all ranks hold
    (their parameters), so it must be called for all of them at once."""
    return callable(value) and not isinstance(value, (torch.Tensor, type))


def _written(arg: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """An argument that a Function has written into, or into what was made of it (`finished`)."""
    return arg if arg is value else arg.copy_(value)


def _apply_transformed(cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A Function inside of torch.func: torch applies it to whole tensors, and asks it for the derivatives it needs."""
    mesh = next(arg._layout.mesh for arg in args if isinstance(arg, Wrapper))
    args = tuple(turn_out(arg) if isinstance(arg, Wrapper) else arg for arg in args)
    result = torchs_apply(cls, *args, **kwargs)
    back = lambda x: turn_in(x, mesh) if is_outside(x) and not held_by_transforms(x)[1] else x  # noqa: E731
    return tree_map_only(torch.Tensor, back, result)


def _refuse_tangents(cls: type[Function], args: tuple[Any, ...]) -> None:
    if any(isinstance(arg, torch.Tensor) and forward_ad.unpack_dual(arg).tangent is not None for arg in args):
        raise AutogradError(
            f"{cls.__name__}: forward_ad of a torch.autograd.Function on distributed tensors is not supported, its "
            f"tangents would be lost; use torch.func.jvp, which is"
        )
