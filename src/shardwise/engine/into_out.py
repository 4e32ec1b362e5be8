"""out=: the result is computed aside, then written into tensors that are there already."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.engine import autocast
from shardwise.engine.call_shape import CallShape, op_name
from shardwise.engine.fallback import replicated
from shardwise.engine.plan import Plan
from shardwise.errors import LayoutError, RuleError
from shardwise.layout.layout import dense_stride
from shardwise.torch_private import OpOverload, schema_of
from shardwise.wrapper import Wrapper, rebind

_OF_FACTORIES = ("dtype", "layout", "device", "pin_memory")  # which the form with `out` may take from it


def takes_outs(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call names tensors to write its results into."""
    return all(_is_out(kwargs.get(name)) for name in out_names(func))


def _is_out(out: Any) -> bool:
    return isinstance(out, Wrapper) or (
        isinstance(out, (tuple, list)) and bool(out) and all(isinstance(o, Wrapper) for o in out)
    )


@functools.lru_cache(maxsize=4096)
def out_names(func: Any) -> tuple[str, ...]:
    """The arguments that are written: aten's overloads give every result a name of its own."""
    schema = getattr(func, "_schema", None)
    return ("out",) if schema is None else tuple(a.name for a in schema.arguments if a.is_out) or ("out",)


def into_outs(func: Any, call: CallShape) -> Plan:
    """The plan of such a call. Some ops return nothing then."""
    call.check()  # some ops write into an `out` of their result's type only
    name, names = op_name(func), out_names(func)
    forms = [func] if isinstance(func, OpOverload) else _forms_with_out(name)
    without = _without_out(func) if isinstance(func, OpOverload) else func
    if without is None:
        return replicated(func, call)
    silent = any(not schema_of(form).returns for form in forms)
    # normal(0, 1, (3,), out=out) is of its type, normal(x, out=out) of the type of x
    of_numbers = all(path[0] in names for path in call.paths)
    typed = bool(forms) and (any if of_numbers else all)(_is_typed_by_out(form) for form in forms)

    def run(args: Any, kwargs: Any, locals: Any, local_kwargs: Any) -> Any:
        outs: Any = kwargs[names[0]] if len(names) == 1 else [kwargs[n] for n in names]
        rest = {k: v for k, v in kwargs.items() if k not in names}
        needs_grad = rest.pop("requires_grad", False)  # of a factory's `out`, not of what is made for it
        if typed:
            rest.setdefault("dtype", outs.dtype)
        with autocast.off():  # torch casts for no `out`
            result = without(*args, **rest)
        if isinstance(outs, Wrapper):
            written = _write(name, outs, result)
            return written.requires_grad_() if needs_grad else written
        for out, value in zip(outs, result, strict=True):
            _check(name, out, value)
        written = [_write(name, out, value) for out, value in zip(outs, result, strict=True)]
        if silent:
            return None
        return written if isinstance(result, list) else type(result)(written)

    return run


def check_not_resized(name: str, given: Any, wrapped: Any) -> None:
    """A plain `out` stands for a Replicate one that shares its memory: it cannot become another."""
    pairs = zip(given, wrapped, strict=True) if isinstance(given, (tuple, list)) else [(given, wrapped)]
    for plain, out in pairs:
        if isinstance(plain, torch.Tensor) and plain.shape != out.shape:
            raise LayoutError(
                f"{name}: out is a plain tensor of shape {tuple(plain.shape)}, the result is distributed and of shape "
                f"{tuple(out.shape)}; give an out of that shape, or a DTensor"
            )


def _check(name: str, out: Any, value: Any) -> None:
    if not torch.can_cast(value.dtype, out.dtype):
        raise RuntimeError(f"{name}: result type {value.dtype} can't be cast to the out's type {out.dtype}")
    if value.requires_grad or (torch.is_grad_enabled() and out.requires_grad):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the "
            f"arguments requires grad; call it under torch.no_grad(), or without out"
        )


def _write(name: str, out: Any, value: Any) -> Any:
    """The value goes where `out` lies."""
    _check(name, out, value)
    return out.copy_(value) if out.shape == value.shape else _resized(name, out, value)


def _resized(name: str, out: Any, value: Any) -> Any:
    """An `out` of another shape becomes one of the result's, as in torch, which warns where elements are lost."""
    shape, stride = tuple(out.shape), out._layout.stride
    if stride != dense_stride(shape, stride):
        raise RuleError(
            f"{name}: out has shape {shape} and is part of another tensor, the result {tuple(value.shape)}; give an "
            f"out of the result's shape"
        )
    if out.numel():
        warnings.warn(
            f"{name}: an out of shape {shape} was resized to {tuple(value.shape)}, the shape of the result; give an "
            f"out of that shape, or an empty one",
            stacklevel=2,
        )
    if not isinstance(value, Wrapper):
        return out.resize_(value.shape).copy_(value)
    return rebind(out, value.to(out.dtype, copy=True))


# -- an overload and the one that writes its result ------------------------------------------------------------------
def _forms_with_out(name: str) -> list[Any]:
    return [form for form in _overloads(name) if any(a.is_out for a in schema_of(form).arguments)]


def _overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


def _without_out(func: Any) -> Any:
    """The overload that takes the same arguments, and returns what `func` writes into the outs; None: there is none."""
    wanted = _taken(func, ())
    found = [form for form in _overloads(op_name(func)) if not any(a.is_out for a in schema_of(form).arguments)]
    same = [form for form in found if _taken(form, ()) == wanted]
    alike = [form for form in found if _taken(form, _OF_FACTORIES) == _taken(func, _OF_FACTORIES)]
    return next(iter(same + alike), None)


def _taken(func: Any, less: Sequence[str]) -> list[tuple[str, str]]:
    arguments = schema_of(func).arguments
    return [(a.name, str(a.type)) for a in arguments if not a.is_out and a.name not in less]


def _is_typed_by_out(form: Any) -> bool:
    """zeros(3, out=out): what is made has the type of `out`, unless told."""
    names = [[a.name for a in schema_of(f).arguments] for f in (form, _without_out(form)) if f is not None]
    return len(names) == 2 and "dtype" not in names[0] and "dtype" in names[1]
