"""What one op of the played rank does: floating-point operations, bytes, and where tables of measured times have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from shardwise.protocols import Args, Kwargs, Op, Result
from shardwise.torch_private.tensors import schema_of

MATMUL, ATTENTION, MEMORY, LISTS = "matmul", "attention", "memory", "lists"
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}  # which arguments are multiplied
# These read of their first tensor no more than they give.
_LOOKS_UP = ("embedding", "index_select", "gather", "index", "nll_loss_forward", "_embedding_bag")
_OVERWRITES = ("copy_", "_foreach_copy_", "fill_", "zero_", "normal_", "uniform_")


@dataclass
class Kernel:
    """One op of the rank that is played.

    Attributes:
        name, dtype: Of the op, and of the numbers it works on.
        flops: Of matrix products, convolutions and attention.
        nbytes: Read and written.
        kind: "matmul", "attention" or "memory".
        line, module: Where in the program.
        phase: "forward", "backward", "recomputed" or "optimizer".
        key: How a table of measured times names it.
        grids, sizes: Names of grids of measured times that may have it, the best first, and where it is in them.
        tensors: How many tensors the lists have that it takes.
        distributed: Whether it is part of an op on distributed tensors.
        views, modules: How many views were made, and modules called, since the op before it.
        of_library: Whether it is the library's own, as a copy into a buffer by which gradients travel.
        begins_again: Whether it is the first one of a part that is recomputed.
    """

    name: str
    flops: int
    nbytes: int
    dtype: str
    kind: str
    line: str = ""
    module: str = ""
    phase: str = "forward"
    key: str = ""
    grids: tuple[str, ...] = ()
    sizes: tuple[int, ...] = field(default=())
    tensors: int = 0
    distributed: bool = False
    views: int = 0
    modules: int = 0
    of_library: bool = False
    begins_again: bool = False


def kernel_of(func: Op, args: Args, kwargs: Kwargs, out: Result, outs: Sequence[torch.Tensor]) -> Kernel:
    """What an op does that was called so. `outs` are the tensors that it makes or writes to."""
    name = func.overloadpacket.__name__
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
    floating = [x for x in (*tensors, *outs) if x.dtype.is_floating_point]
    dtype = str((floating or outs or tensors)[0].dtype).removeprefix("torch.")
    flops = _flops(func, args, kwargs, out)
    lists = sum(len(x) for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple)) and _are_tensors(x))
    nbytes = _read(name, args, tensors, outs) + sum(map(_touched, outs))
    kind = MEMORY
    sizes: tuple[int, ...] = (nbytes,)
    grids: tuple[str, ...] = (name, LISTS, MEMORY) if lists else (name, MEMORY)
    if flops:
        kind, grids, sizes = MATMUL, (f"{MATMUL} {dtype}",), _product_sizes(name, args)
    if "attention" in name:
        kind, (grids, sizes) = ATTENTION, _attention_place(func, name, args, kwargs, dtype)
    shapes = " ".join("x".join(map(str, x.shape)) for x in tensors[:3])
    return Kernel(
        name, flops, nbytes, dtype, kind, key=f"{name} {dtype} {shapes}", grids=grids, sizes=sizes, tensors=lists
    )


def _are_tensors(values: Sequence[Any]) -> bool:
    return bool(values) and isinstance(values[0], torch.Tensor)


def _read(name: str, args: Args, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> int:
    """Bytes that an op reads. (What it makes or writes to counts apart.)"""
    if name in _LOOKS_UP and tensors:
        return sum(map(_touched, tensors[1:])) + sum(map(_touched, outs))  # it reads as many rows as it gives
    written = args[0] if name in _OVERWRITES and args else None
    skipped = {id(x) for x in tree_iter(written) if isinstance(x, torch.Tensor)}
    return sum(_touched(x) for x in tensors if id(x) not in skipped)


def _touched(x: torch.Tensor) -> int:
    """Bytes of memory behind a tensor: an expanded one has each of them once."""
    n = x.itemsize
    for size, stride in zip(x.shape, x.stride(), strict=True):
        n *= size if stride or not size else 1
    return n


def _product_sizes(name: str, args: Args) -> tuple[int, ...]:
    """Rows, columns and inner size of a matrix product. Those of a batch are stacked, as one product of many rows."""
    if name not in PRODUCTS:
        return ()
    a, b = (args[i] for i in PRODUCTS[name])
    return max(a.shape[:-1].numel(), 1), max(b.shape[-1], 1), max(a.shape[-1], 1)


def _attention_place(
    func: Op, name: str, args: Args, kwargs: Kwargs, dtype: str
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Which grids may have an attention, and where: by heads (of all rows of the batch), length and width of a head."""
    said = {a.name: value for a, value in zip(schema_of(func).arguments, args, strict=False)} | kwargs
    q, k = said.get("query"), said.get("key")
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor) or q.dim() < 3:
        return (), ()
    way = " backward" if "backward" in name else ""
    length = round((max(q.shape[-2], 1) * max(k.shape[-2], 1)) ** 0.5)
    mask = " causal" if said.get("is_causal") else ""
    return (f"{ATTENTION}{way}{mask} {dtype}",), (max(q.shape[:-2].numel(), 1), length, q.shape[-1])


def _flops(func: Op, args: Args, kwargs: Kwargs, out: Result) -> int:
    """Floating-point operations of matrix products, convolutions and attention."""
    count: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
    name = func.overloadpacket.__name__
    if count is not None:
        return int(count(*args, **kwargs, out_val=out))
    if "scaled_dot_product" in name and "backward" not in name:
        return _attention_flops(args[0], args[1], args[2])
    if "scaled_dot_product" in name:
        return _attention_flops(args[1], args[2], args[3]) * 5 // 2  # five products of its sizes, two in the forward
    return 0


def _attention_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Two products, over all keys: what is hidden by a causal mask counts too, as it does in torch's own count."""
    rows = q.shape[:-1].numel()
    return 2 * rows * k.shape[-2] * (q.shape[-1] + v.shape[-1])
