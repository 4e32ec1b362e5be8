"""The tape: a mode under which a function runs as always, and everything it does to local tensors is written down.

It sees every op below autograd, those of backward passes too. Moves, random fills and steps of optimizers are told to
it (`comm/capturing.py`) and are one statement each. What cannot be written down is refused with a reason; the call
itself goes on, since it runs eagerly all the while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef as WeakTensorRef

from shardwise.autograd.leaves import leaf_values
from shardwise.captures.escapes import Escapes, has_foreign_hooks
from shardwise.captures.looking import line_in, options_of
from shardwise.captures.numbers import Numbers
from shardwise.captures.operands import has_indices, is_without_values, share_memory_with, traits_of
from shardwise.captures.program import (
    Flattened,
    GetGrad,
    Move,
    OptimizerStep,
    Program,
    Ref,
    SetGrad,
    Statement,
    items_in,
    with_tensors,
    written_by,
)
from shardwise.comm.capturing import tapes
from shardwise.comm.rank_tensor import RankTensor
from shardwise.comm.record import Note, recorders, user_line
from shardwise.move.steps import Step
from shardwise.protocols import Args, Item, Kwargs, Op, Result
from shardwise.torch_private.autograd import step_hooks
from shardwise.torch_private.tensors import (
    QuickDispatchMode,
    dispatch_modes,
    function_modes,
    storage_id,
    storage_number,
    take_resize,
    without_function_modes,
    without_torch_function,
)
from shardwise.wrapper import Wrapper

_GET, _SET = GetGrad(), SetGrad()
_FRESH = torch.ops.aten.lift_fresh.default
_CLONE = torch.ops.aten.clone.default


class Tape(QuickDispatchMode):  # type: ignore[misc]
    """Writes one program."""

    def __init__(self, code: CodeType | None = None) -> None:
        super().__init__()
        self.paused, self.is_zeroing = 0, False
        self.refused: str = ""
        self.line = 0  # where in the function that is written down it was refused; 0 if not there
        self._code = code
        self.statements: list[Statement] = []
        self.inputs: dict[Ref, torch.Tensor] = {}
        self.state: dict[Ref, torch.Tensor] = {}
        self.comms: dict[int, Any] = {}  # the backends that moves went over
        self._refs = Numbers()
        self._made_at: dict[Ref, Statement] = {}
        self._count = 0
        self._grads: dict[Ref, torch.Tensor | None] = {}  # of leaves: the gradient that the program knows of
        self._leaves: dict[Ref, torch.Tensor] = {}  # those tensors
        self._read: dict[int, torch.Tensor] = {}  # leaves whose gradients the program has looked at, by those' ids
        self._began_without: dict[Ref, bool] = {}  # of leaves whose first gradient matters: whether there was none
        self._stepping: torch.optim.Optimizer | None = None
        self._options: dict[torch.optim.Optimizer, Any] = {}
        self.keys: dict[int, Ref] = {}  # of random numbers, which are numbers of Python
        self._stream = b""  # where torch's generators stand, as far as the program has drawn
        self._constants: set[Ref] = set()
        self._rests = False  # while an optimizer steps

    # -- on and off -------------------------------------------------------------------------------------------------
    @contextmanager
    def writing(self) -> Iterator[Tape]:
        """Inside, what is done is written down."""
        with ExitStack() as stack:
            tapes.append(self)
            stack.callback(tapes.remove, self)
            stack.enter_context(take_resize(self._resized))
            self._escapes = stack.enter_context(Escapes(self))
            stack.enter_context(self)
            stack.callback(self._wake)
            self._stream = self._generators()
            yield self
        if self._stepping is not None:  # it has raised, and the program went on: nothing was written since
            self.paused, name = 0, type(self._stepping).__name__
            self.refuse(f"a step of {name} has failed in the call")
        if self._generators() != self._stream:  # which goes on in each run
            self.refuse("a random generator is set in the call, or drawn from unseen")

    def _generators(self) -> bytes:
        """The state of torch's generators for CPUs and for this GPU."""
        with self._pausing():
            state = torch.default_generator.get_state().numpy().tobytes()
            return state + torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else state

    def _rest(self, optimizer: torch.optim.Optimizer) -> None:
        """See nothing of a step, which is one statement, so that it runs at its own speed. Where modes of the program's
        are in between, or its hooks may enter some, this one stays."""
        innermost = dispatch_modes()[-1:] == [self] and function_modes()[-1:] == [self._escapes]
        if innermost and not any(step_hooks(optimizer)):
            self._escapes.rest()
            self.__exit__(None, None, None)
            self._rests = True

    def _wake(self) -> None:
        if self._rests:
            self._rests = False
            self.__enter__()
            self._escapes.wake()

    def refuse(self, reason: str) -> None:
        if not self.refused and not self.paused:
            self.refused = f"{reason} ({user_line()})"
            self.line = line_in(self._code)
            self.statements.clear()

    # -- tensors ----------------------------------------------------------------------------------------------------
    def forget(self) -> None:
        """Know no tensor any more. torch.utils.swap_tensors takes none that anybody has a weak reference to."""
        self._refs = Numbers()

    def _new(self) -> Ref:
        self._count += 1
        return Ref(self._count)

    def add_input(self, tensor: torch.Tensor) -> Ref:
        """A plain tensor of the arguments."""
        ref = self._refs[tensor] = self._new()
        self.inputs[ref] = tensor
        if tensor.is_leaf and (tensor.requires_grad or tensor.grad is not None):
            self._grads[ref] = tensor.grad
            self._leaves[ref] = tensor
        return ref

    def number_of(self, tensor: torch.Tensor) -> Ref:
        """The number of a tensor. One that nobody has seen yet was there before: state, or a gradient."""
        found = self._refs.get(tensor)
        if found is not None:
            return found
        with without_function_modes():
            read = self._read.get(id(tensor))
            if read is not None and read.grad is tensor:
                self.number_of(read)
            for ref, leaf in self._leaves.items():
                if leaf.grad is tensor:  # somebody else's work: a step, or an earlier call
                    return self._write(Statement(_GET, (ref,), label="grad"), tensor)
            found = self._refs[tensor] = self._new()
            self.state[found] = tensor
            if tensor.requires_grad:
                self._note_leaf(found, tensor)
        return found

    def _note_leaf(self, found: Ref, tensor: torch.Tensor) -> None:
        """A tensor that was there before takes gradients."""
        if not tensor.is_leaf:
            self.refuse(f"a tensor of shape {tuple(tensor.shape)} comes from a graph that was made before the call")
            return
        self._leaves[found] = tensor
        grad = tensor.grad
        if grad is not None and self._refs.get(grad) in self._made_at:  # the program has put it there, unseen
            self._grads[found] = None
        else:
            self._grads[found] = grad
            self._began_without[found] = grad is None
        if hook := has_foreign_hooks(tensor):
            self.refuse(f"a hook on a tensor, {hook}, may do more than compute")

    def is_of_program(self, tensor: torch.Tensor) -> bool:
        return tensor.is_leaf or tensor in self._refs

    def _write(self, statement: Statement, *made: torch.Tensor) -> Ref:
        """Add a statement and its results; the number of the first."""
        for tensor in made:
            ref = None
            if tensor not in self._refs:
                ref = self._refs[tensor] = self._new()
                self._made_at[ref] = statement
            statement.outs.append(ref)
        if not self.refused:
            statement.source = statement.source or user_line()
            self.statements.append(statement)
        return statement.outs[0] if statement.outs else Ref(0)  # type: ignore[return-value]

    # -- ops --------------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Op, types: Args, args: Args = (), kwargs: Kwargs | None = None) -> Result:
        kwargs = kwargs or {}
        for kind in types:
            if issubclass(kind, (Wrapper, RankTensor)):
                with self:
                    return kind.__torch_dispatch__(func, types, args, kwargs)
        if self.paused or self.refused or traits_of(func).is_for_profilers:
            return func(*args, **kwargs)
        given = items_in(*args, *kwargs.values())
        if is_without_values(given, kwargs):
            return func(*args, **kwargs)
        if reason := self._cannot_be_repeated(func, args, given):
            self.refuse(reason)
            return func(*args, **kwargs)
        return self._op(func, args, kwargs, given)

    def _op(self, func: Op, args: Args, kwargs: Kwargs, given: list[Any]) -> Result:
        if func is _FRESH and args[0] not in self._refs:  # made from numbers: each run needs one of its own
            func, args = _CLONE, (args[0].detach(),)
            given = [args[0]]
            self._constants.add(self.number_of(args[0]))
        traits = traits_of(func)
        refs, named = with_tensors(args, self.number_of), with_tensors(kwargs, self.number_of) if kwargs else {}
        if traits.draws:
            with self._watching_generator(func) as drawn:
                out = func(*args, **kwargs)
        else:
            out, drawn = func(*args, **kwargs), []
        on = torch.is_grad_enabled()
        statement = Statement(func, refs, named, label=traits.name, draws=bool(drawn), with_grad=on)
        statement.writes = written_by(traits.written, refs, named)
        statement.shares_memory = share_memory_with(given, out)
        if isinstance(out, torch.Tensor):
            self._write(statement, out)
        elif isinstance(out, (tuple, list)):
            statement.single = False
            if any(not isinstance(item, torch.Tensor) for item in out):
                self._write_mixed(statement, out)
            else:
                self._write(statement, *out)
        else:
            self._write(statement)
        return out

    def _write_mixed(self, statement: Statement, out: Sequence[object]) -> None:
        """Results of which some are no tensors, or lists of them: taken apart behind the call."""
        statement.func = Flattened(statement.func)
        self._write(statement, *(x for x in items_in(out) if isinstance(x, torch.Tensor)))

    def _cannot_be_repeated(self, func: Op, args: Args, given: list[Any]) -> str:
        traits = traits_of(func)
        name = traits.name
        if traits.asks_for_values:
            return f"{name}: a value of a tensor is asked for"
        if traits.sizes_depend and not has_indices(func, args):
            return f"{name}: a size depends on values"
        if traits.reshapes and (self._refs.get(args[0]) in self.state or args[0] not in self._refs):
            return f"{name}: changes the shape of a tensor that was there before"
        for item in given:
            if isinstance(item, torch.Generator) and item is not torch.default_generator:
                return f"{name}: draws from a generator of its own"
        return ""

    # -- what it is told --------------------------------------------------------------------------------------------
    def fill(
        self, name: str, draw: Callable[[], int] | None, put: Callable[..., None], tensors: Sequence[torch.Tensor]
    ) -> None:
        refs = tuple(map(self.number_of, tensors))
        given: tuple[Ref, ...] = ()
        if draw is None:
            with self._watching_generator(name), self._pausing():
                put(*tensors)
        else:
            ref, key = self._key(draw)
            given = (ref,)
            with self._pausing():
                put(key, *tensors)
        self._write(Statement(put, (*given, *refs), label=f"fill_{name}", outside=True, single=False, writes=refs))

    def _key(self, draw: Callable[[], int]) -> tuple[Ref, int]:
        """A key that is drawn now, and its number. One that was drawn before is drawn from a generator that was set
        back: activations are computed a second time, with the same numbers."""
        before = self._generators()
        with self._pausing():
            key = draw()
        if key not in self.keys:
            if before != self._stream:
                self.refuse("a random generator is set in the call")
            self._stream = self._generators()
            ref = self.keys[key] = self._new()
            self._write(Statement(draw, outs=[ref], label="draw", outside=True))
        return self.keys[key], key

    @contextmanager
    def _watching_generator(self, func: Item) -> Iterator[list[str]]:
        """Gives a list that is empty afterwards if a call has drawn nothing from torch's generators."""
        drawn: list[str] = []
        before = self._generators()
        yield drawn
        after = self._generators()
        if after != before:
            drawn.append(str(func))
            if before != self._stream:
                self.refuse(f"{func}: a random generator is set in the call")
            self._stream = after

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def region(self, label: str, func: Callable[[], Any]) -> Item:
        """Run Python that every run of the program runs again."""
        self.note_gradients()
        with self._pausing():
            result = func()
        self.run_again(label, lambda: func() and None)
        return result

    def move(
        self, run: Callable[..., Any], comm: Item, steps: Sequence[Step], local: Item, note: Note, to: list[Any]
    ) -> Item:
        if all(step.kind == "local" for step in steps):
            return run(comm, steps, local, note, to)  # nothing but ops
        self.comms[id(comm)] = comm
        if self.refused:
            with self._pausing():
                return run(comm, steps, local, note, to)
        values = comm.values(local)
        refs = tuple(map(self.number_of, values))
        with self._pausing():
            result = run(comm, steps, local, note, to)
        source = note.source or user_line()
        note = note._replace(source=source)
        after = steps[-1].comm_after(comm)
        again = lambda comm, steps, local, note: run(comm, steps, local, note, recorders())  # noqa: E731
        moved = Move(again, comm, steps, comm.structure(local), after.structure(result), note)
        statement = Statement(moved, refs, label=moved.kind, single=False, source=source, note=note)
        statement.outside = comm.simulated
        made = after.values(result)
        statement.kinds, statement.taken = (
            tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors) for tensors in (made, values)
        )
        self._write(statement, *made)
        return result

    def begin_step(self, optimizer: torch.optim.Optimizer, args: Args, kwargs: Kwargs) -> None:
        if len(args) > 1 and any(arg is not None for arg in args[1:]) or any(v is not None for v in kwargs.values()):
            self.refuse(f"{type(optimizer).__name__}.step is given arguments, such as a closure")
        with without_function_modes():
            for group in optimizer.param_groups:
                for value in (v for param in group["params"] for v in _leaves_of(param) if v.requires_grad):
                    self.number_of(value)
        self.note_gradients()
        self._note_options(optimizer)
        self._stepping = optimizer
        self.paused += 1
        self._rest(optimizer)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._stepping is not optimizer:
            return
        self._wake()
        self.paused -= 1
        self._stepping = None
        self._options[optimizer] = options_of(optimizer)
        self.run_again(f"{type(optimizer).__name__}.step", OptimizerStep(optimizer))

    def run_again(self, label: str, func: Callable[[], object]) -> None:
        """Write down a call of Python that every run makes."""
        self._write(Statement(func, label=label, outside=True, single=False))
        self._stream = self._generators()  # whatever that has drawn, it draws again
        with without_function_modes():
            for ref, leaf in self._leaves.items():
                self._grads[ref] = leaf.grad
        self._options.update((optimizer, options_of(optimizer)) for optimizer in self._options)

    def _note_options(self, optimizer: torch.optim.Optimizer) -> None:
        known = self._options.get(optimizer)
        if known is not None and known != options_of(optimizer):
            self.refuse(f"the options of {type(optimizer).__name__} are changed in the call: change them outside")

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if not self.paused and not self.refused:
            size, number = storage.nbytes(), storage_number(storage)
            with without_torch_function():
                refs = tuple(ref for ref, t in self.state.items() if storage_id(t) == number)
            again = Statement(lambda: storage.resize_(size) and None, label="resize", single=False, writes=refs)
            self._write(again)

    # -- gradients --------------------------------------------------------------------------------------------------
    def set_grad(self, leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
        """The program sets the gradient of a plain tensor."""
        is_new = leaf not in self._refs
        ref = self.number_of(leaf)
        if ref in self._made_at:  # what is done with its gradient are ops
            return
        self._leaves[ref] = leaf  # also where it takes no gradients now, but had one
        if is_new:  # whatever was there before
            self._began_without.pop(ref, None)
        value = None if grad is None else self.number_of(grad)
        self._write(Statement(_SET, (ref, value), label="set_grad", single=False))
        self._grads[ref] = grad

    def note_read(self, leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
        """The program has looked at the gradient of a plain tensor, of which it may know nothing else."""
        if grad is not None:
            self._read[id(grad)] = leaf
        elif leaf not in self._refs and not self.is_zeroing:
            with without_function_modes():
                if leaf.is_leaf:
                    self.number_of(leaf)

    def note_no_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        """The program has seen to it that these have no gradients, also if they had some before."""
        with without_function_modes():
            for leaf in (value for tensor in tensors for value in _leaves_of(tensor)):
                if leaf.is_leaf and leaf.grad is None:
                    self.set_grad(leaf, None)

    def note_gradients(self) -> None:
        """Write down which gradients autograd has put on leaves since."""
        with without_function_modes():
            for ref, leaf in list(self._leaves.items()):
                now = leaf.grad
                if now is not self._grads[ref]:
                    grad = None if now is None else self.number_of(now)
                    self._write(Statement(_SET, (ref, grad), label="set_grad", single=False))
                    self._grads[ref] = now

    def has_place(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was not made by the program, or is a gradient that it sets."""
        return self._refs.get(tensor) not in self._made_at or any(grad is tensor for grad in self._grads.values())

    def leaves(self) -> list[torch.Tensor]:
        """The tensors that were there before and take gradients."""
        return [self.state[ref] for ref in self._grads if ref in self.state and self.state[ref].requires_grad]

    def began_without_gradient(self) -> list[tuple[torch.Tensor, bool]]:
        """Leaves, and whether they had no gradient when the program began: where it makes a difference."""
        return [(self.state[ref], none) for ref, none in self._began_without.items()]

    # -- the end ----------------------------------------------------------------------------------------------------
    def finish(self, outputs: Sequence[torch.Tensor]) -> Program:
        """The program that was written."""
        self.note_gradients()
        for optimizer, known in self._options.items():
            if known != options_of(optimizer):
                self.refuse(f"the options of {type(optimizer).__name__} are changed in the call: change them outside")
        refs = [self.number_of(t) for t in outputs]
        self._load_gradients()
        return Program([*self.inputs], self.state, self.statements, refs)

    def _load_gradients(self) -> None:
        """Of what was taken for state, the gradients of leaves that were seen only later are read anew in each run."""
        for leaf, grad in list(self._grads.items()):
            ref = None if grad is None else self._refs.get(grad)
            if ref is not None and ref in self.state:
                del self.state[ref]
                self.statements.insert(0, Statement(_GET, (leaf,), outs=[ref], label="grad"))

    def replaced(self, program: Program) -> str:
        """Why a program cannot be repeated that puts another tensor in the place of one that it reads: the next call
        would read the old one. It is known by this, that nobody has the old one any more."""
        watched = {ref: WeakTensorRef(t) for ref, t in self.state.items() if ref not in self._constants}
        kinds = {ref: tuple(t.shape) for ref, t in self.state.items()}
        held, self.state, self._leaves, self._read = dict(self.state), {}, {}, {}
        program.state = {}
        order = list(held)
        for ref in watched:
            del held[ref]
        reason = ""
        for ref in order:
            tensor = watched[ref]() if ref in watched else held[ref]
            if tensor is None:
                reason = f"a tensor of shape {kinds[ref]} that was there before is replaced in the call; write into it"
                continue
            self.state[ref] = tensor
        program.state = self.state
        return reason

    def kept(self, program: Program) -> list[tuple[torch.Tensor, Statement]]:
        """Tensors made by the program that are still alive, though they are no results, gradients or views of state."""
        with without_torch_function():  # memory that `data_parallel` has given back
            theirs = {storage_id(t) for t in self.state.values()}
            theirs |= {storage_id(t) for t in self._grads.values() if t is not None}
            known = set(program.outputs)
            outs = [tensor for tensor, ref in self._refs.items() if ref in known]
            given = {id(t) for out in outs for t in (out, out._base) if t is not None}
            return [
                (tensor, self._made_at[ref])
                for tensor, ref in self._refs.items()
                if ref in self._made_at and id(tensor) not in given and storage_id(tensor) not in theirs
            ]


def _leaves_of(param: torch.Tensor) -> Sequence[torch.Tensor]:
    return leaf_values(param) if isinstance(param, Wrapper) else (param,)
