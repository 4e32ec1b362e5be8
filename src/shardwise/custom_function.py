"""torch.autograd.Function on distributed tensors: the functions people write, a module's full backward hooks,
checkpoint(use_reentrant=True).

To C++ a distributed tensor never requires grad; its local tensors do. So a Function is applied to those, as one node
over the local tensors of all arguments. The node passes distributed tensors to the user's forward and backward, and
takes the local tensors out of what they return. It is the `ctx` that they see and the `grad_fn` of the results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction, Function, once_differentiable
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from shardwise.autograd.gradients import as_gradient, finished_but_sums, from_gradient
from shardwise.comm.rank_tensor import RankTensor, map_ranks, unique
from shardwise.context import of_thread
from shardwise.engine.plain_tensors import replicated_plain
from shardwise.engine.saved import Check
from shardwise.engine.transforms import is_outside, turn_in, turn_out
from shardwise.errors import AutogradError
from shardwise.protocols import Ctx
from shardwise.torch_private.autograd import (
    BackwardHookFunction,
    DelayedError,
    function_of,
    give_node_class,
    is_saving_for_hooks,
    is_transforming,
)
from shardwise.torch_private.tensors import (
    are_transforms_active,
    held_by_transforms,
    requires_grad_in_cpp,
    without_torch_function,
)
from shardwise.wrapper import Wrapper, wrap

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, list, tuple, dict, type(None)})
_torchs_apply: Callable[..., Any] = inspect.getattr_static(Function, "apply")
_torchs_apply = getattr(_torchs_apply, "__func__", _torchs_apply)  # a classmethod; from torch 2.14 on a method of C++


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
        result = _torchs_apply(cls, *args, **kwargs)
    finally:
        of_thread.applying = outer
    if type(result) is tuple:
        return tuple([r if type(r) in _PLAIN else _with_local_graph(r) for r in result])
    return result if type(result) in _PLAIN else _with_local_graph(result)


def _apply_distributed(cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # hooks see all ranks at once; what simulated ranks hold, each of them applies it to for itself
    whole = cls is BackwardHookFunction or any(isinstance(arg, Wrapper) or _is_of_program(arg) for arg in args)
    if not whole:
        return map_ranks(cls.apply, args, kwargs, watched=True)
    if _has_setup_context(cls):
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    if are_transforms_active():
        return _apply_transformed(cls, args, kwargs)
    if is_transforming():
        _refuse_tangents(cls, args)
    needed = torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    if kwargs or not needed:
        return _torchs_apply(cls, *args, **kwargs)
    call = _Call(tuple(_finished(arg) for arg in args))
    flat = _torchs_apply(_on_locals(cls), call, *_flattened(call.args, call.forms))
    _watch_finished(cls.__name__, call, args, flat)
    found = zip(call.results, call.result_forms, _by_form(call.result_forms, flat), strict=True)
    written = {id(mine): arg for mine, arg in zip(call.args, args, strict=True) if id(mine) in call.dirty}
    results = tuple(
        _written(written[id(result)], result) if id(result) in written else form.value(parts)
        for result, form, parts in found
    )
    return results if call.several else results[0]


def _watch_finished(name: str, call: _Call, args: Sequence[Any], flat: Sequence[Any]) -> None:
    """Have the backward pass raise if an argument was written that the Function has saved as what was made of it
    (`_finished`): torch knows the writes to the argument itself only where that is what was saved."""
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


def _finished(value: object) -> object:
    """An argument, or a result: its gradient will be that of what is pending, not of the parts (except of a sum)."""
    return finished_but_sums(value) if isinstance(value, Wrapper) else value


def _written(arg: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """An argument that a Function has written into, or into what was made of it (`_finished`)."""
    return arg if arg is value else arg.copy_(value)


def _apply_transformed(cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A Function inside of torch.func: torch applies it to whole tensors, and asks it for the derivatives it needs."""
    mesh = next(arg._layout.mesh for arg in args if isinstance(arg, Wrapper))
    args = tuple(turn_out(arg) if isinstance(arg, Wrapper) else arg for arg in args)
    result = _torchs_apply(cls, *args, **kwargs)
    back = lambda x: turn_in(x, mesh) if is_outside(x) and not held_by_transforms(x)[1] else x  # noqa: E731
    return tree_map_only(torch.Tensor, back, result)


def _refuse_tangents(cls: type[Function], args: tuple[Any, ...]) -> None:
    if any(isinstance(arg, torch.Tensor) and forward_ad.unpack_dual(arg).tangent is not None for arg in args):
        raise AutogradError(
            f"{cls.__name__}: forward_ad of a torch.autograd.Function on distributed tensors is not supported, its "
            f"tangents would be lost; use torch.func.jvp, which is"
        )


def _has_setup_context(cls: type[Function]) -> bool:
    return cls.setup_context is not Function.setup_context


# -- arguments and results, as the node has them: flat -----------------------------------------------------
class _Form:
    """How one argument, result or saved tensor stands among the flat values of the node: here, as itself."""

    count = 1

    def __init__(self, value: object) -> None:
        self.is_tensor = isinstance(value, torch.Tensor)
        self.empty = [_kind(value)] if isinstance(value, torch.Tensor) else []

    def flat(self, value: Any) -> Sequence[Any]:
        return (value,)

    def value(self, parts: Sequence[Any]) -> Any:
        return parts[0]

    def gradient(self, parts: Sequence[Any], materialize: bool) -> Any:
        """The gradient as the user's code sees it."""
        if all(part is None for part in parts) and not (materialize and self.empty):
            return None
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in self.empty)
        return self._gradient([zero if part is None else part for part, zero in zip(parts, zeros, strict=True)])

    def _gradient(self, parts: Sequence[Any]) -> Any:
        return parts[0]

    def flat_gradient(self, grad: torch.Tensor | None, what: str) -> Sequence[torch.Tensor | None]:
        """The gradient as autograd takes it."""
        return (grad.full_tensor() if isinstance(grad, Wrapper) else grad,)  # type: ignore[attr-defined]


class _Distributed(_Form):
    """A distributed tensor, which stands among the flat values as its local tensors."""

    is_tensor = True

    def __init__(self, value: Wrapper) -> None:
        self.layout = value._layout
        self.comm = self.layout.mesh.comm
        self.structure = self.comm.structure(value._local)
        self.empty = [_kind(part) for part in self.flat(value)]
        self.count = len(self.empty)

    def flat(self, value: Wrapper) -> Sequence[torch.Tensor]:
        return self.comm.values(value._local)

    def value(self, parts: Sequence[torch.Tensor]) -> Wrapper:
        return wrap(self.comm.assemble(self.structure, parts), self.layout)

    def _gradient(self, parts: Sequence[torch.Tensor]) -> Wrapper:
        return as_gradient(self.layout, self.comm.assemble(self.structure, parts))

    def flat_gradient(self, grad: torch.Tensor | None, what: str) -> Sequence[torch.Tensor | None]:
        if grad is None:
            return (None,) * self.count
        if not isinstance(grad, Wrapper):
            grad = replicated_plain(grad, self.layout.mesh)
        if _expands(self.layout.shape, grad.shape):
            grad = grad.sum_to_size(self.layout.shape)
        return self.comm.pick_gradients(self.structure, from_gradient(self.layout, grad, what))


class _OfRanks(_Form):
    """What simulated ranks hold: it stands among the flat values as the tensors of all of them."""

    is_tensor = True

    def __init__(self, value: RankTensor) -> None:
        parts = self.flat(value)
        numbers = {id(part): i for i, part in enumerate(parts)}
        self.structure = [numbers[id(v)] for v in value.ranks]
        self.empty, self.count = [_kind(part) for part in parts], len(parts)

    def flat(self, value: RankTensor) -> Sequence[torch.Tensor]:
        return unique(value.ranks)

    def value(self, parts: Sequence[torch.Tensor]) -> RankTensor:
        return RankTensor([parts[i] for i in self.structure])

    _gradient = value

    def flat_gradient(self, grad: torch.Tensor | None, what: str) -> Sequence[torch.Tensor | None]:
        if grad is None:
            return (None,) * self.count
        each = grad.ranks if isinstance(grad, RankTensor) else (grad,) * len(self.structure)
        return [each[self.structure.index(i)] for i in range(self.count)]


def _expands(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of `shape` expands to the shape `to`: torch allows gradients of expanded tensors."""
    tail = to[len(to) - len(shape) :]
    return shape != to and len(shape) == len(tail) and all(a in (1, b) for a, b in zip(shape, tail, strict=True))


def _kind(value: torch.Tensor) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.device


def _form(value: object) -> _Form:
    if isinstance(value, RankTensor):
        return _OfRanks(value)
    return _Distributed(value) if isinstance(value, Wrapper) else _Form(value)


def _flattened(values: Iterable[Any], forms: Sequence[_Form]) -> list[Any]:
    return [part for form, value in zip(forms, values, strict=True) for part in form.flat(value)]


def _by_form(forms: Sequence[_Form], flat: Sequence[Any]) -> list[Sequence[Any]]:
    """The flat values of each form."""
    values = iter(flat)
    return [tuple(islice(values, form.count)) for form in forms]


class _Call:
    """One application of a Function: the arguments that the node's forward takes, and the results it makes."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args, self.forms = args, [_form(arg) for arg in args]
        self.results: tuple[Any, ...] = ()
        self.result_forms: list[_Form] = []
        self.several = False
        self.saved: set[int] = set()  # ids of tensors saved for the backward pass
        self.dirty: set[int] = set()  # ids of arguments that were written and returned: such a result is the argument


# -- the node ----------------------------------------------------------------------------------------------
class _Node(BackwardCFunction):
    """The `ctx` of a user's Function: all tensors that it takes and returns are distributed ones."""

    _arg_forms: list[_Form]
    _result_forms: list[_Form]
    _saved_forms: Sequence[_Form] = ()
    _saved: Sequence[object] = ()  # these three only until the forward is done
    _dirty: Sequence[object] = ()
    _constant: Sequence[object] = ()
    _materialize = True

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self._saved = tensors

    @property
    def saved_tensors(self) -> tuple[Any, ...]:  # type: ignore[override]
        flat = super().saved_tensors
        return tuple(f.value(parts) for f, parts in zip(self._saved_forms, _by_form(self._saved_forms, flat)))

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:  # type: ignore[override]
        flat = super().needs_input_grad[1:]  # after the call
        return tuple(map(any, _by_form(self._arg_forms, flat)))

    def mark_dirty(self, *args: torch.Tensor) -> None:
        self._dirty = args

    def mark_non_differentiable(self, *args: torch.Tensor) -> None:
        self._constant = args

    def _tell_autograd(self, now: Callable[[object], object]) -> None:
        """Tell autograd what the user's forward has saved and marked; `now` gives the tensor that stands for one."""
        saved, dirty, constant = ([now(t) for t in tensors] for tensors in (self._saved, self._dirty, self._constant))
        self._saved_forms = [_form(t) for t in saved]
        super().save_for_backward(*_flattened(saved, self._saved_forms))
        super().mark_dirty(*_flattened(dirty, [_form(t) for t in dirty]))
        super().mark_non_differentiable(*_flattened(constant, [_form(t) for t in constant]))
        self._saved = self._dirty = self._constant = ()

    def set_materialize_grads(self, value: bool) -> None:
        self._materialize = value

    def register_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        into = [form for form in self._arg_forms if form.is_tensor]
        return super().register_hook(_on_flat(hook, type(self).__name__, into, self._result_forms))

    def register_prehook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return super().register_prehook(_on_flat(hook, type(self).__name__, self._result_forms))


def _on_flat(hook: Callable[..., Any], what: str, *forms: Sequence[_Form]) -> Callable[..., Any]:
    """A hook on flat gradients, from the user's; what that returns takes the place of the first of them."""

    def on_flat(*flat: Sequence[Any]) -> Any:
        result = hook(*map(_gradients, forms, flat))
        return None if result is None else _flat_gradients(forms[0], _as_tuple(result), what)

    return on_flat


def _gradients(forms: Sequence[_Form], flat: Sequence[Any], materialize: bool = False) -> tuple[Any, ...]:
    return tuple(form.gradient(parts, materialize) for form, parts in zip(forms, _by_form(forms, flat), strict=True))


def _flat_gradients(forms: Sequence[_Form], grads: Sequence[Any], what: str) -> tuple[Any, ...]:
    return tuple(part for f, grad in zip(forms, grads, strict=True) for part in f.flat_gradient(grad, what))


def _as_tuple(value: object) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class _OnLocals(Function):
    """A user's Function over local tensors. For each one there is a subclass of this with the same name."""

    user: type[Function]

    @staticmethod
    def forward(ctx: Ctx, call: _Call, *flat: Any) -> tuple[Any, ...]:
        user = function_of(ctx).user
        BackwardCFunction.set_materialize_grads(ctx, False)  # zeros are made with a layout
        ctx._arg_forms = call.forms
        if _has_setup_context(user):
            out = user.forward(*call.args)
            user.setup_context(ctx, call.args, out)
        else:
            out = user.forward(ctx, *call.args)
        call.several, results = isinstance(out, tuple), _as_tuple(out)
        call.results = tuple(map(_finished, results))
        call.dirty, call.saved = {id(arg) for arg in ctx._dirty}, {id(t) for t in ctx._saved}
        finished = {id(result): mine for result, mine in zip(results, call.results, strict=True)}
        ctx._tell_autograd(lambda t: finished.get(id(t), t))
        ctx._result_forms = call.result_forms = [_form(result) for result in call.results]
        return tuple(_flattened(call.results, call.result_forms))

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


def _one_for_each(grads: tuple[Any, ...], forms: Sequence[_Form], name: str) -> tuple[Any, ...]:
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


def _on_locals(cls: Any) -> type[_OnLocals]:
    """The Function over local tensors that stands for `cls`."""
    made = cls.__dict__.get("_shardwise")
    if made is None:
        made = type(cls)(cls.__name__, (_OnLocals,), {"user": cls})
        give_node_class(made, _Node)
        cls._shardwise = made
    return made


# -- distributed tensors made by a Function of plain ones --------------------------------------------------
class _Unwrapped(Function):
    """The local tensors of a distributed one that C++ recorded as the result of a Function."""

    @staticmethod
    def forward(ctx: Ctx, tensor: Wrapper) -> tuple[torch.Tensor, ...]:
        ctx.form = _Distributed(tensor)
        return tuple(part.detach() for part in ctx.form.flat(tensor))

    @staticmethod
    def backward(ctx: Ctx, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and any(g.requires_grad for g in grads):
            raise AutogradError(
                "second derivatives through a torch.autograd.Function that makes a DTensor of plain tensors would be "
                "lost; make the DTensor outside of it, with DTensor.from_local or distribute_tensor"
            )
        return ctx.form.gradient(grads, True)


def _with_local_graph(tensor: object) -> Any:
    """A result whose graph C++ recorded on the wrapper, where nobody looks, with the graph on its local tensors."""
    if not isinstance(tensor, Wrapper):
        return tensor
    with without_torch_function():
        if not requires_grad_in_cpp.__get__(tensor):
            return tensor
    form = _Distributed(tensor)
    return form.value(_torchs_apply(_Unwrapped, tensor))
