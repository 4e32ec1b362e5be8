"""What a module that is fully sharded can do besides: its class derives from FSDPModule."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import LayoutError, check_type
from shardwise.parallel.data.own_collectives import AllGather, ReduceScatter, check_collective
from shardwise.parallel.data.passes import DataParallel
from shardwise.parallel.data.unit import Unit
from shardwise.parallel.fsdp.hints import CommunicationHints

STATE = "_fully_sharded"  # the attribute of a module


class ShardedState:
    """The unit of a module, and the passes that it takes part in: those of the outermost module."""

    def __init__(self, unit: Unit, passes: DataParallel) -> None:
        self.unit, self.passes = unit, passes


def state_of(module: nn.Module) -> ShardedState | None:
    return module.__dict__.get(STATE)


def states_in(module: nn.Module, recurse: bool = True) -> Iterator[ShardedState]:
    """Those of a module and of the modules inside of it, each unit once."""
    found = (state_of(m) for m in (module.modules() if recurse else [module]))
    yield from {state.unit: state for state in found if state is not None}.values()


class UnshardHandle:
    """Waits for what `unshard(async_op=True)` began."""

    def __init__(self, state: ShardedState | None) -> None:
        self._state = state

    def wait(self) -> None:
        """Afterwards the module has its whole parameters."""
        if self._state is not None:
            self._state.passes.unshard(self._state.unit)
            self._state = None


class FSDPModule(CommunicationHints):
    """The methods of a module after `fully_shard`. With `recurse`, they are for all such modules inside of it too."""

    def _state(self) -> ShardedState:
        found = state_of(self)  # type: ignore[arg-type]
        if found is None:
            raise LayoutError(f"{type(self).__name__}: fully_shard was not called on this module")
        return found

    def _units(self, recurse: bool) -> Iterator[Unit]:
        for state in states_in(self, recurse):  # type: ignore[arg-type]
            yield state.unit

    # -- parameters -----------------------------------------------------------------------------------------
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's own parameters; until its next forward ends, or `reshard()`, it has them whole.

        Args:
            async_op: only begin, and give a handle. The forward waits for it by itself.

        Returns:
            The handle, if asked for.
        """
        state = self._state()
        if async_op:
            state.passes.start_unshard(state.unit)
            return UnshardHandle(state)
        state.passes.unshard(state.unit)
        return None

    def reshard(self) -> None:
        """Free the module's own whole parameters; it has the sharded ones again."""
        state = self._state()
        state.passes.reshard(state.unit)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether whole parameters are freed after the forward, and gathered again for the backward.

        Args:
            reshard_after_forward: Whether they are.
            recurse: Whether the sharded modules inside of this one are meant too.
        """
        _check_flag("set_reshard_after_forward", reshard_after_forward)
        for unit in self._units(recurse):
            unit.policy.frees_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Say whether whole parameters are freed after the backward.

        Args:
            reshard_after_backward: Whether they are; else they are kept until one of them is written.
            recurse: Whether the sharded modules inside of this one are meant too.
        """
        _check_flag("set_reshard_after_backward", reshard_after_backward)
        for unit in self._units(recurse):
            unit.policy.frees_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather other modules' parameters while this one's forward runs; by default those of the next.

        Args:
            modules: The other modules, which `fully_shard` was called on.
        """
        self._state().unit.policy.ahead_in_forward = _units_of("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather other modules' parameters while this one's backward runs; by default those of the one before.

        Args:
            modules: The other modules, which `fully_shard` was called on.
        """
        self._state().unit.policy.ahead_in_backward = _units_of("set_modules_to_backward_prefetch", modules)

    # -- gradients ------------------------------------------------------------------------------------------
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether backward passes reduce gradients.

        Args:
            requires_gradient_sync: Whether they do. Gradients that wait are reduced by the first pass that does.
            recurse: Whether the sharded modules inside of this one are meant too.
        """
        _check_flag("set_requires_gradient_sync", requires_gradient_sync)
        for unit in self._units(recurse):
            unit.policy.reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether backward passes sum gradients over the first of two mesh axes, along which parameters are copies.

        Args:
            requires_all_reduce: Whether they do; else gradients wait until the sum over both axes may be taken.
            recurse: Whether the sharded modules inside of this one are meant too.
        """
        _check_flag("set_requires_all_reduce", requires_all_reduce)
        for unit in self._units(recurse):
            unit.policy.all_reduces = requires_all_reduce or len(unit.data.mesh.shape) == 1

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for programs that call it: every backward pass here ends with its reductions done.

        Args:
            is_last_backward: Not used.
        """
        _check_flag("set_is_last_backward", is_last_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What the sum of the gradients over the ranks is divided by; by default the number of ranks.

        Args:
            factor: above 0. For a batch of DTensors, whose gradients are sums already, they are multiplied by the
                number of ranks over this factor.

        Raises:
            LayoutError: `factor` is not a number above 0.
        """
        if not isinstance(factor, (int, float)) or not factor > 0:
            raise LayoutError(f"set_gradient_divide_factor: factor must be a number above 0, got {factor!r}")
        unit = self._state().unit
        unit.policy.divide_by = float(factor)
        if unit.data.size == 1:  # one rank divides too
            unit.forget_leaves()

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], object], *, stream: object = None) -> None:
        """Call a function with the sums of the module's own gradients over the ranks, before parameters get them.

        Args:
            hook: gets a flat tensor, in the dtype of the reduction, that it may write: once for each part of the
                gradients that is reduced together. It may call collectives of `torch.distributed`. On a simulated mesh
                it gets a `RankTensor`.
            stream: accepted; the function is called on the current stream.

        Raises:
            LayoutError: `hook` is not a function.
        """
        if not callable(hook):
            raise LayoutError(f"set_all_reduce_hook: hook must be a function of one tensor, got {hook!r}")
        unit = self._state().unit
        unit.policy.after_sum = hook
        if unit.data.size == 1:  # one rank calls it too
            unit.forget_leaves()

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather the module's own parameters by a function of the program.

        Args:
            comm: called as ``comm(output_tensor=..., input_tensor=..., group=..., async_op=True)`` with flat tensors;
                it gives what can be waited for, or None. Where it has a method ``allocate(size, *, dtype, device)``,
                that makes the output, of which the input is a part. Ledgers do not list what it communicates.

        Raises:
            TypeError: `comm` cannot be called.
            MeshError: the mesh has no process groups.
        """
        unit = self._state().unit
        check_collective("set_custom_all_gather", comm, unit.data)
        unit.policy.gathers_by = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Sum the gradients of the module's own parameters over the ranks that have parts by a function of the program.

        Args:
            comm: called as ``comm(output_tensor=..., input_tensor=..., group=..., op=ReduceOp.SUM, async_op=True)``
                with flat tensors; it gives what can be waited for, or None. Where it has a method
                ``allocate(size, *, dtype, device)``, that makes both. Ledgers do not list what it communicates.

        Raises:
            TypeError: `comm` cannot be called.
            MeshError: the mesh has no process groups.
        """
        unit = self._state().unit
        check_collective("set_custom_reduce_scatter", comm, unit.data)
        unit.policy.reduces_by = comm

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`.

        Args:
            factor: As there.
        """
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accepted for programs that call it: ranks may always use different parameters here.

        Args:
            reduce_scatter_unused_params: Not used.
            recurse: Not used.
        """
        _check_flag("set_reduce_scatter_unused_params", reduce_scatter_unused_params)

    def reset_iter_state(self) -> None:
        """Forget a pass that ended in an error, with its gradients and those that wait. Not needed to go on."""
        for passes in {state.passes for state in states_in(self)}:  # type: ignore[arg-type]
            passes.reset()

    # -- as a module ----------------------------------------------------------------------------------------
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        """to(), to_empty() and their kin: parameters that were tied before are tied afterwards."""
        super()._apply(fn, recurse)  # type: ignore[misc]
        self._tie_again()
        return self  # type: ignore[return-value]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> object:
        """Load a state dict as torch does; with `assign` too, parameters that were tied before are tied afterwards.

        Args:
            state_dict, strict, assign: As of torch's method.

        Returns:
            The names that are missing, and those that are unexpected.
        """
        found = super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]
        self._tie_again()
        return found

    def _tie_again(self) -> None:
        for state in states_in(self):  # type: ignore[arg-type]
            for p in state.unit.parameters:
                p.tie_again()


def _check_flag(name: str, flag: object) -> None:
    if not isinstance(flag, bool):
        what = f"{name.removeprefix('set_')} should be a bool, got {type(flag)}"
        raise LayoutError(f"{name}: expected True or False, got {flag!r}: {what}")


def _units_of(name: str, modules: object) -> list[Unit]:
    if not isinstance(modules, (list, tuple)):
        raise LayoutError(f"{name}: modules must be a list of modules, got {type(modules).__name__}")
    found = []
    for i, module in enumerate(modules):
        state = state_of(module) if isinstance(module, nn.Module) else None
        if state is None:
            raise LayoutError(
                f"{name}: Expects FSDPModule but got {type(module)}: modules[{i}], a {type(module).__name__}, is not "
                f"fully sharded"
            )
        found.append(state.unit)
    return found


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a module of this class gets."""
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
    return _classes[cls]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method do what a module's forward does: gather the parameters before it, and free them afterwards.

    Args:
        module: if it is not fully sharded, nothing is done.
        method_name: the name of the method.

    Raises:
        LayoutError: the module has no such method.
        TypeError: an argument has another type.
    """
    check_type(module, nn.Module, "register_fsdp_forward_method: module")
    check_type(method_name, str, "register_fsdp_forward_method: method_name")
    if state_of(module) is None:
        return
    original = getattr(module, method_name, None)
    if not callable(original):
        raise LayoutError(f"register_fsdp_forward_method: {type(module)} does not have a method {method_name}")
    function = getattr(original, "__func__", None)

    @functools.wraps(original)
    def run(self: nn.Module, *args: object, **kwargs: object) -> object:
        state = state_of(self)
        assert state is not None  # it had one, and nothing takes it away
        changed = state.passes.before_forward(state.unit, self, args, kwargs)
        args, kwargs = (args, kwargs) if changed is None else changed
        try:
            output = original(*args, **kwargs) if function is None else function(self, *args, **kwargs)
        except BaseException:
            state.passes.after_forward(state.unit, self, args, kwargs, None)
            raise
        cast = state.passes.after_forward(state.unit, self, args, kwargs, output)
        return output if cast is None else cast

    setattr(module, method_name, types.MethodType(run, module))


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Accepted for programs that call it, as pipelines do with their stages: there are no streams to share here.

    Args:
        modules: fully sharded modules.

    Raises:
        LayoutError: one of them is not fully sharded.
    """
    _units_of("share_comm_ctx", modules)
