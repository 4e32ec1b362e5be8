"""Casts, changes of device, and new tensors made from a distributed one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from shardwise.functions import without_size
from shardwise.layout import Layout, Replicate
from shardwise.rules.pointwise import broadcast
from shardwise.strategy import Algorithm, Factors, Operand, Order, Tensor, factors, operands_in, run_local
from shardwise.strategy.memory import copied_stride
from shardwise.strategy.order import rising
from shardwise.strategy.registry import program, refused, rule
from shardwise.wrapper import wrap


@rule("to type_as")
def cast(x: Operand, *args: Any, **kwargs: Any) -> Factors | Algorithm | None:
    """A Partial sum survives a cast that loses nothing; before one that rounds, the sum is taken."""
    arguments = (*args, *kwargs.values())
    if any(isinstance(a, (torch.device, str)) for a in arguments):
        return Algorithm(to_device)
    others = list(operands_in(arguments))
    if others:  # type_as, to(other): the other gives its dtype only
        return factors("*d, *o!, .. -> *d", [x, *others])
    wanted = [a for a in arguments if isinstance(a, torch.dtype)]
    same = all(d == x.dtype for d in wanted)
    holds = lambda d: d.itemsize > 1 and (x.dtype.itemsize == 1 or torch.promote_types(d, x.dtype) == d)  # not float8
    keeps = same or (x.dtype.to_real().is_floating_point and all(map(holds, wanted)))
    order = Order(rising, one_to_one=keeps) if all(_keeps_order(x.dtype, d) for d in wanted) else None
    linear = "joint" if keeps else "none"
    return broadcast([x], linear=linear, any_partial=same, may_alias="memory_format" in kwargs, order=order)


def _keeps_order(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Whether a cast never turns two numbers around, nor makes a NaN: not of floats to integers or to a byte."""
    return to.is_floating_point and to.itemsize > 1 and not dtype.is_complex


_CASTS = {"char": torch.int8, "byte": torch.uint8}
for _name in "char byte float double half bfloat16 int long short bool chalf cfloat cdouble".split():
    _dtype = _CASTS.get(_name) or getattr(torch, _name)
    rule(_name)(lambda x, *args, dtype=_dtype, **kwargs: cast(x, dtype))
# x.type() and x.type("torch.FloatTensor") are torch's own business
rule("type")(lambda x, dtype=None, **kwargs: cast(x, dtype) if isinstance(dtype, torch.dtype) else None)


def to_device(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """x.to(device, dtype, ...): first the cast, then each local tensor to the device."""
    for dtype in (a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)):
        x = x.to(dtype)
    comm = x._layout.mesh.comm
    local = comm.bind(torch.Tensor.to)(x._local, *args, **kwargs)
    if comm.same(local, x._local):
        return x
    stride = copied_stride(x.shape, x._layout.stride, kwargs.get("memory_format"))
    return wrap(local, x._layout.replace(device=comm.first(local).device, stride=stride))


@program("_to_copy")
def to_copy(
    x: Tensor, *, dtype: object = None, device: object = None, memory_format: object = None, **unused: object
) -> Tensor:
    """aten's cast names a device even where it stays."""
    x = x.clone() if dtype is None or dtype == x.dtype else x.to(dtype)
    return x if device is None else to_device(x, device, memory_format=memory_format or torch.preserve_format)


program("cpu")(lambda x, **kwargs: to_device(x, "cpu", **kwargs))
program("cuda")(lambda x, device=None, **kwargs: to_device(x, "cuda" if device is None else device, **kwargs))


# -- new tensors on the mesh: of its own size cut as it is, of another replicated --------------------------
def new(method: Any, sized: bool, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    mesh, one = x._layout.mesh, x._layout.mesh.comm.first(x._local)
    like = method(one.new_empty(0, device="meta"), *args, **(kwargs | {"device": "meta"}))
    alike, device = sized and like.shape == x.shape, torch.device(kwargs.get("device") or one.device)
    places = [p if alike and p.is_shard() else Replicate() for p in x._layout.placements]
    layout = Layout.make(mesh, places, like.shape, like.dtype, like.stride(), device)
    rest, named = without_size(args, kwargs) if alike else (args, kwargs)
    return run_local(lambda size: method(one, *[size] * alike, *rest, **named), [], layout, layout.local_shape_at)


for _name in "new_zeros new_ones new_empty new_full new_tensor".split():
    _new = partial(new, getattr(torch.Tensor, _name), _name != "new_tensor")
    _new.__doc__ = "Every rank makes its part."
    program(_name)(_new)


@program("new_empty_strided")
def new_empty_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], **kwargs: object) -> Tensor:
    """Of its own size, and without gaps in memory, it is cut as the tensor is."""
    inward = sorted(range(len(stride)), key=lambda dim: (-stride[dim], -size[dim]))
    if tuple(size) != x.shape or tuple(stride) != torch.empty_permuted(size, inward, device="meta").stride():
        return new(torch.Tensor.new_empty_strided, False, x, size, stride, **kwargs)
    outward = sorted(range(len(inward)), key=inward.__getitem__)
    return x.permute(inward).new_empty([size[dim] for dim in inward], **kwargs).permute(outward)


# -- to tensors that are not dense --------------------------------------------------------------------------
refused(
    "to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc _to_sparse to_mkldnn "
    "_nested_tensor_from_tensor_list",
    "a DTensor is dense, and what is asked for here would be sparse, nested or of mkldnn; use the plain tensor, "
    "x.full_tensor()",
)
