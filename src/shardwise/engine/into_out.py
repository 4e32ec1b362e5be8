"""Calls with out=: the result is computed without it, then written into the tensors that out names."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.engine import autocast
from shardwise.engine.aliasing import COPIES
from shardwise.engine.asked_outs import Told, asked
from shardwise.engine.call_shape import CallShape, op_name
from shardwise.engine.fallback import replicated
from shardwise.engine.plain_tensors import replicated_plain
from shardwise.engine.plan import Plan
from shardwise.errors import RuleError
from shardwise.layout.shapes import dense_stride
from shardwise.rules.as_strided import is_part
from shardwise.strategy.memory import meta_like
from shardwise.strategy.program import reduced
from shardwise.torch_private.tensors import OpOverload, schema_of
from shardwise.wrapper import Wrapper, rebind, restride, storage_id_of

# arguments that an overload with `out` may take from the `out` tensor
_OF_FACTORIES = ("dtype", "layout", "device", "pin_memory")


def takes_outs(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call names tensors to write its results into."""
    return all(_is_out(kwargs.get(name)) for name in out_names(func))


def _is_out(out: object) -> bool:
    outs = out if isinstance(out, (tuple, list)) else [out]
    return bool(outs) and all(isinstance(o, Wrapper) for o in outs)


@functools.lru_cache(maxsize=4096)
def out_names(func: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the arguments that are written: `out`, or in aten's overloads one per result."""
    schema = schema_of(func)
    return ("out",) if schema is None else tuple(a.name for a in schema.arguments if a.is_out) or ("out",)


def into_outs(func: Callable[..., Any], call: CallShape) -> Plan:
    """The plan of a call that names tensors to write its results into."""
    with warnings.catch_warnings(action="ignore"):  # torch's meta kernels have warnings of their own
        call.check()
    name, names = op_name(func), out_names(func)
    forms = [func] if isinstance(func, OpOverload) else _overloads(name, with_out=True)
    without = _without_out(func) if isinstance(func, OpOverload) else func
    if without is None:
        return replicated(func, call)
    returns_nothing = any(not schema_of(form).returns for form in forms)
    # normal(0, 1, (3,), out=out) has the dtype of out, normal(x, out=out) that of x
    of_numbers = all(path[0] in names for path in call.paths)
    typed = bool(forms) and (any if of_numbers else all)(_is_typed_by_out(form) for form in forms)
    told = asked(call, without, names)

    def run(args: Any, kwargs: Any, local_args: Any, local_kwargs: Any) -> Any:
        outs: Any = kwargs[names[0]] if len(names) == 1 else [kwargs[n] for n in names]
        rest = {k: v for k, v in kwargs.items() if k not in names}
        rest.pop("requires_grad", False)  # zeros(3, out=out, requires_grad=True) means `out`
        flag = _flag_after(func, args, kwargs) if of_numbers and isinstance(outs, Wrapper) else None
        if typed:
            rest.setdefault("dtype", outs.dtype)
        with autocast.off():  # which does nothing for calls with `out`
            result = without(*args, **rest)
        if isinstance(outs, Wrapper):
            written = _write_all(name, [outs], [result], told)[0]
            return written if flag is None else written.requires_grad_(flag)
        several = _write_all(name, outs, result, told)
        if returns_nothing:
            return None
        kind = type(result) if told is None else told.kind
        return getattr(torch.return_types, f"{kind.__name__}_out", kind)(several)

    return run


def _flag_after(func: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool | None:
    """What ``out.requires_grad`` becomes where a call of numbers alone writes into `out`: most such calls set it, as
    zeros(3, out=out) sets it to False, and some refuse an `out` that has it. None if it stays."""
    (given,) = (out for out in kwargs.values() if isinstance(out, Wrapper))
    asked = bool(kwargs.get("requires_grad", False))
    if not asked and not given.requires_grad:
        return None
    like = meta_like(given._layout).requires_grad_(given.requires_grad)
    if not given.is_leaf:
        with torch.enable_grad():
            like = like * 1
    func(*args, **{name: like if out is given else out for name, out in kwargs.items()})
    return None if like.requires_grad == given.requires_grad else like.requires_grad


def resize_plain(outs: Any, wrapped: Any) -> None:
    """Where a plain `out` should have been resized, only the distributed tensor that shared its memory was: resize it,
    too, and let them share memory again."""
    pairs = zip(outs, wrapped, strict=True) if isinstance(outs, (tuple, list)) else [(outs, wrapped)]
    for plain, out in pairs:
        if not isinstance(plain, torch.Tensor) or isinstance(plain, Wrapper) or plain.shape == out.shape:
            continue
        with torch.no_grad():
            plain.resize_(out.shape).as_strided_(out.shape, out._layout.stride)
            if not out._layout.mesh.comm.outside:
                plain.copy_(out.full_tensor())
            rebind(out, replicated_plain(plain, out._layout.mesh))


def _check(name: str, out: torch.Tensor, value: torch.Tensor) -> None:
    """Raise, as torch does, if `value` may not be written into `out`."""
    if not torch.can_cast(value.dtype, out.dtype):
        raise RuntimeError(f"{name}: result type {value.dtype} can't be cast to the out's type {out.dtype}")
    if value.requires_grad or (torch.is_grad_enabled() and out.requires_grad):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the "
            f"arguments requires grad; call it under torch.no_grad(), or without out"
        )


def _write_all(
    name: str, outs: Sequence[Wrapper], values: Sequence[torch.Tensor], told: Told | None
) -> list[torch.Tensor]:
    """The outs, with the values written into them."""
    for out, value in zip(outs, values, strict=True):
        _check(name, out, value)
    if told is not None and told.shapes != [tuple(value.shape) for value in values]:
        told = None  # sizes that depend on the values, as of `nonzero`: zeros did not know them
    if told is not None:
        told.warn()
    strides = [None] * len(outs) if told is None else told.strides
    return [_write(name, *each) for each in zip(outs, values, strides, strict=True)]


def _write(name: str, out: Wrapper, value: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """`out`, with the value written into it; if it must be resized, with these strides where they are known."""
    return out.copy_(value) if out.shape == value.shape else _resized(name, out, value, stride)


def _resized(name: str, out: Wrapper, value: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """`out` of another shape, resized to the result's as torch does; with torch's warning where elements are lost."""
    shape, stride = tuple(out.shape), out._layout.stride
    if stride != dense_stride(shape, stride) or (out.numel() and (storage_id_of(out) in COPIES or is_part(out))):
        raise RuleError(
            f"{name}: out has shape {shape} and is part of another tensor, the result {tuple(value.shape)}; give an "
            f"out of the result's shape"
        )
    if out.numel() and strides is None:
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(shape)}, which does not match "
            f"the required output shape {list(value.shape)} of {name}. Resize it to zero elements before, "
            f"t.resize_(0), if that is what you want",
            stacklevel=2,
        )
    if not isinstance(value, Wrapper) or (out.numel() and not out.requires_grad):  # views of its elements may exist
        return out.resize_(value.shape).copy_(value)
    if out.requires_grad:  # no gradient would say which part a factor or an extreme gets
        value = reduced(value)
    rebind(out, value.to(out.dtype, copy=True).requires_grad_(out.requires_grad))
    if strides is not None:
        restride(out, strides)
    return out


def _overloads(name: str, with_out: bool) -> list[OpOverload]:
    """The overloads of an op that write their results into tensors they are given, or those that return them."""
    packet = getattr(torch.ops.aten, name, None)
    forms = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return [form for form in forms if any(a.is_out for a in schema_of(form).arguments) == with_out]


def _without_out(func: Callable[..., object]) -> OpOverload | None:
    """The overload that takes the same arguments and returns what `func` writes into the outs; None without one."""
    found = _overloads(op_name(func), with_out=False)
    alike = [f for less in ((), _OF_FACTORIES) for f in found if _arguments(f, less) == _arguments(func, less)]
    return next(iter(alike), None)


def _arguments(func: object, without: Sequence[str]) -> list[tuple[str, str]]:
    """The names and types of what an overload takes, outs aside."""
    arguments = schema_of(func).arguments
    return [(a.name, str(a.type)) for a in arguments if not a.is_out and a.name not in without]


def _is_typed_by_out(form: OpOverload) -> bool:
    """Whether the result has the dtype of `out` unless the call names one: zeros(3, out=out)."""
    names = [[a.name for a in schema_of(f).arguments] for f in (form, _without_out(form)) if f is not None]
    return len(names) == 2 and "dtype" not in names[0] and "dtype" in names[1]
