"""Calls that read what they have just written: ``x.sub_(x[:, :1])``, ``x.masked_scatter_(mask, x)``. Torch's result
then depends on where the tensors are in memory and on the order in which kernels go through them. The ranks' tensors
are stored differently, so torch itself runs on the whole tensors, stored as in plain torch, to get the values. The
graph is that of the plan: torch's own gradients ignore the overlap, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils._pytree import tree_map_only

from shardwise.comm.capturing import tape_here, tapes
from shardwise.context import is_strict, running
from shardwise.engine.aliasing import memory_of
from shardwise.engine.call_shape import tensors_in
from shardwise.engine.into_out import out_names
from shardwise.errors import RuleError, StrictError
from shardwise.functions import is_pointwise, is_random, writes_first, written
from shardwise.wrapper import Wrapper

Args = Sequence[object]
Kwargs = dict[str, object]

LARGEST = 2**26  # bytes of memory for which torch is asked whether it reads what it writes


class Lying:
    """The tensors of a call as plain tensors that are stored as the whole tensors would be in plain torch."""

    def __init__(self, args: Args, kwargs: Kwargs) -> None:
        self.args, self.kwargs = args, kwargs
        self.tensors: list[Wrapper] = list({id(t): t for _, t in tensors_in(args, kwargs)}.values())
        self.sizes: dict[tuple[int, int], int] = {}  # bytes of each memory
        for tensor in self.tensors:
            memory = memory_of(tensor)
            self.sizes[memory] = max(self.sizes.get(memory, 0), _end(tensor) * tensor.dtype.itemsize)

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    def rooms(self, device: torch.device | str = "cpu") -> dict[tuple[int, int], torch.Tensor]:
        """New memory in the place of each storage that the tensors use."""
        return {memory: torch.zeros(size, dtype=torch.uint8, device=device) for memory, size in self.sizes.items()}

    def in_rooms(self, rooms: dict[tuple[int, int], torch.Tensor]) -> dict[int, torch.Tensor]:
        """A plain tensor for each tensor, by its id."""
        return {id(t): _put(t, rooms[memory_of(t)]) for t in self.tensors}

    def call_with(self, plain: dict[int, torch.Tensor] | None = None) -> tuple[list[object], Kwargs]:
        """The arguments of the call with plain tensors: the given ones, or zeros."""
        plain = self.in_rooms(self.rooms()) if plain is None else plain
        found: tuple[list[object], Kwargs] = tree_map_only(
            Wrapper, lambda t: plain[id(t)], (list(self.args), self.kwargs)
        )
        return found


def reads_what_it_writes(func: Callable[..., object], lying: Lying) -> bool:
    """Whether torch's result may depend on reading what it has just written. False for calls that draw random numbers:
    there, the plan decides."""
    targets = _written(func, lying)
    rooms = lying.rooms()
    plain = lying.in_rooms(rooms)
    for target in targets:
        plain[id(target)].fill_(1)
    shared = {memory_of(target) for target in targets}
    beside = [t for t in lying.tensors if memory_of(t) in shared]
    repeated = {id(t) for _, t in tensors_in(lying.args, lying.kwargs)}
    count = sum(1 for _ in tensors_in(lying.args, lying.kwargs))
    written_to = {id(target) for target in targets}
    met = [t for t in beside if id(t) not in written_to and bool(plain[id(t)].any())]
    crossing = _overlap_each_other(plain, targets)
    if not met and count == len(repeated) and not crossing:
        return False
    if _draws(func, lying):
        return False
    places = {_place(target) for target in targets}
    alike = not crossing and all(_place(t) in places for t in met)
    indices = [t for t in lying.tensors if memory_of(t) not in shared and _may_be_index(t)]
    return not alike or bool(indices) or _differs(func, lying)


def may_read_what_it_writes(func: Callable[..., object], lying: Lying) -> bool:
    """The same for tensors that are too large to try it with torch: decided from the places of their elements. Tensors
    that may share elements count as sharing them, since running the call in one memory is always right."""
    targets = _written(func, lying)
    others = [t for t in lying.tensors if all(t is not target for target in targets)]
    met = [t for t in others if any(_may_meet(t, target) for target in targets)]
    crossing = any(_may_meet(a, b) for i, a in enumerate(targets) for b in targets[i + 1 :])
    shared = {memory_of(target) for target in targets}
    count, places = sum(1 for _ in tensors_in(lying.args, lying.kwargs)), {_place(target) for target in targets}
    if (not met and count == len(lying.tensors) and not crossing) or is_random(func):
        return False
    alike = not crossing and all(_place(t) in places for t in met)
    indices = any(memory_of(t) not in shared and _may_be_index(t) for t in lying.tensors)
    return not alike or indices or not _is_elementwise(func, lying)


def _may_meet(one: Wrapper, other: Wrapper) -> bool:
    """Whether two tensors may have elements in common. Tensors of equal strides are boxes of the same grid: they have
    none if the boxes are disjoint along one of its dims."""
    if memory_of(one) != memory_of(other) or not one.numel() or not other.numel():
        return False
    if one._offset >= _end(other) or other._offset >= _end(one):
        return False
    boxes = _box(one), _box(other)
    if None in boxes or [step for step, *_ in boxes[0] or ()] != [step for step, *_ in boxes[1] or ()]:
        return True
    pairs = zip(boxes[0] or (), boxes[1] or (), strict=True)
    return all(a < end_b and b < end_a for (_, a, end_a), (_, b, end_b) in pairs)


def _box(tensor: Wrapper) -> list[tuple[int, int, int]] | None:
    """The tensor as a box of a grid: for each stride, from the largest to the smallest, the first index and the end
    index. None if its elements are no such box."""
    sizes = zip(tensor._layout.stride, tensor._layout.shape, strict=True)
    found, room, rest = [], 0, tensor._offset
    for step, size in sorted(((s, n) for s, n in sizes if n > 1), reverse=True):
        if not step or (room and room % step):
            return None
        start, rest = divmod(rest, step)
        if room and start + size > room // step:
            return None
        found.append((step, start, start + size))
        room = step
    if rest + 1 > max(room, 1):
        return None
    return [*found, (0, rest, rest + 1)]


def _is_elementwise(func: Callable[..., object], lying: Lying) -> bool:
    """Whether each element of the result depends only on the elements at its own place, according to torch's tags."""
    return all(t._layout.shape == lying.tensors[0]._layout.shape for t in lying.tensors) and is_pointwise(func)


def _may_be_index(tensor: Wrapper) -> bool:
    """Whether a tensor may be indices, or a mask: which elements are read then depends on its values."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _overlap_each_other(plain: dict[int, torch.Tensor], targets: Sequence[Wrapper]) -> bool:
    """Whether two tensors that are written have elements in common."""
    for target in targets:
        plain[id(target)].fill_(0)
    for target in targets:
        if bool(plain[id(target)].any()):
            return True
        plain[id(target)].fill_(1)
    return False


def _draws(func: Callable[..., object], lying: Lying) -> bool:
    before = torch.get_rng_state()
    args, kwargs = lying.call_with()
    func(*args, **kwargs)
    return not torch.equal(before, torch.get_rng_state())


def _differs(func: Callable[..., object], lying: Lying) -> bool:
    """Whether torch's result differs between tensors that share memory and separate ones; tried with random numbers."""
    plain = lying.in_rooms(lying.rooms())
    noise = torch.Generator().manual_seed(0)
    for tensor in plain.values():
        drawn = torch.rand(tensor.shape, generator=noise)
        _write(tensor, drawn > 0.5 if tensor.dtype is torch.bool else drawn * 100)
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, lying.call_with(plain))
    func(*args, **kwargs)
    separate = [t.clone() for t in _targets(func, args, kwargs)]
    args, kwargs = lying.call_with(plain)
    func(*args, **kwargs)
    return not all(map(_same, separate, _targets(func, args, kwargs)))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(torch.eq(one, other).logical_or(one.ne(one) & other.ne(other)).all())


def as_in_one_memory(func: Callable[..., object], name: str, args: Args, kwargs: Kwargs) -> Callable[[], None]:
    """Run a call as torch does, on whole tensors in one memory. Returns a function that writes the results into the
    tensors that the call writes to; it must be called after the plan."""
    if is_strict():
        raise StrictError(
            f"{name} reads what it writes: a tensor that shares memory with its target. On these layouts that takes "
            f"communication, which strict() forbids; read from a .clone()"
        )
    if tapes and (tape := tape_here()) is not None:
        tape.refuse(f"{name} reads what it writes")
    lying = Lying(args, kwargs)
    with torch.no_grad():
        whole = {id(t): t.detach().full_tensor() for t in lying.tensors}  # type: ignore[attr-defined]
        if any(type(value) is not torch.Tensor for value in whole.values()):
            raise RuleError(
                f"{name} reads what it writes, and each group of this mesh would write something else; read from a "
                f".clone(), or call it on to_local()"
            )
        device = next(iter(whole.values())).device
        plain = lying.in_rooms(lying.rooms(device))
        for key, value in whole.items():
            _write(plain[key], value)
        plain_args, plain_kwargs = lying.call_with(plain)
        func(*plain_args, **plain_kwargs)

    def write() -> None:
        with torch.no_grad():
            for target in _written(func, lying):
                target.copy_(plain[id(target)])

    return write


def called_on_clones(func: Callable[..., object], name: str, args: Args, kwargs: Kwargs) -> object:
    """Run the call with clones of the tensors that are read and share memory with a written one. A rank's tensors may
    overlap where the whole ones do not, and torch would refuse that rank's call."""
    outs = set(out_names(func))
    memory = {memory_of(t) for t in _targets(func, args, kwargs) if isinstance(t, Wrapper)}
    apart = lambda t: t.clone() if memory_of(t) in memory else t  # noqa: E731
    first = 1 if writes_first(func) else 0
    read_args = [*args[:first], *tree_map_only(Wrapper, apart, list(args[first:]))]
    read_kwargs = {k: v if k in outs else tree_map_only(Wrapper, apart, v) for k, v in kwargs.items()}
    with running(name):  # in which overlap is not checked again
        return func(*read_args, **read_kwargs)


def _written(func: Callable[..., object], lying: Lying) -> list[Wrapper]:
    found = [t for t in _targets(func, lying.args, lying.kwargs) if isinstance(t, Wrapper)]
    return list({id(t): t for t in found}.values())


def _targets(func: Callable[..., object], args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    return [tensor for _, tensor in written(func, args, kwargs)]


def _place(tensor: Wrapper) -> tuple[object, ...]:
    return memory_of(tensor), tensor._offset, tensor._layout.shape, tensor._layout.stride, tensor.dtype


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write into a plain tensor, of which several elements may be at one place in memory."""
    for dim in reversed(range(tensor.dim())):
        if tensor.stride(dim) == 0 and tensor.shape[dim]:
            tensor, value = tensor.select(dim, 0), value.select(dim, 0)
    places = torch.zeros(tensor.shape, dtype=torch.int64, device=tensor.device)
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = torch.arange(size, device=tensor.device) * step
        places += steps.view([-1 if d == dim else 1 for d in range(tensor.dim())])
    reach = int(places.max()) + 1 if tensor.numel() else 0
    tensor.as_strided((reach,), (1,))[places] = value.to(tensor.dtype)


def _put(tensor: Wrapper, room: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device=room.device)
    stored = empty.set_(room.untyped_storage(), tensor._offset, tensor._layout.shape, tensor._layout.stride)
    conjugate, negative = lazy_bits(tensor)
    stored = stored.conj() if conjugate else stored
    return torch.ops.aten._neg_view(stored) if negative else stored


def lazy_bits(tensor: Wrapper) -> tuple[bool, bool]:
    """Whether the memory has the conjugates, and the negatives, of the tensor's elements: torch's kernels that do not
    know such tensors copy them first."""
    first = tensor._layout.mesh.comm.first(tensor._local)
    return first.is_conj(), first.is_neg()


def _end(tensor: Wrapper) -> int:
    """The end of the tensor's elements in the memory that plain torch would use."""
    layout = tensor._layout
    reach = sum((n - 1) * step for n, step in zip(layout.shape, layout.stride, strict=True))
    return tensor._offset + reach + 1 if all(layout.shape) else 0
