"""Attributes and methods of the class, copies, comparisons, memory, backward passes: answered tile by tile, or by the
class itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.guard import Guard
from shardwise.comm.messages import along_group
from shardwise.comm.record import Note
from shardwise.sharded.autograd import call_hooks, hooks_called_later
from shardwise.sharded.groups import Group, communication_device, same_ranks
from shardwise.sharded.ops.registry import own
from shardwise.sharded.shard import cut
from shardwise.sharded.tensor import ShardedTensor, parts_of
from shardwise.torch_private.tensors import has_same_memory_kind, typed_storage

_T = torch.Tensor
_backward, _grad = torch.autograd.backward, torch.autograd.grad


# -- what the class answers itself ---------------------------------------------------------------------------------
def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)


for _name in (
    "__repr__ __deepcopy__ __reduce_ex__ __len__ backward requires_grad_ retain_grad register_hook detach_ dim numel "
    "size to cpu cuda is_pinned"
).split():
    own(getattr(_T, _name))(_method(_name))
own(_T.ndimension)(_method("dim"))
own(_T.nelement, torch.numel)(_method("numel"))
for _name in (
    "requires_grad grad grad_fn is_leaf retains_grad data _version device is_meta shape dtype layout ndim"
).split():
    own(getattr(_T, _name).__get__)(lambda self, _name=_name: getattr(self, _name))
for _name in ("requires_grad", "grad", "data"):
    own(getattr(_T, _name).__set__)(lambda self, value, _name=_name: setattr(self, _name, value))
own(has_same_memory_kind)(lambda *args: False)


@own(_T.__format__)
def format_(tensor: ShardedTensor, format_spec: str) -> str:
    value = tensor.item() if format_spec and tensor.dim() == 0 else repr(tensor)
    return format(value, format_spec)


own(_T.is_floating_point, torch.is_floating_point)(lambda tensor: tensor.dtype.is_floating_point)
own(_T.is_complex, torch.is_complex)(lambda tensor: tensor.dtype.is_complex)


# -- copies --------------------------------------------------------------------------------------------------------
@own(_T.detach, torch.detach)
def detach(tensor: ShardedTensor) -> ShardedTensor:
    return tensor._with_parts([part.detach() for part in tensor._parts])


@own(_T.clone, torch.clone)
def clone(tensor: ShardedTensor, *, memory_format: torch.memory_format = torch.preserve_format) -> ShardedTensor:
    if memory_format not in (torch.preserve_format, torch.contiguous_format):
        raise RuntimeError(
            f"Only support torch.preserve_format or torch.contiguous_format for cloning, got "
            f"memory_format={memory_format}"
        )
    return tensor._with_parts([part.clone(memory_format=memory_format) for part in tensor._parts])


@own(_T.copy_)
def copy_(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> ShardedTensor:
    """Write the values of another tensor of this size: sharded in any tiles, or plain and the same on all ranks."""
    if not isinstance(tensor, ShardedTensor):
        raise TypeError("copy_: a plain tensor cannot take a ShardedTensor's values; use gather(dst, out)")
    if isinstance(source, ShardedTensor):
        if source.size() != tensor.size():
            raise RuntimeError(f"copy_: sizes {list(tensor.size())} and {list(source.size())} differ")
        parts = source._in_tiles_of(tensor)._parts
    else:
        whole = source.expand(tensor.size())
        parts = [cut(whole, shard.box) for shard in tensor.local_shards()]
    for part, new in zip(tensor._parts, parts):
        part.copy_(new, non_blocking)
    return tensor


# -- the whole value -----------------------------------------------------------------------------------------------
def _whole(tensor: ShardedTensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.full_tensor()


for _name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__"):
    own(getattr(_T, _name))(lambda self, _name=_name: getattr(_whole(self), _name)())


@own(torch.equal, torch.Tensor.equal)
def equal(input: ShardedTensor, other: ShardedTensor) -> bool:
    """Whether two tensors have the same size and values, whatever their tiles; the same answer on every rank."""
    return _compare("equal", torch.equal, input, other)


@own(torch.allclose, torch.Tensor.allclose)
def allclose(
    input: ShardedTensor, other: ShardedTensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Whether two tensors of one size are close everywhere, whatever their tiles; the same answer on every rank."""
    return _compare("allclose", lambda a, b: torch.allclose(a, b, rtol, atol, equal_nan), input, other)


def _compare(
    name: str, compare: Callable[[torch.Tensor, torch.Tensor], bool], input: ShardedTensor, other: ShardedTensor
) -> bool:
    """Whether a comparison holds for all tiles of all ranks."""
    if not isinstance(input, ShardedTensor) or not isinstance(other, ShardedTensor):
        raise TypeError(f"Both arguments to torch.{name} need to be of type ShardedTensor")
    group = input._process_group
    if input.size() != other.size() or not same_ranks(group, other._process_group):
        return False
    with torch.no_grad():
        theirs = other._in_tiles_of(input, Note(name, "operands in different tiles"))._parts
        answer = all(compare(a, b) for a, b in zip(input._parts, theirs))
    return true_on_all_ranks(answer, group)


def true_on_all_ranks(answer: bool, group: Group) -> bool:
    """Whether an answer is true on every rank of a group; a collective."""
    flag = torch.tensor([int(answer)], device=communication_device(group))
    along = along_group(group, flag.device)
    with Guard(along, "all_reduce", f"tiles of {len(along.ranks)} ranks", "", Note("do all ranks say yes?")) as guard:
        guard.meet()
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


# -- memory --------------------------------------------------------------------------------------------------------
def _on_every_tile(name: str) -> Callable[..., ShardedTensor]:
    """A method that writes, or moves the memory of, each tile of this rank."""

    def write(tensor: ShardedTensor, *args: object) -> ShardedTensor:
        for part in tensor._parts:
            getattr(part, name)(*args)
        return tensor

    return write


own(_T.share_memory_)(_on_every_tile("share_memory_"))
own(_T.apply_)(_on_every_tile("apply_"))
own(_T.is_shared)(lambda tensor: all(part.is_shared() for part in tensor._parts))


@own(_T.untyped_storage, _T.storage, typed_storage)
def storage(tensor: ShardedTensor) -> None:
    raise RuntimeError(
        f"a ShardedTensor of size {list(tensor.size())} has no memory of its own: ask the tensors of local_shards(), "
        f"or gather it"
    )


own(_T.__dlpack__)(lambda tensor, **options: _whole(tensor).__dlpack__(**options))  # as `numpy()` does
own(_T.__dlpack_device__)(lambda tensor: torch.empty(0, device=tensor.device).__dlpack_device__())


# -- backward passes: from and to all tiles of a rank at once ------------------------------------------------------
def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _starts(tensors: Sequence[Any], given: object, what: str) -> tuple[list[Any], list[Any]]:
    """Return the plain tensors a backward pass starts from, and their gradients."""
    grads = [None] * len(tensors) if given is None else _listed(given)
    roots: list[Any] = []
    seeds: list[Any] = []
    for tensor, grad in zip(tensors, grads):
        if not isinstance(tensor, ShardedTensor):
            roots.append(tensor)
            seeds.append(grad)
            continue
        if grad is None and tensor.numel() != 1:
            raise RuntimeError(f"{what}: grad can be implicitly created only for scalar outputs")
        if grad is not None and not isinstance(grad, ShardedTensor):
            raise TypeError(f"{what}: the gradient of a ShardedTensor must be one too, got {type(grad).__name__}")
        roots += tensor._parts
        seeds += [torch.ones_like(p) for p in tensor._parts] if grad is None else grad._in_tiles_of(tensor)._parts
    return roots, seeds


@own(torch.autograd.backward)
def backward(
    tensors: object,
    grad_tensors: object = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: object = None,
    inputs: object = None,
) -> None:
    tensors = _listed(tensors)
    roots, seeds = _starts(tensors, grad_tensors, "backward")
    leaves = None if inputs is None else [p for x in _listed(inputs) for p in parts_of(x)]
    _backward(roots, seeds, retain_graph, create_graph, inputs=leaves)


@own(torch.autograd.grad)
def grad(outputs: object, inputs: Any, grad_outputs: object = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    outputs, inputs = _listed(outputs), _listed(inputs)
    roots, seeds = _starts(outputs, grad_outputs, "grad")
    with hooks_called_later():
        found = list(_grad(roots, [p for x in inputs for p in parts_of(x)], seeds, *args, **kwargs))
    create_graph = kwargs.get("create_graph", args[1] if len(args) > 1 else False)
    result: list[Any] = []
    for x in inputs:
        mine = [found.pop(0) for _ in parts_of(x)]
        if not isinstance(x, ShardedTensor):
            result += mine
        elif all(g is None for g in mine):
            result.append(None)
        else:
            with torch.set_grad_enabled(create_graph):
                result.append(x._with_parts(call_hooks(x, mine)))
    return tuple(result)
