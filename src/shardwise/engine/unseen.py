"""Writes through ``.data``: autograd does not see them, and computes gradients with the values that it finds then. A
call that moved an operand keeps the moved copy, which has the old values. So before its gradient is computed, what was
written since is moved again, into the copy. A program of several ops keeps whatever it made of its operands; there the
backward pass raises if the values are not those from before (gradcheck writes, and writes back).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from shardwise.protocols import LocalValue
from shardwise.torch_private.autograd import keeps_graph
from shardwise.wrapper import Wrapper, origin_of, wrap

Again = Callable[[LocalValue], LocalValue]  # moves the local value of an operand as its call did


class _Seen:
    """A tensor at one moment, and how often its memory had been written unseen."""

    def __init__(self, name: str, tensor: Wrapper) -> None:
        memory = origin_of(tensor).memory
        self.name, self.layout, self.writes = name, tensor._layout, memory.unseen_writes
        self.tensor, self.memory = weakref.ref(tensor), weakref.ref(memory)

    @property
    def is_written(self) -> bool:
        tensor, memory = self.tensor(), self.memory()
        replaced = tensor is not None and origin_of(tensor).memory is not memory
        return replaced or (memory is not None and memory.unseen_writes != self.writes)

    def now(self) -> Wrapper:
        """The tensor as it is; raises if it is another one by now."""
        tensor = self.tensor()
        if tensor is None or tensor._layout is not self.layout:
            raise RuntimeError(self.refusal)
        return tensor

    @property
    def refusal(self) -> str:
        return (
            f"a tensor of shape {self.layout.shape} that {self.name} took was written through .data since. Plain torch "
            f"computes the gradient with the new values; on this layout {self.name} kept what it made of the old ones. "
            f"Write through .data before {self.name} or after the backward pass, or to a clone()"
        )


class TakenAgain:
    """Called before the gradient of a call is computed that keeps the moved copy of an operand."""

    def __init__(self, name: str, tensor: Wrapper, moved: LocalValue, again: Again) -> None:
        self.seen, self.again = _Seen(name, tensor), again
        self.moved = [weakref.ref(value) for value in tensor._layout.mesh.comm.values(moved)]  # weakly: autograd's own

    def __call__(self, _: object) -> None:
        if not self.seen.is_written:
            return
        tensor = self.seen.now()
        comm = tensor._layout.mesh.comm
        with torch.no_grad():
            fresh = comm.values(self.again(tensor._local))
            for kept, value in zip((ref() for ref in self.moved), fresh, strict=True):
                if kept is not None:
                    kept.data.copy_(value)
        self.seen = _Seen(self.seen.name, tensor)


class Unchanged:
    """Called before the gradient of a program is computed whose operand plain torch keeps. What the operand was is
    remembered only while somebody may write to it unseen."""

    def __init__(self, name: str, tensor: Wrapper) -> None:
        self.seen, self.is_done = _Seen(name, tensor), False
        self.before: Wrapper | None = None
        memory = origin_of(tensor).memory
        if memory.watchers is None:
            memory.watchers = weakref.WeakKeyDictionary()
        memory.watchers[self] = Unchanged.remember
        if memory.is_handed_out:
            self.remember()

    def remember(self) -> None:
        """Keep the values: somebody is given what can be written to."""
        tensor = self.seen.tensor()
        if self.before is None and tensor is not None and not self.seen.is_written:
            comm, local = tensor._layout.mesh.comm, tensor._local
            with torch.no_grad():
                values = [value.detach().clone() for value in comm.values(local)]
                self.before = wrap(comm.rebuild(local, values), tensor._layout)

    def __call__(self, _: object) -> None:
        if self.is_done:  # by the node of another simulated rank
            return
        if self.seen.is_written and not self.seen.layout.mesh.comm.outlined:
            now, before = self.seen.now().detach(), self.before
            with torch.no_grad():
                if before is None or not bool((now.eq(before) | (now.ne(now) & before.ne(before))).all()):
                    raise RuntimeError(self.seen.refusal)
        memory = self.seen.memory()
        if memory is not None and memory.watchers is not None and not keeps_graph():
            memory.watchers.pop(self, None)
            self.is_done, self.before = True, None
