"""`capture`: a function that is written down at its first call and replayed at the next ones."""

from __future__ import annotations

import functools
import json
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from shardwise.captures.called import Called, cannot_be_handed_on, managed, without_autocast_cache
from shardwise.captures.cuda_graph import GraphedRun
from shardwise.captures.differentiable import Pair, write_backward
from shardwise.captures.entry import (
    NotHashable,
    Results,
    as_own_object,
    attributes_of,
    flatten,
    hand_back_changes,
    hand_back_tensors,
    held_elsewhere,
    holds_known_container,
    key_of,
    kind_of,
    modes,
    plain_inputs,
    view_in_other_memory,
    with_tensors_of_caller,
)
from shardwise.captures.explain import explain
from shardwise.captures.guards import Arguments, Tensors
from shardwise.captures.leaving import enter, kept_beyond
from shardwise.captures.passes import DEFAULT, check_names
from shardwise.captures.pending import TOGETHER, Pending, is_any_waiting
from shardwise.captures.program import Program
from shardwise.captures.sequence import DONE, NOT_YET, REFUSED, agree, check_sizes, compare_ranks, fingerprint
from shardwise.captures.single import Capture, Compile, Guard
from shardwise.captures.split import CannotSplit, Split, code_of
from shardwise.captures.surroundings import Surroundings
from shardwise.captures.tape import Tape
from shardwise.comm.capturing import tape_here, tapes
from shardwise.errors import CaptureError, check_type
from shardwise.protocols import Item
from shardwise.torch_private.autograd import is_used_up

MOST_CAPTURES = 64  # programs that a function keeps
_NUMBERS = "arguments that are no tensors are others at nearly every call; pass such numbers as tensors"
_KINDS = 16  # kinds of calls that are remembered, for each program that may be kept
_VARIANTS = 8  # programs for calls of one kind, that differ in modules and variables around


class Captured:
    """A function whose calls are written down once and replayed: what `capture` gives.

    Attributes:
        regions: Statements that ran eagerly between captured parts of a call: which, why, and how often.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        passes: Sequence[str] = DEFAULT,
        limit: int = MOST_CAPTURES,
        compile: Compile | None = None,
        whole: bool = False,
        part: Sequence[str] | None = None,
    ) -> None:
        functools.update_wrapper(self, func)
        self._part = part  # of a part of a function: the variables that it hands on
        self._splits: dict[int, Split | None] = {}  # by the line that runs eagerly
        self._func, self._passes, self._limit, self._compile = func, check_names(passes), limit, compile
        self._whole = whole  # whether it is an error that a call cannot be captured
        self._found: OrderedDict[Any, list[Capture] | Split | str] = OrderedDict()
        self._tries: dict[Any, int] = {}
        self._kinds: dict[Any, tuple[int, int]] = {}  # of arguments but for numbers: programs, replays before the first
        self._expected: str | None = None
        self._eager: dict[str, int] = {}
        self._replays = 0
        self.regions: dict[str, int] = {}
        self._sources: frozenset[int] | None = None  # of gradients that several ranks add up in backward programs
        self.is_together = False  # whether results of two calls were there to be differentiated together

    def __call__(self, *args: Item, **kwargs: Item) -> Item:
        if tapes and tape_here() is not None:  # another function is written down, with this one as a part
            return self._func(*args, **kwargs)
        leaves, spec = flatten(args, kwargs)
        try:
            key = (spec, *modes(), *key_of(leaves))
        except NotHashable as error:
            return self._run_eagerly(str(error), args, kwargs)
        if self._sources is not None and torch.is_grad_enabled() and self._meets_another(leaves):
            return self._run_eagerly(TOGETHER, args, kwargs)
        found = self._found.get(key)
        if isinstance(found, list):
            given = plain_inputs(leaves)
            for program in found:
                if program.unsettled is not None and not self._is_settled(key, program):
                    return self(*args, **kwargs)
                if not program.changed(given):
                    self._replays += 1
                    return program.results.build(program.run(*given), leaves)
            if len(found) >= _VARIANTS:
                reason = found[-1].changed(given)
                found = self._found[key] = f"what it was captured with changes all the time: {reason}"
        if isinstance(found, str):
            return self._run_eagerly(found, args, kwargs)
        if isinstance(found, Split):
            return self._run_in_parts(found, args, kwargs)
        kind = (spec, *kind_of(leaves))
        written, replays = self._kinds.get(kind, (0, 0))
        if written >= _VARIANTS and self._replays - replays < written:
            return self._run_eagerly(_NUMBERS, args, kwargs)
        self._kinds[kind] = written + 1, replays if written else self._replays
        if len(self._kinds) > _KINDS * self._limit:  # of shapes that come once and never again
            del self._kinds[next(iter(self._kinds))]
        return self._write(key, leaves, spec, (args, kwargs))

    def __get__(self, owner: object, kind: type | None = None) -> Item:
        """A method, where a function of a class is captured."""
        return self if owner is None else types.MethodType(self, owner)

    def _meets_another(self, leaves: Sequence[Any]) -> bool:
        """Whether this call may be differentiated together with an earlier one, or such a call has come before."""
        if not self.is_together and self._sources is not None:
            inputs = (t for t in plain_inputs(leaves) if t.requires_grad)
            self.is_together = is_any_waiting(self._sources.union(map(id, inputs)))
        return self.is_together

    def _note_sources(self, pair: Pair, results: Results, leaves: Sequence[Any]) -> None:
        """Results wait for a backward pass that adds gradients of several ranks up."""
        if self._compile is None and pair.moves_back:  # compiled programs need not round as eager runs do
            self._sources = (self._sources or frozenset()).union(map(id, pair.leaves))
            sources = pair.sources(plain_inputs(leaves))
            self.is_together = is_any_waiting(sources) or self.is_together
            pair.owner = self
            Pending(sources, self).watch(results.tensors)

    def _run_in_parts(self, split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Item:
        if not split.fits():
            return self._run_eagerly("the function was given other code", args, kwargs)
        self.regions[split.reason] = self.regions.get(split.reason, 0) + 1
        return split(*args, **kwargs)

    def _run_eagerly(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Item:
        self._count(reason)
        return self._func(*args, **kwargs)

    def _count(self, reason: str) -> None:
        if self._whole:
            raise CaptureError(f"{self._name} cannot be captured as a whole: {reason}")
        self._eager[reason] = self._eager.get(reason, 0) + 1

    @property
    def _name(self) -> str:
        return getattr(self._func, "__qualname__", type(self._func).__name__)

    # -- capturing --------------------------------------------------------------------------------------------------
    def _write(self, key: Item, leaves: list[Any], spec: Item, passed: Item) -> Item:
        """Run the function as it is, and keep what it did."""
        others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        surroundings = Surroundings([self._func, *others, *attributes_of(leaves)])
        if surroundings.refused:
            self._add(key, surroundings.refused)
            return self._run_eagerly(surroundings.refused, *passed)
        tape = Tape(code_of(self._func))
        own = [as_own_object(leaf) for leaf in leaves]
        leaving = enter(tape, own)
        called = Called(surroundings)
        args, kwargs = tree_unflatten(own, spec)
        around = modes()
        try:
            with without_autocast_cache(), called, tape.writing():
                box = [self._func(*args, **kwargs)]
        finally:
            for handle in leaving:
                handle.remove()
        swap = {id(mine): leaf for mine, leaf in zip(own, leaves, strict=True) if isinstance(leaf, torch.Tensor)}
        if hand_back_changes(passed, (args, kwargs), swap):
            tape.refuse("a list or dict among the arguments is changed in the call")
        del args, kwargs
        if altered := hand_back_tensors(own, leaves):
            tape.refuse(altered)
        if drawn := surroundings.drawn():
            tape.refuse(drawn)
        if modes() != around:
            tape.refuse("a mode (grad mode, default dtype, ...) is another after the call")
        if self._part is not None and (name := cannot_be_handed_on(box, self._part, called)):
            tape.refuse(f"the variable {name} holds an object that is made in this part of the function")
        if holds_known_container(box[0], called.knows):
            tape.refuse("a list or dict that was there before is returned")
        if shared := view_in_other_memory(box[0], [*tape.inputs.values(), *tape.state.values()]):
            tape.refuse(shared)
        tape.note_gradients()
        elsewhere = "" if tape.refused else held_elsewhere(box, own, leaves, tape.has_place)
        results = Results(box[0], own, called.tensors())
        program = tape.finish(results.tensors)
        if any(t.requires_grad and t.is_leaf and not tape.has_place(t) for t in results.tensors):
            tape.refuse("a result is made to take gradients in the call")
        pair = self._differentiated(tape, program, results, called.modules)
        if pair is not None:
            self._note_sources(pair, results, leaves)
        elif not tape.refused:
            results.are_used_up = [t.grad_fn is not None for t in results.tensors]
        if tape.refused or elsewhere:
            given = with_tensors_of_caller(box[0], swap)  # objects that others know, or that know of others
        else:
            given = results.build(results.tensors, leaves)
        del box, own
        results.tensors = []
        reason = tape.refused or elsewhere or tape.replaced(program) or called.written()
        if not reason and pair is None:
            reason = kept_beyond(tape, program)
        ended = REFUSED if tape.refused else NOT_YET if reason else DONE
        worst, line = agree(tape.comms.values(), ended, tape.line if tape.refused else 0)
        if worst != DONE:
            self._refuse(key, reason or "another rank could not capture this call", worst == REFUSED, line)
            return given
        made = self._guarded(tape, program, pair, results, called, plain_inputs(leaves))
        made.finish(self._passes, self._compile)
        self._add(key, made)
        return given

    @staticmethod
    def _guarded(
        tape: Tape,
        program: Program,
        pair: Pair | None,
        results: Results,
        called: Called,
        given: Sequence[torch.Tensor],
    ) -> Capture:
        """A capture with all that it was written with."""
        began = [] if pair is not None else tape.began_without_gradient()
        around, state = called.tensors(), list(tape.state.values())
        guards: list[Guard] = [called, Tensors(around, state, began)]
        made = Capture(program, pair, results, guards, Arguments(given, [*around, *state]))
        if pair is not None:  # what autograd keeps for the backward pass of this call is alive still
            made.unsettled = lambda: kept_beyond(tape, program)
        return made

    @staticmethod
    def _differentiated(
        tape: Tape, program: Program, results: Results, modules: Iterable[torch.nn.Module]
    ) -> Pair | None:
        """The backward program, where results are to be differentiated: not where the call has done that itself."""
        roots = [t for t in results.tensors if t.requires_grad and t.grad_fn is not None]
        if tape.refused or not roots:
            return None
        if program.sets_gradients:
            if not all(is_used_up(root.grad_fn) for root in roots):
                tape.refuse("a result can be differentiated outside though a backward pass runs inside; detach it")
            return None
        if name := managed(modules):
            tape.refuse(f"{name} is data parallel: capture the whole step, with its backward pass")
            return None
        return write_backward(tape, program, results.tensors)

    def _is_settled(self, key: Item, program: Capture) -> bool:
        """The second call of a program whose results were differentiated: by now nobody needs what the first made."""
        reason = program.unsettled() if program.unsettled is not None else ""
        program.unsettled = None
        if not reason:
            self._tries.pop(key, None)
        else:
            del self._found[key]
            self._refuse(key, reason, is_final=False)
        return not reason

    def _refuse(self, key: Item, reason: str, is_final: bool, line: int = 0) -> None:
        """A call was not captured. What is kept at the first call may have been made once for all (leaves of
        `data_parallel`, tables that are made when they are first needed): the second one is captured again. Where a
        statement was in the way, the next calls run it eagerly, between captured parts."""
        tries = self._tries[key] = self._tries.get(key, 0) + 1
        if is_final or tries > 1:
            split = self._split_at(line, reason) if line and not self._whole else None
            self._add(key, split or reason)
            self._count(reason)

    def _split_at(self, line: int, reason: str) -> Split | None:
        if line not in self._splits:
            again = functools.partial(Captured, passes=self._passes, limit=self._limit, compile=self._compile)
            try:
                made = Split(self._func, line, lambda func, gives: again(func, part=gives))
                made.reason = f"{made.where}: {reason}"
            except CannotSplit:
                made = None
            self._splits[line] = made
        return self._splits[line]

    def _add(self, key: Item, found: Capture | Split | str) -> None:
        known = self._found.get(key)
        if isinstance(found, Capture):
            self._found[key] = [*known, found] if isinstance(known, list) else [found]
        else:
            self._found[key] = found
        if not isinstance(found, Capture) or found.unsettled is None:
            self._tries.pop(key, None)
        while len(self._found) > self._limit:
            self._found.popitem(last=False)
        if isinstance(found, Capture) and self._expected not in (None, self.fingerprint):
            raise CaptureError(
                f"{self._name}: the collectives of the captured program have the fingerprint {self.fingerprint}, those "
                f"of the file that was loaded {self._expected}: code, layouts or sizes differ. Compare explain() with "
                f"the text in the file, or capture and save() anew"
            )

    # -- for people -------------------------------------------------------------------------------------------------
    def _captures(self) -> list[Capture]:
        own = [program for found in self._found.values() if isinstance(found, list) for program in found]
        return own + [program for part in self._parts() for program in part._captures()]

    def _parts(self) -> list[Captured]:
        return [part for split in self._splits.values() if split is not None for part in split.captured]

    @property
    def eager(self) -> dict[str, int]:
        """Why calls ran eagerly, and how many did; of a function in parts, its parts too."""
        found = dict(self._eager)
        for part in self._parts():
            for reason, count in part.eager.items():
                found[reason] = found.get(reason, 0) + count
        return found

    @property
    def replays(self) -> int:
        """How many calls were replayed; of a function in parts, how many of its parts were."""
        return self._replays + sum(part.replays for part in self._parts())

    @property
    def captures(self) -> int:
        """How many kinds of calls are captured."""
        return len(self._captures())

    @property
    def programs(self) -> list[Program]:
        """The captured programs, the newest last."""
        return [program for found in self._captures() for program in found.programs]

    @property
    def code(self) -> str:
        """The newest program as readable Python; empty before the first call."""
        found = self._captures()
        return found[-1].text if found else ""

    @property
    def fingerprint(self) -> str:
        """A number for the collectives of the newest program: the same on all ranks that communicate alike."""
        found = self._captures()
        return fingerprint(found[-1].programs) if found else ""

    def explain(self) -> str:
        """What the programs do: statements, what each pass did, every collective with its line and bytes, and which
        calls ran eagerly and why."""
        programs = [pair for found in self._captures() for pair in zip(found.programs, found.passes, strict=True)]
        graphs = [found.run.why_not for found in self._captures() if isinstance(found.run, GraphedRun)]
        return explain(programs, self.eager, [why for why in graphs if why], self._all_regions())

    def _all_regions(self) -> dict[str, int]:
        found = dict(self.regions)
        for part in self._parts():
            found |= part._all_regions()
        return found

    def check(self) -> int:
        """Check that all ranks issue the same collectives in the same order, with sizes that match.

        Sizes are checked for every rank in this process. On processes, the ranks also compare what they have written
        down: all of them call it.

        Returns:
            How many collectives were checked.

        Raises:
            RanksDifferError: Naming the ranks and the line where they differ.
        """
        programs = self.programs
        compare_ranks(programs)
        return sum(map(check_sizes, programs))

    def save(self, path: str | Path) -> None:
        """Write code, collectives and fingerprint of the newest program to a JSON file.

        Args:
            path: The file. On processes every rank may write one of its own, or one of them for all.

        Raises:
            CaptureError: Nothing is captured yet.
        """
        if not self.captures:
            raise CaptureError(f"save: {self._name} has no captured program yet; call it first")
        found = {"function": self._name, "fingerprint": self.fingerprint, "code": self.code, "text": self.explain()}
        Path(path).write_text(json.dumps(found, indent=1))

    def load(self, path: str | Path) -> None:
        """Have every program that is captured from now on compared with one that was saved: on all ranks, or in a
        later run. One that communicates otherwise is an error.

        Args:
            path: A file that `save` wrote.

        Raises:
            CaptureError: The file is of another function.
        """
        found = json.loads(Path(path).read_text())
        if found.get("function") != self._name:
            raise CaptureError(f"load: {path} is of {found.get('function')!r}, this is {self._name!r}")
        self._expected = found["fingerprint"]

    def __repr__(self) -> str:
        eager = f", {sum(self.eager.values())} eager calls" if self.eager else ""
        return f"<captured {self._name}: {self.captures} captures, {self.replays} replays{eager}>"


def capture(
    func: Callable[..., Any], *, passes: Sequence[str] = DEFAULT, limit: int = MOST_CAPTURES, whole: bool = False
) -> Captured:
    """A function that runs once as it is, and from then on as the straight-line local code that it turned out to be.

    The first call with arguments of some kind runs eagerly and is written down: ops on local tensors, moves, gradients
    that are set, steps of optimizers. Later calls of the same kind replay that without wrappers, plans or autograd, and
    give the same bits. Python in the function runs in the first call only. Calls are told apart by the layouts, shapes
    and dtypes of tensors, the values of other arguments, and modes (autocast, grad mode, ...). A program is dropped if
    modules, parameters or variables around the function have changed.

    Args:
        func: A function, or a module. A training step with its backward pass, clipping and optimizer step, for example.
        passes: What is done to programs, in this order: "aliases", "merge" (equal moves), "inverse" (moves that undo
            one another), "unused", "bucket" (small sums together; numbers may be added up in another order), "overlap"
            (moves begin early and are waited for late), "cuda_graph" (the GPU repeats the whole program at once, see
            docs/capture.md). By default those that keep every bit and the order of moves.
        limit: How many programs to keep; the oldest is dropped.
        whole: Raise where a call cannot be captured. By default it runs eagerly, and `explain()` says why.

    Returns:
        A callable with `.explain()`, `.code`, `.captures`, `.check()`, `.save(path)` and `.load(path)`.

    Raises:
        UnknownPass: There is no pass of that name.

    Example:
        >>> import torch, shardwise
        >>> mesh = shardwise.simulate(4)
        >>> weight = shardwise.ones(8, 8, device_mesh=mesh, placements=[shardwise.Shard(1)])
        >>> double = shardwise.capture(lambda x: (x @ weight).sum() * 2)
        >>> x = shardwise.ones(2, 8, device_mesh=mesh, placements=[shardwise.Replicate()])
        >>> double(x).full_tensor(), double(x + 1).full_tensor(), double.captures
        (tensor(256.), tensor(512.), 1)
    """
    check_type(func, Callable, "capture: func", "give a function or a module")  # type: ignore[arg-type]
    check_type(limit, int, "capture: limit", "give a number of programs")
    return Captured(func, passes, limit, whole=whole)
