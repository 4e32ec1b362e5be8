"""The node of a Function: it stands over the local tensors of all arguments, and shows distributed ones to the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, Function, once_differentiable
from torch.utils.hooks import RemovableHandle

from shardwise.autograd.gradients import finished_but_sums
from shardwise.custom_function.forms import Form, by_form, flattened, form_of
from shardwise.protocols import Ctx
from shardwise.torch_private.autograd import DelayedError, function_of, give_node_class
from shardwise.wrapper import Wrapper

_apply = inspect.getattr_static(Function, "apply")  # before ours takes its place
torchs_apply: Callable[..., Any] = getattr(_apply, "__func__", _apply)  # a classmethod; from torch 2.14 on in C++


class FunctionCall:
    """One application of a Function: the arguments that the node's forward takes, and the results it makes."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args, self.forms = args, [form_of(arg) for arg in args]
        self.results: tuple[Any, ...] = ()
        self.result_forms: list[Form] = []
        self.several = False
        self.saved: set[int] = set()  # ids of tensors saved for the backward pass
        self.dirty: set[int] = set()  # ids of arguments that were written and returned: such a result is the argument


class _Node(BackwardCFunction):
    """The `ctx` of a user's Function: all tensors that it takes and returns are distributed ones."""

    _arg_forms: list[Form]
    _result_forms: list[Form]
    _saved_forms: Sequence[Form] = ()
    _saved: Sequence[object] = ()  # these three only until the forward is done
    _dirty: Sequence[object] = ()
    _constant: Sequence[object] = ()
    _materialize = True

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self._saved = tensors

    @property
    def saved_tensors(self) -> tuple[Any, ...]:  # type: ignore[override]
        flat = super().saved_tensors
        return tuple(f.value(parts) for f, parts in zip(self._saved_forms, by_form(self._saved_forms, flat)))

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:  # type: ignore[override]
        flat = super().needs_input_grad[1:]  # after the call
        return tuple(map(any, by_form(self._arg_forms, flat)))

    def mark_dirty(self, *args: torch.Tensor) -> None:
        self._dirty = args

    def mark_non_differentiable(self, *args: torch.Tensor) -> None:
        self._constant = args

    def _tell_autograd(self, now: Callable[[object], object]) -> None:
        """Tell autograd what the user's forward has saved and marked; `now` gives the tensor that stands for one."""
        saved, dirty, constant = ([now(t) for t in tensors] for tensors in (self._saved, self._dirty, self._constant))
        self._saved_forms = [form_of(t) for t in saved]
        super().save_for_backward(*flattened(saved, self._saved_forms))
        super().mark_dirty(*flattened(dirty, [form_of(t) for t in dirty]))
        super().mark_non_differentiable(*flattened(constant, [form_of(t) for t in constant]))
        self._saved = self._dirty = self._constant = ()

    def set_materialize_grads(self, value: bool) -> None:
        self._materialize = value

    def register_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        into = [form for form in self._arg_forms if form.is_tensor]
        return super().register_hook(_on_flat(hook, type(self).__name__, into, self._result_forms))

    def register_hook_on_locals(self, hook: Callable[..., Any]) -> RemovableHandle:
        """A hook on the gradients of local tensors, as all other nodes have them."""
        return super().register_hook(hook)

    def register_prehook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return super().register_prehook(_on_flat(hook, type(self).__name__, self._result_forms))


def _on_flat(hook: Callable[..., Any], what: str, *forms: Sequence[Form]) -> Callable[..., Any]:
    """A hook on flat gradients, from the user's; what that returns takes the place of the first of them."""

    def on_flat(*flat: Sequence[Any]) -> Any:
        result = hook(*map(_gradients, forms, flat))
        return None if result is None else _flat_gradients(forms[0], _as_tuple(result), what)

    return on_flat


def _gradients(forms: Sequence[Form], flat: Sequence[Any], materialize: bool = False) -> tuple[Any, ...]:
    return tuple(form.gradient(parts, materialize) for form, parts in zip(forms, by_form(forms, flat), strict=True))


def _flat_gradients(forms: Sequence[Form], grads: Sequence[Any], what: str) -> tuple[Any, ...]:
    return tuple(part for f, grad in zip(forms, grads, strict=True) for part in f.flat_gradient(grad, what))


def _as_tuple(value: object) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class _OnLocals(Function):
    """A user's Function over local tensors. For each one there is a subclass of this with the same name."""

    user: type[Function]

    @staticmethod
    def forward(ctx: Ctx, call: FunctionCall, *flat: object) -> tuple[Any, ...]:
        user = function_of(ctx).user
        BackwardCFunction.set_materialize_grads(ctx, False)  # zeros are made with a layout
        ctx._arg_forms = call.forms
        if has_setup_context(user):
            out = user.forward(*call.args)
            user.setup_context(ctx, call.args, out)
        else:
            out = user.forward(ctx, *call.args)
        call.several, results = isinstance(out, tuple), _as_tuple(out)
        call.results = tuple(map(finished, results))
        call.dirty, call.saved = {id(arg) for arg in ctx._dirty}, {id(t) for t in ctx._saved}
        replaced = {id(result): mine for result, mine in zip(results, call.results, strict=True)}
        ctx._tell_autograd(lambda t: replaced.get(id(t), t))
        ctx._result_forms = call.result_forms = [form_of(result) for result in call.results]
        return tuple(flattened(call.results, call.result_forms))

    @staticmethod
    def backward(ctx: Ctx, *flat: Any) -> tuple[Any, ...]:
        user, name = function_of(ctx).user, ctx.name()
        grads: Any = _gradients(ctx._result_forms, flat, ctx._materialize)
        backward = user.vjp if user.vjp is not Function.vjp else user.backward
        once = getattr(backward, "__code__", None) is _ONCE
        with torch.set_grad_enabled(torch.is_grad_enabled() and not once):
            arguments = ([*grads],) if getattr(user, "boxed_grads_call", False) else grads
            found = _as_tuple((backward.__wrapped__ if once else backward)(ctx, *arguments))
            found = _one_for_each(found, ctx._arg_forms, name)
            wanted = [g if need else None for g, need in zip(found, ctx.needs_input_grad, strict=True)]
            result = _flat_gradients(ctx._arg_forms, wanted, name)
        if once and torch.is_grad_enabled() and any(g is not None and g.requires_grad for g in flat):
            result = _never_twice(result)
        return None, *result


_ONCE = once_differentiable(lambda ctx: None).__code__  # what torch's decorator makes of a backward


def _one_for_each(grads: tuple[Any, ...], forms: Sequence[Form], name: str) -> tuple[Any, ...]:
    """One gradient per argument; as in torch, more of them are accepted if those are None."""
    if len(grads) > len(forms) and all(g is None for g in grads[len(forms) :]):
        grads = grads[: len(forms)]
    if len(grads) != len(forms):
        raise RuntimeError(
            f"function {name} returned an incorrect number of gradients (expected {len(forms)}, got {len(grads)})"
        )
    return grads


def _never_twice(grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """These gradients behind a node that raises when it is differentiated, as torch does for @once_differentiable."""
    message = b"trying to differentiate twice a function that was marked with @once_differentiable"
    raising: Any = DelayedError(message, len(grads))
    return _as_tuple(raising(*(g if g is None else g.detach().requires_grad_() for g in grads)))


def on_locals(cls: Any) -> type[_OnLocals]:
    """The Function over local tensors that stands for `cls`."""
    made = cls.__dict__.get("_shardwise")
    if made is None:
        made = type(cls)(cls.__name__, (_OnLocals,), {"user": cls})
        give_node_class(made, _Node)
        cls._shardwise = made
    return made


def has_setup_context(cls: type[Function]) -> bool:
    return cls.setup_context is not Function.setup_context


def finished(value: object) -> object:
    """An argument, or a result: its gradient will be that of what is pending, not of the parts (except of a sum)."""
    return finished_but_sums(value) if isinstance(value, Wrapper) else value
