"""Writes through ``.data``: autograd does not see them, and computes gradients with the values that it finds then. A
call that moved an operand keeps the moved copy, which has the old values. So before its gradient is computed, an
operand that was written since is moved into the copy again. A program of several ops keeps what it made of its
operands; there the backward pass raises if the values have changed (gradcheck writes, and restores the values). It
always raises if the program wrote into the local tensor of ``.data``: other ranks may not have written, and would not
take part in the move.
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
    """A tensor at a certain time, with the number of unseen writes to its memory until then."""

    def __init__(self, name: str, tensor: Wrapper, how: str = "took") -> None:
        memory = origin_of(tensor).memory
        self.name, self.how, self.layout, self.writes = name, how, tensor._layout, memory.unseen_writes
        self.lent_writes = memory.lent_writes
        self.tensor, self.memory = weakref.ref(tensor), weakref.ref(memory)

    @property
    def is_written(self) -> bool:
        """Whether it was written unseen since then; raises if only this process wrote."""
        tensor, memory = self.tensor(), self.memory()
        if memory is not None and memory.lent_writes != self.lent_writes:
            raise RuntimeError(self.refusal)
        replaced = tensor is not None and origin_of(tensor).memory is not memory
        return replaced or (memory is not None and memory.unseen_writes != self.writes)

    def now(self) -> Wrapper:
        """The tensor with its present values; raises if it is gone, or has been changed into another one."""
        tensor = self.tensor()
        if tensor is None or tensor._layout is not self.layout:
            raise RuntimeError(self.refusal)
        return tensor

    @property
    def refusal(self) -> str:
        return (
            f"a tensor of shape {self.layout.shape} that {self.name} {self.how} was written through .data since. Plain "
            f"torch computes the gradient with the new values; on this layout {self.name} kept what it made of the old "
            f"ones. Write through .data before {self.name} or after the backward pass, or to a clone()"
        )


class TakenAgain:
    """Called before the gradient of a call that keeps the moved copy of an operand. The operand itself may be gone by
    then, as `w.t()` is; its values are still in the memory of its base, unless the ranks had copied it."""

    def __init__(self, name: str, tensor: Wrapper, moved: LocalValue, again: Again) -> None:
        self.seen, self.again, comm = _Seen(name, tensor), again, tensor._layout.mesh.comm
        self.moved = [weakref.ref(value) for value in comm.values(moved)]  # weak references: autograd owns them
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
    """Whether the view had to be copied, so that it does not show writes to its base."""
    storage = storage_id(view)
    return storage in COPIES or source_of_local_copy(storage) != storage


class Unchanged:
    """Called before the gradient of a program whose operand or result plain torch keeps. The old values are stored only
    once something can write to it unseen."""

    def __init__(self, name: str, tensor: Wrapper, how: str = "took") -> None:
        self.seen, self.is_done = _Seen(name, tensor, how), False
        self.before: Wrapper | None = None
        memory = origin_of(tensor).memory
        if memory.watchers is None:
            memory.watchers = weakref.WeakKeyDictionary()
        memory.watchers[self] = Unchanged.remember
        if memory.is_handed_out:
            self.remember()

    def remember(self) -> None:
        """Store the values, since the program is given a tensor through which it can write unseen."""
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
