"""Casts and changes of device."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rules.pointwise import broadcast
from shardwise.strategy.notation import operands_in
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Algorithm, Factors, Operand
from shardwise.wrapper import wrap


@rule("to type_as")
def cast(x: Operand, *args: Any, **kwargs: Any) -> Factors | Algorithm | None:
    """A Partial sum survives a cast that loses nothing; before one that rounds, the sum is taken."""
    given = (*args, *kwargs.values())
    if any(isinstance(a, (torch.device, str)) for a in given):
        return Algorithm(to_device)
    others = list(operands_in(given))
    names = broadcast([x])
    if others:  # type_as, to(other): the other gives its dtype only
        return Factors([names.inputs[0], *([None] * o.ndim for o in others)], names.outputs)
    wanted = [a for a in given if isinstance(a, torch.dtype)]
    same = all(d == x.dtype for d in wanted)
    keeps = same or all(torch.promote_types(d, x.dtype) == d and (d.is_floating_point or d.is_complex) for d in wanted)
    ordered = "memory_format" in kwargs
    return broadcast([x], linear="joint" if keeps else "none", any_partial=same, may_alias=ordered)


_NAMED = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
    "chalf": torch.complex32,
    "cfloat": torch.complex64,
    "cdouble": torch.complex128,
}


def _named_cast(name: str, dtype: torch.dtype) -> None:
    @rule(name)
    def to_dtype(x: Operand, *args: Any, **kwargs: Any) -> Any:
        return cast(x, dtype)


for _name, _dtype in _NAMED.items():
    _named_cast(_name, _dtype)


@rule("type")
def type_(x: Operand, dtype: Any = None, **kwargs: Any) -> Any:
    """x.type(dtype) is a cast; x.type() and x.type("torch.FloatTensor") are torch's own business."""
    return cast(x, dtype) if isinstance(dtype, torch.dtype) else None


def to_device(x: Any, *args: Any, **kwargs: Any) -> Any:
    """x.to(device, dtype, ...): first the cast, then each local tensor to the device."""
    dtypes = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
    if dtypes:
        x = x.to(dtypes[0])
    comm = x._layout.mesh.comm
    before = comm.values(x._local)
    local = comm.bind(torch.Tensor.to)(x._local, *args, **kwargs)
    if all(a is b for a, b in zip(before, comm.values(local), strict=True)):
        return x
    return wrap(local, x._layout.replace(device=comm.first(local).device))


@rule("_to_copy")
def to_copy(x: Operand, **kwargs: Any) -> Algorithm:
    """aten's cast names a device even where it stays."""

    def run(x: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **unused: Any) -> Any:
        x = x.clone() if dtype is None or dtype == x.dtype else x.to(dtype)
        return x if device is None else to_device(x, device, memory_format=memory_format or torch.preserve_format)

    return Algorithm(run)


@rule("cpu")
def cpu(x: Operand, **kwargs: Any) -> Algorithm:
    return Algorithm(lambda x, **kwargs: to_device(x, "cpu", **kwargs))


@rule("cuda")
def cuda(x: Operand, device: Any = None, **kwargs: Any) -> Algorithm:
    return Algorithm(lambda x, device=None, **kwargs: to_device(x, "cuda" if device is None else device, **kwargs))
