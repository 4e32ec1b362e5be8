"""Steps on local tensors: at once for torch's elementwise optimizers, on request for others.

torch lets a hook that all optimizers share replace the arguments of a step, the optimizer among them. The hook here
puts the optimizer's twin (`twin.py`) in its place wherever that gives the same answer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.autograd.leaves import leaf_values
from shardwise.comm.capturing import steppers, tape_here, tapes
from shardwise.errors import AutogradError, LayoutError, RuleError
from shardwise.optim.replaced import check_parameters
from shardwise.optim.twin import ELEMENTWISE, Twin
from shardwise.random.agreement import anything_drawn, compare_before_step
from shardwise.tensor import DTensor
from shardwise.torch_private.autograd import is_stepped_as_it_is, step_hooks

AnyOptimizer = torch.optim.Optimizer
Optimizer = TypeVar("Optimizer", bound=AnyOptimizer)
Args = tuple[Any, ...]  # of a step: the optimizer, and a closure
Kwargs = dict[str, Any]
Replaced = tuple[Args, Kwargs] | None  # what a hook before a step returns: other arguments, or None to leave them

_twins: weakref.WeakKeyDictionary[AnyOptimizer, Twin] = weakref.WeakKeyDictionary()
_asked: weakref.WeakSet[AnyOptimizer] = weakref.WeakSet()  # optimizers that the user says are elementwise
_HOOK: Any = "shardwise"  # the key of our hooks among those of one optimizer
WHOLE = {
    "Adafactor": "takes means over whole rows and columns",
    "LBFGS": "takes dot products over all parameters",
    "Muon": "orthogonalizes whole matrices",
    "SparseAdam": "updates the rows of a sparse gradient",
}


def local(optimizer: Optimizer, *, elementwise: bool = False) -> Optimizer:
    """Check that an optimizer may be stepped directly on what the ranks hold, with foreach and fused kernels.

    torch's elementwise optimizers (SGD, Adam, AdamW, ...) are stepped so without being asked. Any other one is where
    `elementwise=True` says that it updates each element from that element's gradient and state alone. Its state
    (`self.state[param]`) is then laid out as its parameters are. What it keeps besides must not depend on the number of
    its parameters: on a simulated mesh a step sees one local tensor for each rank.

    Args:
        optimizer: Any `torch.optim.Optimizer`.
        elementwise: Your word that the optimizer is elementwise; needed for all but torch's own.

    Returns:
        The same optimizer.

    Raises:
        RuleError: The optimizer is not elementwise, not known to be, or records a graph (`differentiable=True`).
        LayoutError: A parameter is a pending sum, whose parts cannot be stepped one by one.

    Example:
        >>> import shardwise, torch
        >>> mesh = shardwise.simulate(3)
        >>> weight = torch.nn.Parameter(shardwise.ones(6, device_mesh=mesh, placements=[shardwise.Shard(0)]))
        >>> optimizer = shardwise.optim.local(torch.optim.AdamW([weight]))
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RuleError(f"local: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    name = type(optimizer).__name__
    bases = [base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim")]
    reason = next((WHOLE[base] for base in bases if base in WHOLE), None)
    if reason is not None:
        raise RuleError(
            f"local: {name} {reason}, so it must not be stepped on local tensors; step it without local(), "
            f"which is right on any layout" + (", or use shardwise.optim.Muon" if "Muon" in name else "")
        )
    if not (elementwise or type(optimizer) in ELEMENTWISE):
        raise RuleError(
            f"local: {name} is not known to be elementwise; if it updates each element from its own gradient and "
            f"state alone, say local(optimizer, elementwise=True), else step it as it is"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise RuleError("local: differentiable=True records a graph through DTensors; step it without local()")
        for param in group["params"]:
            if isinstance(param, DTensor) and not _steps_alone(param):
                raise LayoutError(
                    f"local: a parameter of shape {tuple(param.shape)} is laid out {list(param.placements)}; parts of "
                    f"a sum cannot be stepped one by one: redistribute it to Shard or Replicate"
                )
    if elementwise:
        _asked.add(optimizer)
    return optimizer


def _steps_alone(param: DTensor) -> bool:
    layout = param._layout
    return not layout.is_partial and not layout.mesh.comm.outside


def _twin_of(optimizer: AnyOptimizer) -> Twin | None:
    """The twin to step instead; None where the optimizer must be stepped as it is."""
    any_distributed, alone = False, type(optimizer) in ELEMENTWISE or optimizer in _asked
    for group in optimizer.param_groups:
        for param in group["params"]:
            if type(param) is DTensor:
                any_distributed = True
                alone = alone and _steps_alone(param)
                if "_unreduced" in param.__dict__ and param.grad is not None:  # `data_parallel` marks it
                    raise AutogradError(
                        f"step: the gradient of a parameter of shape {tuple(param.shape)} has parts that were not "
                        f"reduced, because the last backward pass ran under no_sync(); run the last one of an "
                        f"accumulation outside of it"
                    )
        if group.get("differentiable"):
            alone = False
    if not any_distributed or not alone:
        return None
    twin = _twins.get(optimizer)
    if twin is None:
        twin = _twins[optimizer] = Twin(optimizer)
    return twin


def _before_step(optimizer: AnyOptimizer, args: Args, kwargs: Kwargs) -> Replaced:
    """Called before every step of every optimizer, ahead of the hooks of that one optimizer."""
    if tapes and (tape := tape_here()) is not None:
        tape.begin_step(optimizer, args, kwargs)
    check_parameters(optimizer)
    if anything_drawn():
        params = (p for group in optimizer.param_groups for p in group["params"])
        compare_before_step(dict.fromkeys(p._layout.mesh for p in params if isinstance(p, DTensor)))
    own_pre, own_post = step_hooks(optimizer)
    if not own_pre and not own_post:
        return _enter(optimizer, args, kwargs)
    if _twin_of(optimizer) is not None:  # its hooks must see, and may change, what the step is run on
        own_pre.pop(_HOOK, None)
        own_pre[_HOOK] = _enter
        own_post[_HOOK] = _leave
        own_post.move_to_end(_HOOK, last=False)
    return None


def _enter(optimizer: AnyOptimizer, args: Args, kwargs: Kwargs) -> Replaced:
    """The arguments of a step on the twin."""
    twin = _twin_of(optimizer)
    if twin is None or not args or args[0] is not optimizer:
        return None
    rest = args[1:]
    if rest and callable(rest[0]):
        rest = (twin.around(optimizer, rest[0]), *rest[1:])
    elif kwargs.get("closure") is not None:
        kwargs = {**kwargs, "closure": twin.around(optimizer, kwargs["closure"])}
    return (twin.enter(optimizer), *rest), kwargs


def _leave(optimizer: AnyOptimizer, args: Args, kwargs: Kwargs) -> None:
    twin = _twins.get(optimizer)
    if twin is not None and args and args[0] is twin.stand_in:
        twin.leave(optimizer)


def _after_step(optimizer: AnyOptimizer, args: Args, kwargs: Kwargs) -> None:
    _leave(optimizer, args, kwargs)
    for group in optimizer.param_groups:
        if group.get("fused"):  # torch's fused kernels write without a trace, and who keeps a copy must know
            for param in group["params"]:
                if isinstance(param, DTensor):
                    torch.autograd.graph.increment_version(leaf_values(param))
    for tape in tapes:
        tape.end_step(optimizer)


def _step_by(optimizer: AnyOptimizer, run: Callable[[AnyOptimizer], None]) -> bool:
    """Step an optimizer's twin by `run` in the place of torch's step. False, with nothing done, where there is no twin
    or where hooks of the program want to see the step."""
    if any(step_hooks(optimizer)) or not is_stepped_as_it_is(optimizer) or _twin_of(optimizer) is None:
        return False
    replaced = _before_step(optimizer, (optimizer,), {})
    if replaced is None:
        return False
    (stand_in, *_), kwargs = replaced
    run(stand_in)
    _after_step(optimizer, (stand_in,), kwargs)
    return True


steppers.append(_step_by)
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
