"""A backend that stands for one rank of a mesh of any size, without values and without communication.

Its local values are tensors without values (`without_values.py`). A collective makes the tensors that it would make on
a rank, buffers included, and reports itself to the watcher. The ledger gets the same entries as on ranks that are
processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

from shardwise.comm.base import Coords
from shardwise.comm.process_group import PlainComm
from shardwise.comm.record import Note, of_thread, record
from shardwise.comm.without_values import Absent, assumed_number
from shardwise.protocols import Result
from shardwise.torch_private.tensors import FakeTensor

_SIZES_BYTES = 18 * 8  # what ranks tell each other of a tensor's dtype and shape


@dataclass
class Passage:
    """One communication of this rank.

    Attributes:
        kind, axes, sizes: The collective, the names of the axes that it crosses, and how many ranks each has.
        strides: How far apart in number the ranks of each axis are.
        received: Bytes that the rank receives.
        note: On whose behalf; None where that is not known.
    """

    kind: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    received: int
    note: Note | None = None
    waited: bool = field(default=False, compare=False)


class Watcher:
    """Receives the communications in the order of the program, and what is allocated for them."""

    def begin(self, passage: Passage) -> None: ...

    def wait(self, passage: Passage) -> None: ...

    @contextmanager
    def allocating(self, what: str) -> Iterator[None]:
        """The context in which `what` is allocated: "buffer" or "result"."""
        yield


watchers: list[Watcher] = []


@contextmanager
def _allocating(what: str) -> Iterator[None]:
    if not watchers:
        yield
        return
    with watchers[-1].allocating(what):
        yield


class OutlineComm(PlainComm):
    """The rank at `coords` of a mesh without values.

    Args:
        shape, axis_names: Of the mesh.
        coords: Where the rank stands that is played.
        rank: Its number.
        strides: How far apart in number the ranks of each axis are.
        mode: In which its tensors are made.
    """

    outlined = True

    def __init__(
        self,
        shape: tuple[int, ...],
        axis_names: tuple[str, ...],
        coords: Coords,
        rank: int,
        strides: tuple[int, ...],
        mode: Absent,
    ) -> None:
        self.shape, self.axis_names, self.coords, self.rank, self.mode = shape, axis_names, coords, rank, mode
        self.strides = strides

    def making(self) -> Absent:
        return self.mode

    def coords_here(self) -> Sequence[Coords]:
        return (self.coords,)

    def per_rank(self, of: Callable[[Coords], Any]) -> Result:
        return of(self.coords)

    def bind(self, func: Callable[..., Any], axes: Sequence[int] = ()) -> Callable[..., Any]:
        mode = self.mode

        @wraps(func, updated=())
        def without_values(*args: object, **kwargs: object) -> Result:
            mode.calls += 1
            try:
                with mode:
                    return func(*args, **kwargs)
            finally:
                mode.calls -= 1

        return without_values

    def each(
        self, func: Callable[[torch.Tensor, Coords], torch.Tensor], local: torch.Tensor, axes: Sequence[int]
    ) -> torch.Tensor:
        with self.mode:
            return func(local, self.coords)

    def shared(self, value: torch.Tensor) -> torch.Tensor:
        return self.mode.enter(value)

    def adopt(self, local: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        return self.mode.enter(local)

    def at(self, local: torch.Tensor, coords: Coords) -> torch.Tensor:
        return local

    def to_program(self, value: torch.Tensor) -> torch.Tensor:
        return assumed_number(self.mode, value) if isinstance(value, FakeTensor) else value

    def all_kinds(self, local: torch.Tensor) -> dict[Coords, tuple[str, tuple[int, ...]]]:
        """Those of this rank only: the others are assumed to hold the same (`sizes.py`)."""
        rows = 1
        for axis in reversed(range(len(self.shape))):
            if self.shape[axis] > 1:
                record(
                    self, "all_gather", axis, (self.shape[axis] - 1) * rows * _SIZES_BYTES, Note("from_local", "sizes")
                )
            rows *= self.shape[axis]
        return {self.coords: (str(local.dtype), tuple(local.shape))}

    # -- communication ------------------------------------------------------------------------------------------
    def passage(self, kind: str, axes: Sequence[int], received: int, note: Note | None = None) -> Passage:
        """Report a communication that begins now."""
        names, sizes = tuple(self.axis_names[a] for a in axes), tuple(self.shape[a] for a in axes)
        made = Passage(kind, names, sizes, tuple(self.strides[a] for a in axes), received, note or of_thread.note)
        for watcher in watchers:
            watcher.begin(made)
        return made

    def waited(self, passage: Passage) -> None:
        """Report that the program waits for a communication."""
        if not passage.waited:
            passage.waited = True
            for watcher in watchers:
                watcher.wait(passage)

    def _made(
        self, like: torch.Tensor, shape: Sequence[int], what: str = "result", zeros: bool = False
    ) -> torch.Tensor:
        with _allocating(what), self.mode:
            return like.new_zeros(shape) if zeros else like.new_empty(shape)

    def exchange(
        self,
        local: torch.Tensor,
        kind: str,
        axes: Sequence[int],
        received: int,
        shape: Sequence[int],
        buffer_bytes: int = 0,
        zeros: bool = False,
    ) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        """Begin an exchange. Returns the tensor of `shape` that it makes, and the function that waits for it and frees
        its buffers."""
        local = self.mode.enter(local).detach()
        out = self._made(local, shape, zeros=zeros)
        length = -(-buffer_bytes // max(local.itemsize, 1))
        buffers = [self._made(local, (length,), "buffer")] if length else []
        passage = self.passage(kind, axes, received)

        def finish() -> torch.Tensor:
            self.waited(passage)
            buffers.clear()
            return out

        return out, finish

    def _reduced_bytes(self, local: torch.Tensor, axes: Sequence[int]) -> int:
        ranks = math.prod(self.shape[a] for a in axes)
        return 2 * (ranks - 1) * local.nbytes // ranks

    def all_reduce(self, local: torch.Tensor, axes: Sequence[int], reduce_op: str) -> torch.Tensor:
        return self.exchange(local, "all_reduce", axes, self._reduced_bytes(local, axes), tuple(local.shape))[1]()

    def start_all_reduce(
        self, local: torch.Tensor, axes: Sequence[int], reduce_op: str, owned: bool
    ) -> tuple[torch.Tensor, Callable[[], Any]] | None:
        if not owned or not local.is_contiguous():
            return self.exchange(local, "all_reduce", axes, self._reduced_bytes(local, axes), tuple(local.shape))
        passage = self.passage("all_reduce", axes, self._reduced_bytes(local, axes))

        def finish() -> torch.Tensor:
            self.waited(passage)
            return local

        return local, finish

    def stack(self, local: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        ranks = math.prod(self.shape[a] for a in axes)
        received = (ranks - 1) * local.nbytes
        return self.exchange(local, "all_gather", axes, received, (ranks, *local.shape))[1]()

    def first_of_replicas(self, local: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        for axis in axes:
            if self.shape[axis] > 1:
                self.broadcast(local, axis, 0)
        return local

    def broadcast(self, local: torch.Tensor, axis: int, source: int) -> torch.Tensor:
        """What the coordinate `source` holds."""
        received, note = 0 if self.coords[axis] == source else local.nbytes, Note("broadcast")
        record(self, "broadcast", axis, received, note)
        self.waited(self.passage("broadcast", (axis,), received, note))
        with torch.no_grad(), self.mode:
            return self.mode.enter(local).detach().clone(memory_format=torch.contiguous_format)

    def scatter(
        self,
        cut: Callable[[int], torch.Tensor],
        shapes: Sequence[tuple[int, ...]],
        axis: int,
        source: int,
        like: torch.Tensor,
    ) -> torch.Tensor:
        """This rank's part of what the coordinate `source` holds."""
        me, note = self.coords[axis], Note("distribute_tensor")
        received = 0 if me == source else math.prod(shapes[me]) * like.itemsize
        record(self, "scatter", axis, received, note)
        self.waited(self.passage("scatter", (axis,), received, note))
        return self._made(like, shapes[me])


class Work:
    """What a collective called by a script returns: it can be waited for."""

    def __init__(self, comm: OutlineComm, passage: Passage | None) -> None:
        self._comm, self._passage = comm, passage

    def wait(self, timeout: object = None) -> bool:
        if self._passage is not None:
            self._comm.waited(self._passage)
        return True

    def is_completed(self) -> bool:
        return True
