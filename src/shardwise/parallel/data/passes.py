"""Forward and backward passes of a data-parallel module: what torch's hooks call, and what the units then do."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from shardwise.comm.capturing import settings
from shardwise.errors import AutogradError, LayoutError
from shardwise.parallel.data.gradients import Reduction
from shardwise.parallel.data.layouts import DataMesh
from shardwise.parallel.data.nested import changed_in, values_in
from shardwise.parallel.data.parameter import ManagedParameter
from shardwise.parallel.data.states import Use
from shardwise.parallel.data.unit import Unit, plain_tensors
from shardwise.tensor import DTensor
from shardwise.torch_private.autograd import at_end_of_backward, module_hooks

Args = tuple[Any, ...]  # of a forward
Kwargs = dict[str, Any]
Call = tuple[Args, Kwargs]
T = TypeVar("T")


class DataParallel:
    """The units of one module, and where its passes stand. It calls the units; they never call it.

    Units come in the order of the module tree, the module as a whole last. `one_at_a_time` says whether a reduction of
    gradients must end before the next begins."""

    def __init__(self, units: Sequence[Unit], one_at_a_time: bool) -> None:
        self.units, self.root, self.one_at_a_time = list(units), units[-1], one_at_a_time
        self._reset()
        hooked = [(unit, module) for unit in self.units for module in unit.modules]
        self._handles = [handle for unit, module in hooked for handle in self._hook(unit, module)]

    def _hook(self, unit: Unit, module: torch.nn.Module) -> list[RemovableHandle]:
        before = functools.partial(self.before_forward, unit)
        after = functools.partial(self.after_forward, unit)
        return [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, always_call=True, with_kwargs=True),
        ]

    def dissolve(self) -> list[Unit]:
        """Give up the units: those of a larger module take part in its passes from now on."""
        for handle in self._handles:
            handle.remove()
        for unit in self.units:
            unit.forget_leaves()
        return self.units

    def _reset(self) -> None:
        self._reduction, self._reduction_is_current = Reduction((), self.one_at_a_time), False
        self._order: dict[Unit, int] = {}  # in which forwards began
        self._outermost: Unit | None = None  # the unit whose forward all other forwards are inside of
        self._distributed: dict[DataMesh, bool] = {}  # whether the last batch was one of DTensors over a data mesh
        self._in_backward = False
        self._frees_after_backward = True
        self._end_of_backward: Callable[[], object] = lambda: None  # gives None once autograd has forgotten the pass
        self._was_distributed: dict[Unit, bool] = {}  # the same of the batch whose backward pass came last

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if not name.startswith("_")}
        return kept | {"_handles": self._handles}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        self._reset()

    # -- forward --------------------------------------------------------------------------------------------
    def before_forward(self, unit: Unit, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> Call | None:
        """Gather what the module needs; gives its inputs if they were cast."""
        if self._in_backward and self._end_of_backward() is None:
            self._give_up_backward()
        self._order.setdefault(unit, len(self._order))
        is_outermost = not self._in_backward and not (self._outermost and self._outermost.calls)
        if is_outermost:
            self._begin_outermost(unit, args, kwargs)
        unit.calls.begin(sys._getframe(1))
        changed = self._cast_inputs(unit, args, kwargs, is_outermost)
        self._prepare(unit)
        unit.begin_forward(self._distributed.get(unit.data, False))
        self._prefetch(unit, -1 if self._in_backward else 1)
        if unit.policy.frees and unit.watches_inputs and torch.is_grad_enabled():
            self._watch_inputs(unit, (args, kwargs) if changed is None else changed)
        return changed

    def _begin_outermost(self, unit: Unit, args: Args, kwargs: Kwargs) -> None:
        """Decide how to compute."""
        self._outermost = unit
        for other in self.units:  # unsharded by the program, or its forward was interrupted
            other.give_up_forward()
        for p in self._parameters():
            p.drop_if_cleared()
        meshes = {x._layout.mesh for x in values_in((args, kwargs)) if isinstance(x, DTensor)}
        for data in {other.data for other in self.units}:
            self._distributed[data] = any(data.numbers_in(mesh) is not None for mesh in meshes)

    def _cast_inputs(self, unit: Unit, args: Args, kwargs: Kwargs, is_outermost: bool) -> Call | None:
        """The inputs in the dtype of the forward; None where they stay as they are."""
        dtype, when = unit.policy.compute_dtype, unit.policy.casts_inputs
        if dtype is None or not (when == "always" or (when == "outermost" and is_outermost)):
            return None
        return changed_in((args, kwargs), functools.partial(_cast, dtype))

    def _prepare(self, unit: Unit) -> None:
        if unit.prepare():
            self._reduction_is_current = False
            came = functools.partial(_gradient_came, weakref.ref(self), weakref.ref(unit))
            for leaf in unit.new_leaves():
                leaf.register_post_accumulate_grad_hook(came)

    def _prefetch(self, unit: Unit, step: int) -> None:
        """Begin to gather the units that the program names; else the one whose forward began `step` places after this
        one's, unless it is the root, which is gathered anyway."""
        named = unit.policy.ahead_in_forward if step > 0 else unit.policy.ahead_in_backward
        if named is None:
            at = self._order.get(unit, 0) + step
            named = [other for other, place in self._order.items() if place == at and other is not self.root]
        for following in named:
            if following in self._order and following.data.size > 1:
                self._prepare(following)
                following.start_gather()

    def _watch_inputs(self, unit: Unit, call: Call) -> None:
        """Frozen parameters get no gradient that could tell when they are done with, and those that reentrant
        checkpoints share get several: the gradients of inputs tell."""
        inputs = [v for v in plain_tensors(call) if v.requires_grad]
        if inputs:
            torch.autograd.graph.register_multi_grad_hook(inputs, lambda grads: self._inputs_have_gradients(unit))

    def after_forward(self, unit: Unit, module: torch.nn.Module, args: Args, kwargs: Kwargs, output: Any) -> Any:
        """Free what the module needs no more; gives its output if it was cast."""
        dtype = unit.policy.output_dtype
        changed = None if dtype is None else changed_in(output, functools.partial(_cast, dtype))
        output = output if changed is None else changed
        hooked, distributed = False, self._distributed.get(unit.data, False)
        if torch.is_grad_enabled():
            for value in plain_tensors(output):
                if value.requires_grad:
                    value.register_hook(functools.partial(self._backward_begins, unit, distributed))
                    hooked = True
            if not hooked:  # no hook will tell
                self._was_distributed[unit] = distributed
        unit.calls.end(sys._getframe(1))
        unit.end_forward()
        if unit.use.now is Use.IDLE:
            needed = torch.is_grad_enabled() and (not hooked or not self._frees_after_forward(unit))
            if not needed and not unit.lends(output):
                unit.free()
        if unit is self._outermost and not unit.calls:
            self._outermost = None
            for data, is_typed in self._distributed.items():
                if not is_typed and data.size > 1:
                    _check_output(output, data)
        return changed

    def _frees_after_forward(self, unit: Unit) -> bool:
        chosen = unit.policy.frees_after_forward
        return unit is not self.root if chosen is None else chosen

    # -- when the program says so ---------------------------------------------------------------------------
    def start_unshard(self, unit: Unit) -> None:
        """Begin to gather."""
        self._prepare(unit)
        unit.start_gather()

    def unshard(self, unit: Unit) -> None:
        """Gather, and let the modules have the leaves until their next forward ends, or `reshard`."""
        self._prepare(unit)
        if unit.use.now is Use.IDLE:
            unit.begin_forward(False)

    def reshard(self, unit: Unit) -> None:
        """Free what `unshard` or a forward left whole; the modules have their parameters again."""
        if unit.use.now is Use.FORWARD:
            unit.give_up_forward()
        if unit.use.now is Use.IDLE:
            unit.free()

    # -- backward -------------------------------------------------------------------------------------------
    def _begin_backward(self) -> None:
        if self._in_backward:
            if self._end_of_backward() is not None:
                return
            self._give_up_backward()
        self._frees_after_backward = True
        self._begin_reduction()
        # torch has no public hook at the end of a pass, and neither the last gradient of a parameter nor that of an
        # input is it (frozen parameters, reentrant checkpoints, autograd.grad of an activation)
        end = functools.partial(self._finish_backward)
        self._end_of_backward = weakref.ref(end)
        at_end_of_backward(end)

    def _begin_reduction(self) -> None:
        self._in_backward = True
        for unit in self.units:
            self._prepare(unit)
            self._set_scale(unit)
        if not self._reduction_is_current:
            self._reduction_is_current = True
            by_unit = (*reversed(self.units[:-1]), self.root)  # the last modules first, as their gradients come
            self._reduction = Reduction([b for unit in by_unit for b in unit.buckets], self.one_at_a_time)
        self._reduction.begin({b for unit in self.units if unit.policy.syncs for b in unit.buckets})

    def _set_scale(self, unit: Unit) -> None:
        """What gradients are multiplied with, so that their sum over the ranks is what the program asked for."""
        scale = 1.0 if self._was_distributed.get(unit) else 1 / unit.data.size
        if unit.policy.divide_by is not None:
            scale *= unit.data.size / unit.policy.divide_by
        for bucket in unit.buckets:
            bucket.scale, bucket.after_sum = scale, unit.policy.after_sum
            bucket.reduces_by = unit.policy.reduces_by

    def _backward_begins(self, unit: Unit, distributed: bool, grad: torch.Tensor) -> None:
        self._begin_backward()
        if unit.is_in_backward:
            return
        if torch.is_grad_enabled():  # create_graph=True: what this pass computes will be differentiated
            self._frees_after_backward = False
        self._was_distributed[unit] = distributed
        self._set_scale(unit)
        unit.begin_backward(distributed)
        self._prefetch(unit, -1)

    def _gradient_came(self, unit: Unit, leaf: torch.Tensor) -> None:
        self._begin_backward()
        unit.gradient_came(leaf)
        self._reduction.take(leaf)
        if unit.is_done:
            self._end_unit(unit)

    def _inputs_have_gradients(self, unit: Unit) -> None:
        unit.inputs_done = True
        if unit.is_done:
            self._end_unit(unit)

    def _end_unit(self, unit: Unit) -> None:
        unit.end_backward()
        frees = self._frees_after_backward and unit.policy.frees_after_backward
        if frees and unit.use.now is Use.IDLE:  # else its forward asked for this gradient
            unit.free()

    def _finish_backward(self) -> None:
        """Autograd is done: reduce what is left, and put everything back."""
        for unit in self.units:
            self._end_unit(unit)
        self._reduction.finish()
        for unit in self.units:
            if unit.groups is not None:
                unit.mark_unreduced(not unit.policy.syncs)
        self._in_backward = False

    def _give_up_backward(self) -> None:
        """A backward pass ended in an error: drop what came of it, and put everything back."""
        for unit in self.units:
            self._end_unit(unit)
        self._reduction.give_up()
        self._in_backward = False

    def reset(self) -> None:
        """Forget a forward or a backward pass that ended in an error, and gradients that wait."""
        if self._in_backward:
            self._give_up_backward()
        self._outermost = None
        for unit in self.units:
            unit.give_up_forward()
            unit.free()
        for p in self._parameters():
            p.drop_waiting()

    # -- gradients that wait --------------------------------------------------------------------------------
    def reduce_waiting(self) -> None:
        """Reduce the gradients that earlier backward passes left waiting, without another one."""
        if self._in_backward and self._end_of_backward() is not None:
            raise AutogradError("fully_shard: gradients cannot be reduced in the middle of a backward pass")
        for p in self._parameters():
            p.drop_if_cleared()
        self._begin_reduction()
        self._finish_backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside: gradients add up on each rank and are not reduced. The first backward pass outside reduces all."""
        before = [unit.policy.reduces for unit in self.units]
        for unit in self.units:
            unit.policy.reduces = False
        try:
            yield
        finally:
            for unit, reduces in zip(self.units, before, strict=True):
                unit.policy.reduces = reduces

    def _parameters(self) -> Iterator[ManagedParameter]:
        for unit in self.units:
            if unit.groups is not None:
                yield from unit.parameters


def _gradient_came(passes: weakref.ref[DataParallel], unit: weakref.ref[Unit], leaf: torch.Tensor) -> None:
    """What a leaf calls. The garbage collector does not see what hooks of leaves hold: a leaf that held its unit, which
    holds the leaf, would stay for ever. As long as a backward pass can come, its graph holds both."""
    mine, its = passes(), unit()
    if mine is not None and its is not None:
        mine._gradient_came(its, leaf)


def _cast(dtype: torch.dtype, value: T) -> T:
    """A floating-point tensor in this dtype; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
        return value
    return value.to(dtype)  # type: ignore[return-value]


def _check_output(output: object, data: DataMesh) -> None:
    for x in values_in(output):
        if isinstance(x, DTensor) and data.numbers_in(x._layout.mesh) is not None:
            raise LayoutError(
                f"{data.caller}: the output of shape {tuple(x.shape)} is a DTensor over the data axis though "
                f"the inputs were plain: a parameter was used outside of the forward of its unit. "
                f"Let it belong to the unit that uses it: data_parallel(..., units=[...]), fully_shard(module)"
            )


def _policies_of(module: torch.nn.Module) -> Hashable:
    """What the program has chosen for the unit of a module: a captured program holds for these choices."""
    for hook in module_hooks(module):
        if isinstance(hook, functools.partial) and isinstance(getattr(hook.func, "__self__", None), DataParallel):
            return tuple(map(_hashable, vars(hook.args[0].policy).values()))
    return None


def _hashable(choice: object) -> Hashable:
    if isinstance(choice, list):
        return tuple(map(id, choice))
    return id(choice) if callable(choice) else choice


settings.append(_policies_of)
