"""Forward and backward passes of a data-parallel module: what torch's hooks call, and what the units then do."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.errors import LayoutError
from shardwise.parallel.data.gradients import Reduction
from shardwise.parallel.data.layouts import DataAxis
from shardwise.parallel.data.parameter import ManagedParameter
from shardwise.parallel.data.states import Use
from shardwise.parallel.data.unit import Unit, plain_tensors
from shardwise.tensor import DTensor
from shardwise.torch_private import at_end_of_backward

Args = tuple[Any, ...]  # of a forward
Kwargs = dict[str, Any]
Call = tuple[Args, Kwargs]


class DataParallel:
    """The units of one module, and where its passes stand. It calls the units; they never call it.

    Units come in the order of the module tree, the module as a whole last. `frees` says whether leaves are freed
    between uses, `one_at_a_time` whether a reduction of gradients must end before the next begins."""

    def __init__(
        self, data: DataAxis, units: Sequence[Unit], frees: bool, one_at_a_time: bool,
        compute_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.data, self.units, self.root = data, list(units), units[-1]
        self.frees, self.one_at_a_time = frees, one_at_a_time
        self.compute_dtype, self.reduce_dtype = compute_dtype, reduce_dtype
        self.sync = True
        self._reset()
        for unit in self.units:
            before, after = functools.partial(self._before_forward, unit), functools.partial(self._after_forward, unit)
            unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(after, always_call=True, with_kwargs=True)

    def _reset(self) -> None:
        self._reduction, self._reduction_is_current = Reduction((), self.one_at_a_time), False
        self._order: dict[Unit, int] = {}  # in which forwards began
        self._outermost: Unit | None = None  # the unit whose forward all other forwards are inside of
        self._distributed = False  # whether the last batch was one of DTensors
        self._in_backward = False
        self._frees_after_backward = True
        self._end_of_backward: Callable[[], object] = lambda: None  # gives None once autograd has forgotten the pass
        self._scale = 1.0  # of gradients, so that their sum over the ranks is what the program asked for

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        self._reset()

    # -- forward --------------------------------------------------------------------------------------------
    def _before_forward(self, unit: Unit, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> Call | None:
        if self._in_backward and self._end_of_backward() is None:
            self._give_up_backward()
        self._order.setdefault(unit, len(self._order))
        is_outermost = not self._in_backward and self._outermost in (None, unit)  # an interrupted one stays behind
        changed = self._begin_outermost(unit, args, kwargs) if is_outermost else None
        self._prepare(unit)
        unit.begin_forward(self._distributed)
        self._prefetch(unit, -1 if self._in_backward else 1)
        if self.frees and not unit.all_trained and torch.is_grad_enabled():
            self._watch_inputs(unit, (args, kwargs) if changed is None else changed)
        return changed

    def _begin_outermost(self, unit: Unit, args: Args, kwargs: Kwargs) -> Call | None:
        """Decide how to compute, and cast the inputs; None where they stay as they are."""
        self._outermost = unit
        for other in self.units:
            if other.use.now is not Use.IDLE:  # its forward was interrupted
                other.end_forward()
        for p in self._parameters():
            p.drop_if_cleared()
        self._distributed = any(map(self._is_over_data_axis, tree_leaves((args, kwargs))))
        return None if self.compute_dtype is None else tree_map(self._cast, (args, kwargs))

    def _is_over_data_axis(self, value: object) -> bool:
        return isinstance(value, DTensor) and self.data.number_in(value._layout.mesh) is not None

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.compute_dtype) if is_float and value.dtype != self.compute_dtype else value

    def _prepare(self, unit: Unit) -> None:
        if unit.prepare(self.reduce_dtype):
            self._reduction_is_current = False
            for leaf in unit.new_leaves():
                leaf.register_post_accumulate_grad_hook(functools.partial(self._gradient_came, unit))

    def _prefetch(self, unit: Unit, step: int) -> None:
        """Begin to gather the unit whose forward began `step` places after this one's; the root is gathered anyway."""
        if self.data.size > 1 and unit in self._order:
            at = self._order[unit] + step
            following = next((other for other, place in self._order.items() if place == at), self.root)
            if following is not self.root:
                following.start_gather()

    def _watch_inputs(self, unit: Unit, call: Call) -> None:
        """Frozen parameters get no gradient that could tell when they are done with: the gradients of inputs do."""
        inputs = [v for v in plain_tensors(call) if v.requires_grad]
        if inputs:
            torch.autograd.graph.register_multi_grad_hook(inputs, lambda grads: self._inputs_have_gradients(unit))

    def _after_forward(self, unit: Unit, module: torch.nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        hooked = False
        if torch.is_grad_enabled():
            for value in plain_tensors(output):
                if value.requires_grad:
                    value.register_hook(functools.partial(self._backward_begins, unit))
                    hooked = True
        unit.end_forward()
        if unit.use.now is Use.IDLE:
            needed = torch.is_grad_enabled() and (not hooked or unit is self.root)
            if self.frees and not needed and not unit.lends(output):
                unit.free()
        if unit is self._outermost:
            self._outermost = None
            self._scale = 1.0 if self._distributed else 1 / self.data.size
            if not self._distributed and self.data.size > 1:
                self._check_output(output)

    def _check_output(self, output: Any) -> None:
        for x in tree_leaves(output):
            if self._is_over_data_axis(x):
                raise LayoutError(
                    f"data_parallel: the output of shape {tuple(x.shape)} is a DTensor over the data axis though "
                    f"the inputs were plain: a parameter was used outside of the forward of its unit. "
                    f"Name the units with data_parallel(..., units=[...]), so that it belongs to the one using it"
                )

    # -- backward -------------------------------------------------------------------------------------------
    def _begin_backward(self) -> None:
        if self._in_backward:
            if self._end_of_backward() is not None:
                return
            self._give_up_backward()
        self._in_backward = self._frees_after_backward = True
        if not self._reduction_is_current:
            for unit in self.units:
                self._prepare(unit)
            self._reduction_is_current = True
            by_unit = (*reversed(self.units[:-1]), self.root)  # the last modules first, as their gradients come
            self._reduction = Reduction([b for unit in by_unit for b in unit.buckets], self.one_at_a_time)
        self._reduction.begin()
        # torch has no public hook at the end of a pass, and neither the last gradient of a parameter nor that of an
        # input is it (frozen parameters, reentrant checkpoints, autograd.grad of an activation)
        end = functools.partial(self._finish_backward)
        self._end_of_backward = weakref.ref(end)
        at_end_of_backward(end)

    def _backward_begins(self, unit: Unit, grad: torch.Tensor) -> None:
        self._begin_backward()
        if unit.is_in_backward:
            return
        if torch.is_grad_enabled():  # create_graph=True: what this pass computes will be differentiated
            self._frees_after_backward = False
        unit.begin_backward(self._distributed)
        self._prefetch(unit, -1)

    def _gradient_came(self, unit: Unit, leaf: torch.Tensor) -> None:
        self._begin_backward()
        unit.missing.discard(id(leaf))
        if self.sync:
            self._reduction.take(leaf, self._scale)
        if unit.is_done:
            self._end_unit(unit)

    def _inputs_have_gradients(self, unit: Unit) -> None:
        unit.inputs_done = True
        if unit.is_done:
            self._end_unit(unit)

    def _end_unit(self, unit: Unit) -> None:
        unit.end_backward()
        if self._frees_after_backward and unit.use.now is Use.IDLE:  # else its forward asked for this gradient
            unit.free()

    def _finish_backward(self) -> None:
        """Autograd is done: reduce what is left, and put everything back."""
        for unit in self.units:
            self._end_unit(unit)
        if self.sync:
            self._reduction.finish(self._scale)
        for p in self._parameters():
            p.unmark() if self.sync else p.mark_unreduced()
        self._in_backward = False

    def _give_up_backward(self) -> None:
        """A backward pass ended in an error: drop what came of it, and put everything back."""
        for unit in self.units:
            self._end_unit(unit)
        self._reduction.give_up()
        self._in_backward = False

    # -- gradients that wait --------------------------------------------------------------------------------
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside: gradients add up on each rank and are not reduced. The first backward pass outside reduces all."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def _parameters(self) -> Iterator[ManagedParameter]:
        for unit in self.units:
            if unit.groups is not None:
                yield from unit.parameters
