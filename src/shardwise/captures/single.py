"""One captured program, with what must hold for it to be run again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from shardwise.captures.code import Code
from shardwise.captures.cuda_graph import GraphedRun
from shardwise.captures.differentiable import DifferentiableRun, Pair
from shardwise.captures.entry import Results
from shardwise.captures.guards import Arguments
from shardwise.captures.passes import run_passes
from shardwise.captures.program import Program
from shardwise.captures.together import together

Compile = Callable[[Program], None]  # what a compiler does with a program: statements become calls of what it made

Done = list[tuple[str, int, int, int, float]]  # of each pass: its name, and what the program was behind it


class Guard(Protocol):
    """Something that a program was written with."""

    def changed(self) -> str:
        """What is another than it was; empty if nothing is."""


class Capture:
    """One program, for arguments of one kind; or two, where its results are differentiated outside.

    Passes, compilers and Python's own run when it is first replayed, or looked at: a program for calls of a kind that
    never comes again needs none of them.
    """

    def __init__(
        self, program: Program, pair: Pair | None, results: Results, guards: Sequence[Guard], arguments: Arguments
    ) -> None:
        self.results, self._guards, self._arguments = results, guards, arguments
        self._written = [program] if pair is None else [pair.forward, pair.backward]
        self._pair = pair
        self.unsettled: Callable[[], str] | None = None  # at the next call: why it cannot be repeated after all

    def finish(self, passes: Sequence[str], compile: Compile | None) -> None:
        """What is to be done to the programs."""

        def prepare(program: Program) -> Done:
            done = run_passes(program, passes)
            if compile is not None:
                compile(program)
            return done

        self._prepare = prepare

    @functools.cached_property
    def passes(self) -> list[Done]:
        """What each pass left, per program."""
        return list(map(self._prepare, self._written))

    @property
    def programs(self) -> list[Program]:
        """The programs, as the passes and the compiler left them."""
        assert self.passes
        return self._written

    @functools.cached_property
    def run(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The function of the plain tensors of the arguments."""
        program = self.programs[0]
        if self._pair is not None:
            return DifferentiableRun(self._pair, self._prepare)
        return GraphedRun(program, self._code.run) if program.is_graph else together(program, self._code.run)

    @functools.cached_property
    def _code(self) -> Code:
        return Code(self.programs[0])

    @property
    def text(self) -> str:
        """The program as Python."""
        if self._pair is None:
            return self._code.text
        run = self.run
        assert isinstance(run, DifferentiableRun)
        return f"# forward\n{run.code.text}\n# backward\n{run.back.text}"

    def changed(self, given: Sequence[torch.Tensor]) -> str:
        """What keeps the program from being run: something it was written with is another now."""
        if not self._arguments.fit(given):
            return "an argument is a tensor that the function knows by another name, or is no more"
        for guard in self._guards:
            reason = guard.changed()
            if reason:
                return reason
        return ""
