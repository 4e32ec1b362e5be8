"""Writes through ``.data``: autograd does not see them, and computes gradients with the values that it finds then. A
call that moved an operand keeps the moved copy, which has the old values. So before its gradient is computed, what was
written since is moved again, into the copy. A program of several ops keeps whatever it made of its operands; there the
backward pass raises if the values are not those from before (gradcheck writes, and writes back). It raises in any case
if the program wrote into the local tensor of ``.data``: other ranks may have written nothing, and would move nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from shardwise.engine.aliasing import COPIES
from shardwise.engine.local_copies import source_of_local_copy
from shardwise.protocols import LocalValue
from shardwise.torch_private.autograd import keeps_graph
from shardwise.torch_private.tensors import storage_id
from shardwise.wrapper import Wrapper, origin_of, wrap

Again = Callable[[LocalValue], LocalValue]  # moves the local value of an operand as its call did


class _Seen:
    """A tensor at one moment, and how often its memory had been written unseen."""

    def __init__(self, name: str, tensor: Wrapper) -> None:
        memory = origin_of(tensor).memory
        self.name, self.layout, self.writes = name, tensor._layout, memory.unseen_writes
        self.lent_writes = memory.lent_writes
        self.tensor, self.memory = weakref.ref(tensor), weakref.ref(memory)

    @property
    def is_written(self) -> bool:
        """Whether it was written unseen; raises if that was by this process alone."""
        tensor, memory = self.tensor(), self.memory()
        if memory is not None and memory.lent_writes != self.lent_writes:
            raise RuntimeError(self.refusal)
        replaced = tensor is not None and origin_of(tensor).memory is not memory
        return replaced or (memory is not None and memory.unseen_writes != self.writes)

    def now(self) -> Wrapper:
        """The tensor as it is; raises if it is gone, or another one by now."""
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
    """Called before the gradient of a call is computed that keeps the moved copy of an operand. The operand may be gone
    by then, as `w.t()` is: its memory keeps what the ranks have of it, unless they had copied it."""

    def __init__(self, name: str, tensor: Wrapper, moved: LocalValue, again: Again) -> None:
        self.seen, self.again, comm = _Seen(name, tensor), again, tensor._layout.mesh.comm
        self.moved = [weakref.ref(value) for value in comm.values(moved)]  # weakly: autograd's own
        values = comm.values(tensor._local)
        if values[0]._base is not None and not any(map(_is_copy, values)):
            memory = origin_of(tensor).memory
            if memory.taken is None:
                memory.taken = weakref.WeakKeyDictionary()
            memory.taken[self] = comm.rebuild(tensor._local, [value.detach() for value in values])

    def __call__(self, _: object) -> None:
        if not self.seen.is_written:
            return
        memory, tensor, comm = self.seen.memory(), self.seen.tensor(), self.seen.layout.mesh.comm
        taken = None if tensor is not None or memory is None or memory.taken is None else memory.taken.get(self)
        local = self.seen.now()._local if taken is None else taken
        with torch.no_grad():
            fresh = comm.values(self.again(local))
            for kept, value in zip((ref() for ref in self.moved), fresh, strict=True):
                if kept is not None:
                    kept.data.copy_(value)
        if memory is not None:
            self.seen.writes = memory.unseen_writes


def _is_copy(view: torch.Tensor) -> bool:
    """Whether it had to be copied, and so does not show what is written to what it is a view of."""
    storage = storage_id(view)
    return storage in COPIES or source_of_local_copy(storage) != storage


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
