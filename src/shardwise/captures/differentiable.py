"""Programs whose results are differentiated outside: two programs, forward and backward, behind one autograd node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch.autograd.function import once_differentiable

from shardwise.captures.code import Code
from shardwise.captures.contributions import MOST_BYTES, Parts
from shardwise.captures.pending import Function, Pending, sources_of
from shardwise.captures.program import Program, Ref, Statement
from shardwise.captures.pruned import without
from shardwise.captures.tape import Tape
from shardwise.captures.together import together
from shardwise.engine import autocast
from shardwise.errors import ShardwiseError
from shardwise.protocols import Ctx, Tensors

T = TypeVar("T")


class Pair:
    """A forward program, the backward program of its results, and what the second needs of the first.

    Attributes:
        forward: Gives the results and, behind them, what is saved.
        backward: A program of the saved tensors and the gradients of the results.
    """

    def __init__(
        self, forward: Program, backward: Program, results: int, made: Sequence[bool], needed: list[int]
    ) -> None:
        self.forward, self.backward = forward, backward
        self._results, self._made = results, made
        self.needed = needed  # which inputs of the forward take gradients; one several times, if it has several uses
        self.leaves: list[torch.Tensor] = []  # the same of tensors that were there before
        self.differentiable: list[bool] = []
        self.seeds: list[Ref] = []  # the gradients of the results, among the inputs of the backward program
        self.zeros: list[Callable[[], torch.Tensor]] = []  # what stands for each where it is not given
        self.moves_back = bool(backward.moves())
        self.keys: list[int] = []  # which of what is saved are keys of random numbers: numbers of Python
        self.owner: Function | None = None  # who is told where results of several calls wait to be differentiated
        self._whole = _copied(backward)

    def sources(self, inputs: Sequence[torch.Tensor]) -> frozenset[int]:
        """The tensors for which the backward program adds gradients of several ranks up."""
        return sources_of((*(inputs[i] for i in self.needed), *self.leaves)) if self.moves_back else frozenset()

    def without(self, missing: frozenset[int]) -> tuple[Program, list[bool]]:
        """The backward program where some gradients of results are not given, and which of its outputs are left."""
        return without(_copied(self._whole), self.seeds, [self.seeds[i] for i in missing])


def _copied(program: Program) -> Program:
    """A program of its own: passes and compilers change what they are given."""
    statements = [replace(s, outs=list(s.outs)) for s in program.statements]
    return Program(list(program.inputs), program.state, statements, list(program.outputs))


def write_backward(tape: Tape, forward: Program, outputs: Sequence[torch.Tensor]) -> Pair | None:
    """Differentiate the results of a program that was just written, and write that down too. None where they depend on
    nothing that takes a gradient, or where the call has differentiated them itself."""
    roots = [t for t in outputs if t.requires_grad and t.grad_fn is not None]
    inputs = [t for t in tape.inputs.values() if t.requires_grad]
    leaves = tape.leaves()
    if not roots or not (inputs or leaves):
        return None
    end = len(tape.statements)
    seeds = [torch.zeros_like(root) for root in roots]
    seed_refs = [tape.add_input(seed) for seed in seeds]
    parts = Parts([*inputs, *leaves], tape.number_of)
    try:
        outside = _labels_outside_of_autocast(tape, roots, [*inputs, *leaves], seeds) if autocast.is_on() else None
        with tape.writing(), parts.watching(roots, seeds):
            found = torch.autograd.grad(roots, [*inputs, *leaves], seeds, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if isinstance(error, ShardwiseError):
            raise
        if "second time" not in str(error):  # the program itself may never differentiate them
            tape.refuse(f"its results cannot be differentiated: {str(error).partition('. ')[0]:.200}")
        del tape.statements[end:]
        return None
    finally:
        for ref in seed_refs:
            del tape.inputs[ref]
    behind = tape.statements[end:]
    del tape.statements[end:]
    if outside is not None and outside != [s.label for s in behind]:
        tape.refuse(
            "autocast changes what the backward pass does, which may run inside of it or outside: capture the whole "
            "step, with its backward pass"
        )
        return None
    known = {ref for s in forward.statements for ref in s.outs if ref is not None} | set(forward.inputs)
    if reason := _cannot_be_added(parts, behind, [None if grad is None else tape.number_of(grad) for grad in found]):
        tape.refuse(reason)
        return None
    used = [ref for s in behind for ref in s.refs()]
    grads: list[Ref | None] = []
    for refs in parts.found:
        grads += refs or [None]
    saved = [ref for ref in dict.fromkeys([*used, *(g for g in grads if g is not None)]) if ref in known]
    results = list(forward.outputs)
    pair = Pair(
        Program(forward.inputs, forward.state, forward.statements, results + saved),
        Program([*saved, *seed_refs], forward.state, behind, [ref for ref in grads if ref is not None]),
        len(results),
        [ref is not None for ref in grads],
        _repeated([i for i, t in enumerate(tape.inputs.values()) if t.requires_grad], parts.found),
    )
    keys = set(tape.keys.values())
    pair.keys = [i for i, ref in enumerate(saved) if ref in keys]
    pair.leaves, pair.seeds = _repeated(leaves, parts.found[len(inputs) :]), seed_refs
    pair.zeros = [partial(torch.zeros, seed.shape, dtype=seed.dtype, device=seed.device) for seed in seeds]
    pair.differentiable = [t.requires_grad and t.grad_fn is not None for t in outputs]
    return pair


def _labels_outside_of_autocast(
    tape: Tape, roots: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]
) -> list[str]:
    """What a backward pass does that runs outside of autocast, though the forward pass ran inside."""
    end = len(tape.statements)
    with tape.writing(), autocast.off():
        torch.autograd.grad(roots, sources, seeds, retain_graph=True, allow_unused=True)
    found = [s.label for s in tape.statements[end:]]
    del tape.statements[end:]
    return found


def _cannot_be_added(parts: Parts, statements: list[Statement], sums: Sequence[Ref | None]) -> str:
    """Have a program give the parts of gradients; why that cannot be done, or nothing."""
    if parts.extra_bytes > MOST_BYTES:
        return (
            f"a tensor is used so often that the gradients of all uses take {parts.extra_bytes >> 20} MiB; capture the "
            f"whole step, with its backward pass"
        )
    return "" if parts.take_apart(statements, sums) else "gradients of one tensor are added up in an unknown way"


def _repeated(items: Sequence[T], parts: Sequence[Sequence[Ref]]) -> list[T]:
    """Each of some things as often as it has parts, but once at least."""
    return [item for item, own in zip(items, parts, strict=False) for _ in range(max(len(own), 1))]


class _UsedUp(torch.autograd.Function):
    """A result that the call has differentiated itself: it needs grad, as in an eager run, and gives none."""

    @staticmethod
    def forward(ctx: Ctx, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            "Trying to backward through the graph a second time: the captured call that made this tensor has run the "
            "backward pass itself; return it with .detach(), or leave the backward pass out of the captured function"
        )


def used_up(value: torch.Tensor) -> torch.Tensor:
    """A result behind a node that raises where it is differentiated."""
    with torch.enable_grad():
        return _UsedUp.apply(value, torch.empty(0, requires_grad=True))


class DifferentiableRun:
    """Runs a pair: the function of the plain tensors of the arguments."""

    def __init__(self, pair: Pair, prepare: Callable[[Program], object]) -> None:
        self.pair, self.code, self.back = pair, Code(pair.forward), Code(pair.backward)
        self._run, self._run_back = (together(code.program, code.run) for code in (self.code, self.back))
        self._prepare = prepare  # what was done to both programs
        self._partly: dict[frozenset[int], tuple[Code, list[bool]]] = {}

    def backward(self, saved: Tensors, seeds: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
        """The gradients that the backward program makes; None for those that depend on no gradient that is given."""
        pair, missing = self.pair, frozenset(i for i, seed in enumerate(seeds) if seed is None)
        if not missing:
            return iter(self._run_back(*saved, *seeds))
        if missing not in self._partly:
            program, left = pair.without(missing)
            self._prepare(program)
            self._partly[missing] = Code(program), left
        code, left = self._partly[missing]
        full = [zeros() if seed is None else seed for seed, zeros in zip(seeds, pair.zeros, strict=True)]
        made = iter(code.run(*saved, *full))
        return (next(made) if is_left else None for is_left in left)

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        pair = self.pair
        given = [inputs[i] for i in pair.needed]
        return _Replay.apply(self, inputs, *given, *pair.leaves)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, run: DifferentiableRun, inputs: Tensors, *sources: torch.Tensor) -> Tensors:
        pair = run.pair
        ctx.pending = None if pair.owner is None else Pending(pair.sources(inputs), pair.owner)
        found = run._run(*inputs)
        results, saved = found[: pair._results], found[pair._results :]
        ctx.run = run
        ctx.keys = {i: saved[i] for i in pair.keys}  # autograd saves tensors alone
        ctx.save_for_backward(*(saved if not pair.keys else (t for i, t in enumerate(saved) if i not in ctx.keys)))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t, is_one in zip(results, pair.differentiable, strict=True) if not is_one))
        return tuple(_own(t, inputs, sources) for t in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Ctx, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        pair = ctx.run.pair
        if ctx.pending is not None:
            ctx.pending.is_done = True
        seeds = [grad for grad, is_one in zip(grads, pair.differentiable, strict=True) if is_one]
        saved = ctx.saved_tensors
        if ctx.keys:
            saved = list(saved)
            for i, key in ctx.keys.items():  # from the first to the last
                saved.insert(i, key)
        made = ctx.run.backward(saved, seeds)
        return None, None, *(next(made) if there else None for there in pair._made)


def _own(result: torch.Tensor, *others: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result that is no argument itself: autograd would take it for one that was not changed."""
    return result.view_as(result) if any(result is other for group in others for other in group) else result
