"""Which tensors of a program share memory, as far as its first run showed, and when that memory is written."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.captures.program import GetGrad, Program, Ref, SetGrad, Statement
from shardwise.torch_private.tensors import storage_id, without_torch_function


class Memory:
    """Groups of tensors that may share memory, and the statements that write to each group.

    Arguments may share memory with each other and with what was there before: where one is written, all of that is one
    group.
    """

    def __init__(self, program: Program) -> None:
        self._statements = program.statements
        self._group: dict[Ref, Ref] = {}
        self._made_at = {ref: at for at, s in enumerate(program.statements) for ref in s.outs if ref is not None}
        written = {ref for s in program.statements for ref in s.writes}
        with without_torch_function():  # memory that `data_parallel` has given back
            by_storage: dict[int, Ref] = {}
            for ref, tensor in program.state.items():
                self._join(by_storage.setdefault(storage_id(tensor), ref), ref)
        for statement in program.statements:
            for made, source in _shared(statement):
                self._join(source, made)
        touched = {self._find(ref) for ref in written}
        if any(self._find(ref) in touched for ref in program.inputs):
            for ref in (*program.inputs, *program.state):
                self._join(program.inputs[0], ref)
        gradients = [ref for s in program.statements if isinstance(s.func, (GetGrad, SetGrad)) for ref in s.refs()]
        gradients += [ref for s in program.statements if isinstance(s.func, GetGrad) for ref in s.outs if ref]
        self._outer = {self._find(ref) for ref in (*program.inputs, *program.state, *gradients)}
        self._writes: dict[Ref, list[int]] = {}
        self._barriers = [at for at, s in enumerate(program.statements) if s.outside and not s.writes and not s.outs]
        for at, statement in enumerate(program.statements):
            for ref in statement.writes:
                self._writes.setdefault(self._find(ref), []).append(at)

    def _find(self, ref: Ref) -> Ref:
        while self._group.get(ref, ref) != ref:
            ref = self._group[ref]
        return ref

    def _join(self, one: Ref, other: Ref) -> None:
        one, other = self._find(one), self._find(other)
        if one != other:
            self._group[other] = one

    def _writes_to(self, refs: Iterable[Ref]) -> list[int]:
        """The statements that write to any of these; steps of optimizers may write to whatever was there before."""
        groups = {self._find(ref) for ref in refs}
        found = {at for group in groups for at in self._writes.get(group, ())}
        return sorted(found if groups.isdisjoint(self._outer) else found | set(self._barriers))

    def is_written(self, refs: Iterable[Ref], after: int = -1, before: int | None = None) -> bool:
        """Whether the memory of any of these is written between two statements."""
        return any(at > after and (before is None or at < before) for at in self._writes_to(refs))

    def share(self, some: Iterable[Ref], others: Iterable[Ref]) -> bool:
        """Whether one of some may be in the memory of one of the others."""
        return not {self._find(ref) for ref in some}.isdisjoint(map(self._find, others))

    def ready(self, refs: Iterable[Ref], at: int) -> int:
        """The first statement before which these have the values that they have at a statement."""
        refs = list(refs)
        made = [self._made_at.get(ref, -1) for ref in refs]
        return max([*made, *(w for w in self._writes_to(refs) if w < at), -1]) + 1

    def next_write(self, refs: Iterable[Ref], at: int) -> int:
        """The first statement behind `at` that writes to any of these; the end, if none does."""
        return next((w for w in self._writes_to(refs) if w > at), len(self._statements))


def _shared(statement: Statement) -> Iterable[tuple[Ref, Ref]]:
    """Pairs of a tensor that a statement makes and one that it takes, where they may share memory."""
    if not statement.shares_memory:
        return []
    return [(made, ref) for made in statement.outs if made is not None for ref in statement.refs()]
