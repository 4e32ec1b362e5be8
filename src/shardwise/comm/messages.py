"""An exchange of flat buffers among some ranks, which is begun and later waited for.

Where the ranks have a process group it is one all-to-all. Ranks along several axes of a mesh that is not the whole
world have none, and all ranks of the world would have to help make one, so they send to each other directly. On gloo,
ranks always send directly: if the programs of ranks differ, gloo's all-to-all mixes their values or ends the process.
"""

from __future__ import annotations

import math
import time
import weakref
from atexit import register as at_exit
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch
import torch.distributed as dist

from shardwise.comm.calls import Clock, Group, entered
from shardwise.comm.gloo_loops import keep_loops_from_preempting

# torch 2.13 has new names for these two
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
# of our messages outside of a collective, so that messages of the program on the same group are not mistaken for them
_TAG = 0x5DA7
_TAGS = 0x3FFFFFFF
Ends = Sequence[tuple[int, torch.Tensor]]  # numbers of peers, and what goes to or comes from each


class Work(Protocol):
    """An operation that was begun and can be waited for."""

    def wait(self) -> Any: ...


class Along(NamedTuple):
    """The participants of an exchange, in the order of their group; without a group, in the order of their global
    ranks."""

    peers: tuple[Any, ...]  # who they are: coordinates on a mesh, or global ranks
    ranks: tuple[int, ...]
    group: Group | None
    backend: str
    in_order: bool = True  # whether ranks ascend with coordinates
    clock: Clock | None = None  # counts their exchanges
    digest: int = 0  # depends on the order: meshes with the same ranks in another order have another one


def world_of(ranks: Sequence[int], like: Group | None = None) -> Group | None:
    """The world's group, if these are all its ranks (and its backend is that of the group `like`); else None."""
    world = dist.group.WORLD
    same = like is None or dist.get_backend(like) == dist.get_backend(world)
    return world if same and len(ranks) == dist.get_world_size() else None


def backend_for(group: Group, device: torch.device) -> str:
    """The backend that carries tensors of a device: a group may have one for each kind."""
    if device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(group):
        return "gloo"
    found = dist.get_backend(group)
    return f"{found} on {device.type}" if found == "gloo" else found


on_new_clock: list[Callable[[], object]] = []  # called when some ranks communicate for the first time
clocks: dict[tuple[str, tuple[int, ...]], Clock] = {}
_world: list[Any] = [lambda: None]  # a weak reference to the default group that the clocks belong to


def clock_of(group: Group, ranks: tuple[int, ...]) -> Clock:
    """The clock of these ranks in a group (None: the world's). New groups of a new world start at zero."""
    world = dist.group.WORLD
    if _world[0]() is not world:
        _world[0] = weakref.ref(world)
        clocks.clear()
    key = (getattr(world if group is None else group, "group_name", ""), ranks)
    found = clocks.get(key)
    if found is None:
        keep_loops_from_preempting()  # also of a group that was made after the others
        for do in on_new_clock:
            do()
        found = clocks[key] = Clock(f"{key[0]} {crc32(repr(ranks).encode())}")  # the same on all its ranks
    return found


def along_group(group: Group, device: torch.device) -> Along:
    """All ranks of a group, for tensors of a device."""
    ranks = tuple(dist.get_process_group_ranks(group))
    return Along(ranks, ranks, group, backend_for(group, device), clock=clock_of(group, ranks))


def along_ranks(ranks: Sequence[int], device: torch.device) -> Along:
    """Some ranks of the world, for tensors of a device."""
    ranks, group = tuple(ranks), world_of(ranks)
    return Along(ranks, ranks, group, backend_for(dist.group.WORLD, device), clock=clock_of(group, ranks))


def start_swap(
    received: torch.Tensor, sizes: Sequence[int], packed: torch.Tensor, counts: Sequence[int], along: Along
) -> Work:
    """Begin to send `packed`, cut into `counts`, to the peers, and to fill `received`, cut into `sizes`, from them."""
    if along.group is not None and along.backend != "gloo":
        return dist.all_to_all_single(received, packed, list(sizes), list(counts), group=along.group, async_op=True)
    into, out = list(enumerate(received.split(list(sizes)))), list(enumerate(packed.split(list(counts))))
    if dist.get_rank() in along.ranks:
        me = along.ranks.index(dist.get_rank())
        mine, own = into.pop(me)[1], out.pop(me)[1]
        if mine.numel():
            mine.copy_(own)
    return start_sends(out, into, along)


def start_sends(out: Ends, into: Ends, along: Along) -> Work:
    """Begin to send to peers and to receive from them. Both sides must list each other in the same order."""
    group: Group = dist.group.WORLD if along.group is None else along.group
    if _abandoned:
        _wait_for_abandoned(group)
    out, into = ([(peer, x) for peer, x in ends if x.numel()] for ends in (out, into))
    if along.backend == "gloo":  # calls the group directly: torch's wrapper takes longer than a small message
        number = along.ranks if along.group is None else range(len(along.ranks))
        guard = entered.get(get_ident())
        tag = _TAG if guard is None else guard.tag
        # a message of another exchange, or of another size, has another tag: it is never taken for this one
        works = [group.recv([x], number[peer], tag + x.nbytes & _TAGS) for peer, x in into]
        works += [group.send([x], number[peer], tag + x.nbytes & _TAGS) for peer, x in out]
        return _All(works, group)
    requests = [dist.P2POp(dist.isend, x, along.ranks[peer], along.group, _TAG) for peer, x in out]
    requests += [dist.P2POp(dist.irecv, x, along.ranks[peer], along.group, _TAG) for peer, x in into]
    return _All(dist.batch_isend_irecv(requests) if requests else [], group)


class _All:
    """Several operations as one. If they are dropped without a wait, they are kept until the group sends again, because
    a message that was never received would be mistaken for the next one."""

    def __init__(self, works: Sequence[Work], group: Group) -> None:
        self.works, self.group = list(works), group

    def wait(self) -> None:
        works, self.works = self.works, []
        for work in works:
            work.wait()

    def __del__(self) -> None:
        if self.works:
            _abandoned.append((self.group, self.works))


# a deque, since finalizers run in any thread and its operations are atomic
_abandoned: deque[tuple[Group, list[Work]]] = deque()
_unfinished: set[Any] = set()  # collectives that were begun for later, until somebody waits for them
_EXIT_SECONDS = 2.0


def begun(work: Work | None) -> None:
    """Note a collective that may not be waited for before the process ends."""
    for old in [old for old in _unfinished if old.is_completed()]:
        _unfinished.discard(old)
    if work is not None and not isinstance(work, _All):
        _unfinished.add(work)


def waited_for(work: Work | None) -> None:
    """Forget it."""
    _unfinished.discard(work)


@at_exit
def _let_finish() -> None:
    """Before the process ends, wait a little for operations under way, then release the groups. A thread of the backend
    needs the interpreter to release a tensor: if that is gone, the process aborts."""
    deadline = time.monotonic() + _EXIT_SECONDS
    pending = bool(_unfinished)
    while not all(work.is_completed() for work in _unfinished) and time.monotonic() < deadline:
        time.sleep(0.001)
    _unfinished.clear()
    _abandoned.clear()
    if pending:
        time.sleep(0.02)  # an operation counts as complete a moment before its thread releases the tensor


def _wait_for_abandoned(group: Group) -> None:
    for _ in range(len(_abandoned)):
        owner, works = _abandoned.popleft()
        if owner is not group:
            _abandoned.append((owner, works))
            continue
        for work in works:
            work.wait()


# -- tensors as backends carry them: flat, of a dtype that every backend knows -------------------------------
WIRE = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8, torch.float16, torch.bfloat16}


def width(dtype: torch.dtype) -> int:
    """How many elements of the sent dtype one element takes (bytes for a dtype that no backend carries)."""
    return 1 if dtype in WIRE else dtype.itemsize


def as_wire(x: torch.Tensor) -> torch.Tensor:
    """A flat tensor of a dtype that every backend carries. It shares the memory of `x` if that is contiguous."""
    if x.dtype in WIRE and x.is_contiguous() and not x.is_neg():
        return x if x.dim() == 1 else x.view(-1)
    flat = x.resolve_conj().resolve_neg().contiguous().view(-1)
    if x.dtype in WIRE:
        return flat
    return as_bytes(flat)


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous flat tensor as bytes. A tensor of one element may have any stride, but a view as bytes
    needs stride 1."""
    return (flat.as_strided(flat.shape, (1,)) if flat.numel() <= 1 else flat).view(torch.uint8)


def from_wire(wire: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if not wire.numel():  # empty, possibly at an offset that a view of another dtype refuses
        return wire.new_empty(shape, dtype=dtype)
    return (wire if wire.dtype == dtype else wire.contiguous().view(dtype)).view(shape)


def numel(shape: Sequence[int]) -> int:
    return math.prod(shape)
