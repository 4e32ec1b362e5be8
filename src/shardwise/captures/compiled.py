"""Programs for a compiler: stretches of ops and moves become functions that Inductor, or another backend, makes.

What runs as Python (random fills, most steps of optimizers) stays as it is, between the stretches; some steps are
compiled by themselves (`compiled_step.py`). Moves are an operator of their own that compilers see, with the shapes of
their results; a token from one to the next keeps their order, which must be the same on all ranks.
"""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.captures.compiled_step import CompiledStep, CompileFunction
from shardwise.captures.program import Move, OptimizerStep, Program, Ref, SetGrad, Statement, with_items
from shardwise.protocols import Item

Backend = Callable[[fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]

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
    """Compiles the stretches of a program with a backend of torch.compile."""

    def __init__(self, backend: Backend, compile_step: CompileFunction | None = None) -> None:
        self._backend, self._compile_step = backend, compile_step

    def __call__(self, program: Program) -> None:
        """Put compiled functions in the place of ops, and of steps of optimizers."""
        for statement in program.statements:
            if isinstance(statement.func, OptimizerStep) and self._compile_step is not None:
                statement.func = CompiledStep(statement.func.optimizer, self._compile_step)
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
        body = [s for s in group if not isinstance(s.func, SetGrad)]
        wanted = needed | {ref for s in sets for ref in s.refs()}
        made = dict.fromkeys(ref for s in body for ref in s.outs if ref is not None)
        taken = list(dict.fromkeys(ref for s in body for ref in s.refs() if ref not in made))
        outs = [ref for ref in made if ref in wanted]
        graph, numbered = _graph_of(body, taken, outs)
        function = Lazily(self._backend, graph, numbered)
        statement = Statement(function, tuple(taken), outs=list(outs), single=False, label="compiled", outside=True)
        statement.writes = tuple(ref for s in body for ref in s.writes if ref in taken)
        statement.source = body[0].source
        return [statement, *sets]


class Lazily:
    """A stretch that is compiled when it first runs, with the tensors that it is then given."""

    def __init__(self, backend: Backend, graph: fx.GraphModule, moves: list[_Numbered]) -> None:
        self._backend, self._stretch, self._moves = backend, graph, moves
        self._compiled: Callable[..., Any] | None = None

    @torch.no_grad()
    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        plain = [t.detach() if t.requires_grad else t for t in tensors]
        if self._compiled is None:
            self._compiled = self._backend(self._stretch, plain)
        return self._compiled(*plain)


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


def _graph_of(
    body: Sequence[Statement], taken: Sequence[Ref], outs: Sequence[Ref]
) -> tuple[fx.GraphModule, list[_Numbered]]:
    """The statements as a graph of torch.fx."""
    graph = fx.Graph()
    nodes: dict[Ref, fx.Node] = {ref: graph.placeholder(f"t{ref.number}") for ref in taken}
    numbered: list[_Numbered] = []
    token: fx.Node | None = None
    for s in body:
        args, kwargs = (with_items(given, Ref, nodes.__getitem__) for given in (s.args, s.kwargs))
        if isinstance(s.func, Move):
            if token is None:
                token = graph.call_function(torch.ops.aten.empty.memory_format, ([0],))
            move = _Numbered(s.func, s.kinds)
            numbered.append(move)
            node = graph.call_function(_operator(), (list(args), token, move.number))
            token = graph.call_function(operator.getitem, (node, len(s.outs)))
        else:
            node = graph.call_function(s.func, args, kwargs)
        for i, ref in enumerate(s.outs):
            if ref is not None:
                nodes[ref] = node if s.single else graph.call_function(operator.getitem, (node, i))
    graph.output(tuple(nodes[ref] for ref in outs))
    return fx.GraphModule({}, graph), numbered
