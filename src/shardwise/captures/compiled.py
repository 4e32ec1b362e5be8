"""Programs for a compiler: stretches of ops and moves become functions that Inductor, or another backend, makes.

What runs as Python (random fills, most steps of optimizers) stays as it is, between the stretches; some steps are
compiled by themselves (`compiled_step.py`). Moves are plain ops and functional collectives (`functional.py`); those for
which torch has none are an operator of their own that compilers see, with the shapes of their results. A token from one
of them to the next keeps their order, which must be the same on all ranks. Stretches of several captures that differ in
sizes alone share their code (`symbolic.py`).
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from shardwise.captures.compiled_step import CompiledStep, CompileFunction
from shardwise.captures.functional import lower_moves
from shardwise.captures.program import Move, OptimizerStep, Program, Ref, SetGrad, Statement
from shardwise.captures.symbolic import Code, CompileAlone, Family, Stretch
from shardwise.comm.record import Note, recorders, tell
from shardwise.move.steps import MeshStep
from shardwise.protocols import Item
from shardwise.torch_private.tensors import keeping_order

Backend = CompileAlone

_FEW = 2  # ops: shorter stretches are left as they are
_moves: weakref.WeakValueDictionary[int, _Numbered] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
_library: list[torch.library.Library] = []
_lock = threading.Lock()

Kinds = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]


class _Numbered:
    """A move that a compiled program knows by its number, and what its results look like."""

    def __init__(self, move: Move, kinds: Kinds) -> None:
        self.move, self.kinds, self.number = move, kinds, next(_numbers)
        _moves[self.number] = self


def _operator() -> Item:
    """shardwise::move(values, token, number) -> the results, and a token for the next move."""
    with _lock:
        if not _library:
            library = torch.library.Library("shardwise", "FRAGMENT")
            library.define("move(Tensor[] values, Tensor token, int number) -> Tensor[]")
            library.impl("move", _run, "CompositeExplicitAutograd")
            torch.library.register_fake("shardwise::move", _without_values, lib=library)
            _library.append(library)
    return torch.ops.shardwise.move.default


def _run(values: list[torch.Tensor], token: torch.Tensor, number: int) -> list[torch.Tensor]:
    found = _moves[number].move(*values)
    own = [v.clone() if any(v is given for given in values) else v.contiguous() for v in found]
    return [*own, token.new_empty(0)]


def _without_values(values: list[torch.Tensor], token: torch.Tensor, number: int) -> list[torch.Tensor]:
    found = [torch.empty(shape, dtype=dtype, device=device) for shape, _, dtype, device in _moves[number].kinds]
    return [*found, token.new_empty(0)]


class Compiler:
    """Compiles the stretches of programs with a backend of torch.compile.

    Args:
        backend: What compiles a graph for tensors of fixed sizes.
        compile: torch.compile with the options that the program gave: for steps of optimizers, and for graphs with
            symbols.
        is_dynamic: Whether stretches that differ in sizes alone share code.
    """

    def __init__(self, backend: Backend, compile: CompileFunction | None = None, is_dynamic: bool = True) -> None:
        self._backend, self._compile = backend, compile
        self._families: dict[Hashable, Family] | None = {} if is_dynamic and compile is not None else None

    def __call__(self, program: Program) -> None:
        """Put compiled functions in the place of ops, and of steps of optimizers."""
        for statement in program.statements:
            if isinstance(statement.func, OptimizerStep) and self._compile is not None:
                statement.func = CompiledStep(statement.func.optimizer, self._compile)
        lower_moves(program)
        statements: list[Statement] = []
        needed = _needed_after(program)
        at = 0
        for is_ours, group in _stretches(program.statements):
            at += len(group)
            if is_ours and sum(s.is_op for s in group) > _FEW:
                statements += self._compiled(group, needed[at])
            else:
                statements += group
        program.statements[:] = statements

    def _compiled(self, group: list[Statement], needed: set[Ref]) -> list[Statement]:
        sets = [s for s in group if isinstance(s.func, SetGrad)]
        moves = [move for s in group for move in s.moves]
        lowered = [s.lowered for s in group if s.lowered is not None]
        body, numbered = _with_operators([s for s in group if not isinstance(s.func, SetGrad)])
        wanted = needed | {ref for s in sets for ref in s.refs()}
        made = dict.fromkeys(ref for s in body for ref in s.outs if ref is not None)
        taken = list(dict.fromkeys(ref for s in body for ref in s.refs() if ref not in made))
        outs = [ref for ref in made if ref in wanted]
        stretch = Stretch(body, taken, outs)
        compile = self._alone
        if self._families is not None and not numbered:
            family = self._families.get(stretch.kind) or Family(self._backend, self._compile)  # type: ignore[arg-type]
            compile = self._families.setdefault(stretch.kind, family).compiled
        function = Lazily(stretch, compile, moves, lowered, numbered)
        statement = Statement(function, tuple(taken), outs=list(outs), single=False, label="compiled", outside=True)
        statement.writes = tuple(ref for s in body for ref in s.writes if ref in taken)
        statement.source = body[0].source
        return [statement, *sets]

    def _alone(self, stretch: Stretch, tensors: list[torch.Tensor]) -> Code:
        return self._backend(stretch.as_graph(), tensors)


class Lazily:
    """A stretch that is compiled when it first runs, with the tensors that it is then given."""

    def __init__(
        self,
        stretch: Stretch,
        compile: Callable[[Stretch, list[torch.Tensor]], Code],
        moves: Sequence[Move],
        lowered: Sequence[Move],
        numbered: Sequence[_Numbered],
    ) -> None:
        self._stretch, self._compile, self.moves = stretch, compile, moves
        self._lowered, self._numbered = lowered, numbered
        self._places = _places(lowered)
        self._compiled: Code | None = None

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        with torch.set_grad_enabled(self._stretch.with_grad):
            return self._called(tensors)

    def _called(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        plain = [t.detach() if t.requires_grad else t for t in tensors]
        if self._compiled is None:
            with keeping_order():  # code with symbols is made when it first runs
                self._compiled = self._compile(self._stretch, plain)
                return self._run(plain)
        return self._run(plain)

    def _run(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        assert self._compiled is not None
        if not self._lowered:
            return self._compiled(*tensors)
        if to := recorders():
            for move in self._lowered:
                for step in (step for step in move.steps if step.kind != "local"):
                    tell(step.where, step.kind, step.bytes_received(move.comm), move.note, to)
        with ExitStack() as stack:  # that all ranks are here they tell each other once, not for each collective
            for comm, axes, note in self._places:
                stack.enter_context(comm.guard("compiled", axes, note)).meet()
            return self._compiled(*tensors)


def _places(moves: Sequence[Move]) -> list[tuple[Any, tuple[int, ...], Note]]:
    """The backends and axes that moves go over, each once, and on whose behalf the first of them goes."""
    found: dict[tuple[int, tuple[int, ...]], tuple[Any, tuple[int, ...], Note]] = {}
    for move in moves:
        for step in move.steps:
            if step.kind != "local" and isinstance(step, MeshStep):
                axes = tuple(step.crossed)
                note = Note(f"{len(moves)} moves", "compiled", move.note.backward, move.note.source)
                found.setdefault((id(move.comm), axes), (move.comm, axes, note))
    return list(found.values())


def _stretches(statements: Sequence[Statement]) -> Iterator[tuple[bool, list[Statement]]]:
    """Groups of statements that a compiler may take, and of others."""
    for is_ours, group in itertools.groupby(statements, _is_for_compiler):
        yield is_ours, list(group)


def _is_for_compiler(s: Statement) -> bool:
    if isinstance(s.func, Move):
        return type(s.func) is Move and not s.outside and None not in s.outs
    return s.is_op or isinstance(s.func, SetGrad)


def _needed_after(program: Program) -> list[set[Ref]]:
    """Per statement, and behind the last one, the tensors that are used from there on."""
    needed = set(program.outputs)
    found = [set(needed)]
    for statement in reversed(program.statements):
        needed.update(statement.refs())
        found.append(set(needed))
    return found[::-1]


def _with_operators(body: Sequence[Statement]) -> tuple[list[Statement], list[_Numbered]]:
    """The statements with our own operator in the place of moves that are no collectives of torch."""
    numbered: list[_Numbered] = []
    found: list[Statement] = []
    free = itertools.count(1 + max(ref.number for s in body for ref in (*s.refs(), *s.outs) if ref is not None))
    token: Ref | None = None
    for s in body:
        if not isinstance(s.func, Move):
            found.append(s)
            continue
        if token is None:
            token = Ref(next(free))
            found.append(Statement(torch.ops.aten.empty.memory_format, ([0],), outs=[token], label="token"))
        move = _Numbered(s.func, s.kinds)
        numbered.append(move)
        args = (list(s.args), token, move.number)
        token = Ref(next(free))
        found.append(Statement(_operator(), args, outs=[*s.outs, token], single=False, label="move"))
    return found, numbered
