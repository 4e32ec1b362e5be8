"""Running a move: its steps one after the other, as one node of autograd whose backward runs each step's partner in
reverse. Because a partner's partner is the step itself, second derivatives come out exact."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from shardwise.comm.base import Comm
from shardwise.comm.capturing import tape_here, tapes
from shardwise.comm.flight import flights
from shardwise.comm.guard import compare
from shardwise.comm.record import Note, Recorder, for_backward, of_thread, recorders, recording_to, tell, user_line
from shardwise.layout import Layout
from shardwise.move.limit import current_cap
from shardwise.move.planner import plan_steps
from shardwise.move.steps import AllReduce, Begun, GatherParts, MeshStep, Spread, Step, Steps
from shardwise.protocols import Ctx, Holder, Structure, Tensors, VmapInfo
from shardwise.torch_private.autograd import is_transforming
from shardwise.torch_private.tensors import in_memory, storage_id

Value: TypeAlias = Any  # a local value, or the list of a ShardedTensor's tensors
Run = Callable[[Holder, Sequence[Step], Any, Note, list[Recorder]], Any]


class _Move(torch.autograd.Function):
    """Inputs and outputs are the distinct plain tensors of a local value before and after the steps."""

    @staticmethod
    def forward(ctx: Ctx, call: list[Any], *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        comm, steps, local, note, run = call
        to = recorders()
        source = user_line() if to or compare or flights else None
        if source is not None and note.source is None:  # looked up once, here: further down the stack it takes longer
            note = note._replace(source=source)
        result = run(comm, steps, local, note, to)
        ctx.comm, ctx.steps, ctx.note = comm, steps, note
        ctx.comm_after = after = _comm_after(comm, steps)
        outs = after.values(result)
        if any(out is value for out in outs for value in values):  # autograd wants outputs of its own
            outs = tuple(out.view_as(out) for out in outs)
        ctx.before, ctx.after = comm.structure(local), after.structure(result)
        ctx.recorders, ctx.source = to, source
        call.append(ctx.after)
        return outs

    @staticmethod
    def backward(ctx: Ctx, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _run_back(ctx, grads)


def _run_back(move: Ctx | _Transformed, grads: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Run the partners of the steps of a move in reverse. Returns None for the argument that is no tensor, then the
    gradients."""
    partners = [step.partner for step in reversed(move.steps)]
    note = for_backward(move.note, move.source)
    local = move.comm_after.assemble(move.after, tuple(map(in_memory, grads)))
    with recording_to(move.recorders):
        back = run_steps(move.comm_after, partners, local, note)
    return None, *move.comm.pick_gradients(move.before, back)


class _Transformed:
    """A move inside of a transform of torch.func, without its tensors. `after` is known once it has run."""

    after: Structure = None

    def __init__(self, comm: Holder, steps: Sequence[Step], before: Structure, note: Note) -> None:
        self.comm, self.steps, self.before, self.note = comm, steps, before, note
        self.comm_after, self.recorders = _comm_after(comm, steps), recorders()
        self.source = user_line() if self.recorders else None


class _TransformedMove(torch.autograd.Function):
    """A move inside of torch.func or forward-mode differentiation: torch asks it for every derivative it needs."""

    @staticmethod
    def forward(call: _Transformed, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = run_now(call.comm, call.steps, call.comm.assemble(call.before, values), call.note, call.recorders)
        call.after = call.comm_after.structure(result)
        return tuple(out.clone() if _is_among(out, values) else out for out in call.comm_after.values(result))

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Any, ...], output: object) -> None:
        ctx.call = inputs[0]

    @staticmethod
    def backward(ctx: Ctx, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _run_back(ctx.call, grads)

    @staticmethod
    def jvp(ctx: Ctx, _: object, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call = ctx.call
        moved = run_steps(call.comm, call.steps, call.comm.assemble(call.before, tangents), call.note)
        return call.comm_after.pick(call.after, moved)

    @staticmethod
    def vmap(
        info: VmapInfo, in_dims: tuple[int | None, ...], call: _Transformed, *values: torch.Tensor
    ) -> tuple[Tensors, tuple[int, ...]]:
        outs: list[Tensors] = []
        for i in range(max(1, info.batch_size)):
            each = [_example(v, dim, i) for v, dim in zip(values, in_dims[1:], strict=True)]
            moved = run_steps(call.comm, call.steps, call.comm.assemble(call.before, each), call.note)
            call.after = call.comm_after.structure(moved)
            outs.append(call.comm_after.values(moved))
        stacked = (torch.stack(parts)[: info.batch_size] for parts in zip(*outs, strict=True))
        return tuple(stacked), (0,) * len(outs[0])


def _example(value: torch.Tensor, dim: int | None, i: int) -> torch.Tensor:
    """One example of a batch; of an empty batch, a tensor of the shape of an example."""
    if dim is None:
        return value
    return value.select(dim, i) if value.shape[dim] else value.new_zeros(value.shape[:dim] + value.shape[dim + 1 :])


def _is_among(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    """Whether it shares memory with one of the others: to forward-mode differentiation it would be a view of it."""
    return any(storage_id(tensor) == storage_id(other) for other in others)


def run_transformed(comm: Holder, steps: Sequence[Step], local: Value, note: Note) -> Value:
    """The local value after the steps, with the derivatives that the active transforms need."""
    call = _Transformed(comm, steps, comm.structure(local), note)
    outs = _TransformedMove.apply(call, *comm.values(local))
    return call.comm_after.assemble(call.after, outs)


def _comm_after(comm: Holder, steps: Sequence[Step]) -> Holder:
    """The backend that holds the result. A step to another mesh is always the only step."""
    return steps[-1].comm_after(comm)


def run_steps(comm: Holder, steps: Sequence[Step], local: Value, note: Note, run: Run | None = None) -> Value:
    """The local value after the steps. Autograd records the move if it records the tensors. `run` is the function that
    runs the steps; by default they run at once."""
    if not steps or (comm.outside and isinstance(steps[0], MeshStep)):
        return local
    if is_transforming():
        return run_transformed(comm, steps, local, note)
    if torch.is_grad_enabled():
        values = comm.values(local)
        if any(v.requires_grad for v in values):
            call = [comm, steps, local, note, run or run_now]
            outs = _Move.apply(call, *values)
            return _comm_after(comm, steps).assemble(call[-1], outs)
    return (run or run_now)(
        comm, steps, local, note, recorders() if of_thread.recorders is None else of_thread.recorders
    )


def run_now(comm: Holder, steps: Sequence[Step], local: Value, note: Note, to: list[Recorder]) -> Value:
    """The local value after the steps, outside of autograd."""
    if tapes and (tape := tape_here()) is not None:
        return tape.move(_run_now, comm, steps, local, note, to)
    return _run_now(comm, steps, local, note, to)


def _run_now(comm: Holder, steps: Sequence[Step], local: Value, note: Note, to: list[Recorder]) -> Value:
    if comm.simulated:
        for step in steps:
            if to:
                _record(comm, step, note, to)
            is_seen = flights and step.kind != "local"
            slot = flights[0].enter_step(comm, step, note) if is_seen else -1  # type: ignore[arg-type]
            local = step.run(comm, local)
            if slot >= 0:
                flights[0].leave(slot, None)
        return local
    communicates = False
    try:
        for step in steps:
            if to:
                _record(comm, step, note, to)
            if step.kind != "local":
                communicates = True
                _on_behalf(note, step)
            local = step.run(comm, local)
    finally:
        if communicates:
            of_thread.note = of_thread.step = None
    return local


def _on_behalf(note: Note, step: Step) -> None:
    """In this context, all communication is on behalf of this step."""
    of_thread.note, of_thread.step, of_thread.digest = note, step, step.digest


def _record(comm: Holder, step: Step, note: Note, to: list[Recorder]) -> None:
    if to and step.kind != "local":
        tell(step.where, step.kind, step.bytes_received(comm), note, to)


def is_done() -> None:
    """The `finish` of a move that is done already."""


class Started:
    """Runs steps as far as possible without waiting: the first exchange is begun, and the tensor that it will fill
    exists.

    `finish` waits, runs the remaining steps and fills the tensor. With `owned`, a first step may write over the source.
    """

    def __init__(self, owned: bool = False) -> None:
        self.owned = owned
        self.finish: Callable[[], Any] = is_done

    def __call__(self, comm: Holder, steps: Sequence[Step], local: Value, note: Note, to: list[Recorder]) -> Value:
        for i, step in enumerate(steps):
            begun = self._begin(comm, step, local, note, self.owned and i == 0) if step.kind != "local" else None
            if begun is None:
                local = run_now(comm, [step], local, note, to)
                continue
            _record(comm, step, note, to)
            out, self.finish = begun
            rest = steps[i + 1 :]
            return self._filled_later(comm, rest, out, note, to) if rest else out
        return local

    @staticmethod
    def _begin(comm: Holder, step: Step, local: Value, note: Note, owned: bool) -> Begun | None:
        _on_behalf(note, step)
        try:
            return step.start(comm, local, owned)
        finally:
            of_thread.note = of_thread.step = None

    def _filled_later(
        self, comm: Holder, rest: Sequence[Step], first: torch.Tensor, note: Note, to: list[Recorder]
    ) -> torch.Tensor:
        """An empty tensor for the result of the remaining steps, and a `finish` that fills it."""
        shape = rest[-1].result.local_shape_at(comm.coords)  # type: ignore[attr-defined]
        arrive, out = self.finish, first.new_empty(shape)

        @torch.no_grad()
        def fill() -> None:
            arrive()
            out.copy_(run_now(comm, rest, first, note, to))

        self.finish = fill
        return out


# -- moves between two layouts ----------------------------------------------------------------------------
def move(local: Value, src: Layout, dst: Layout, note: Note, spread: tuple[int, ...] = ()) -> Value:
    """What the ranks hold under `dst`, from what they hold under `src`."""
    return run_move(local, src.mesh.comm, plan_steps(src, dst, spread, current_cap()), note)


def start_move(
    local: Value, src: Layout, dst: Layout, note: Note, *, owned: bool = False, via: Layout | None = None
) -> Begun:
    """Begin a move without waiting for it. Returns the local value that it fills, and the function that waits for it.
    The move is done at once where all ranks are in this process, or where the gradient of a reduction must be computed.
    An `owned` source is used by nothing else, so it may be reduced in place. With `via`, it goes by that layout."""
    comm, cap = src.mesh.comm, current_cap()
    steps = plan_steps(src, dst, memory=cap) if via is None else _by_way_of(via, src, dst, cap)
    is_plain = all(step.is_plain for step in steps)
    if comm.simulated or not is_plain or is_transforming() or (tapes and tape_here() is not None):
        return run_move(local, comm, steps, note), is_done
    started = Started(owned)
    return run_steps(comm, steps, local, note, run=started), started.finish


def _by_way_of(via: Layout, src: Layout, dst: Layout, cap: int | None) -> Steps:
    return plan_steps(src, via, memory=cap) + plan_steps(via, dst, memory=cap)


def run_move(local: Value, comm: Comm, steps: tuple[MeshStep, ...], note: Note) -> Value:
    """The local value after the steps of one plan."""
    for step in steps:
        if not step.is_plain:
            return _run_one_by_one(local, comm, steps, note)
    return run_steps(comm, steps, local, note)


def _run_one_by_one(local: Value, comm: Comm, steps: tuple[MeshStep, ...], note: Note) -> Value:
    """`run_move` where a step reduces to extremes or products."""
    for step in steps:
        if isinstance(step, AllReduce) and not step.is_plain and _needs_grad(comm, local):
            if step.reduce_op == "product":  # no partner step: gather the factors and let autograd see the product
                local = run_steps(comm, (GatherParts(step.layout, step.axes),), local, note)
                local = comm.bind(_product)(local)
            else:
                local = _extreme(comm, step, local, note)
        else:
            local = run_steps(comm, (step,), local, note)
    return local


def _product(parts: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.mul, [parts[i] for i in range(len(parts))])  # unbind of nothing has a wrong gradient


def _needs_grad(comm: Comm, local: Value) -> bool:
    return is_transforming() or (torch.is_grad_enabled() and any(v.requires_grad for v in comm.values(local)))


def _extreme(comm: Comm, step: AllReduce, local: Value, note: Note) -> Value:
    """The greatest or least of the parts. Its gradient goes in equal shares to the parts that equal it."""
    with torch.no_grad():
        parts = comm.bind(torch.Tensor.detach)(local)
        found = run_steps(comm, (step,), parts, note)
        wins = comm.bind(_is_it, step.axes)(parts, found)
        counts = AllReduce(step.layout.replace(dtype=torch.int32), step.axes)
        winners = run_steps(comm, (counts,), comm.bind(torch.Tensor.int, step.axes)(wins), note)
        winners = comm.bind(torch.where, step.axes)(wins, winners, 0)
    spread = Spread(step.layout, step.axes)  # each rank takes its own share of the gradient
    box = _Winners(comm, spread, note, local, found, winners)
    values = [value for each in (local, found, winners) for value in comm.values(each)]
    return comm.assemble(box.after, _Extreme.apply(box, *values))


def _is_it(part: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    return (part == found) | (part.isnan() & found.isnan())


class _Winners:
    """A reduction to the greatest or least part, without its tensors."""

    def __init__(self, comm: Comm, spread: Spread, note: Note, local: Value, found: Value, winners: Value) -> None:
        self.comm, self.spread, self.note = comm, spread, note
        self.before, self.after, self.winners = map(comm.structure, (local, found, winners))
        self.parts, self.found = len(comm.values(local)), len(comm.values(found))  # how many distinct tensors

    def share(self, local: Value, winners: Sequence[torch.Tensor]) -> Value:
        """Each part's share of the gradient of the result."""
        share = lambda grad, n: torch.where(n > 0, grad / n.clamp(min=1), 0)  # noqa: E731
        axes = tuple(range(len(self.comm.shape)))
        return self.comm.bind(share, axes)(local, self.comm.assemble(self.winners, winners))


class _Extreme(torch.autograd.Function):
    """The result `found`, as a function of the parts. `winners` holds, for each element of a part, how many parts share
    its gradient; 0 where this part does not equal the result."""

    generate_vmap_rule = True

    @staticmethod
    def forward(box: _Winners, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(value.clone() for value in values[box.parts : box.parts + box.found])

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Any, ...], output: object) -> None:
        ctx.box, *values = inputs
        ctx.others = len(values) - ctx.box.parts
        winners = values[ctx.box.parts + ctx.box.found :]
        ctx.winners = None if is_transforming() else winners  # a move keeps nothing that a backward pass would free
        if ctx.winners is None:
            ctx.save_for_backward(*winners)
            ctx.save_for_forward(*winners)

    @staticmethod
    def backward(ctx: Ctx, *grads: torch.Tensor) -> tuple[Any, ...]:
        box = ctx.box
        whole = run_steps(box.comm, (box.spread,), box.comm.assemble(box.after, grads), box.note)
        back = box.share(whole, ctx.saved_tensors if ctx.winners is None else ctx.winners)
        return None, *box.comm.pick_gradients(box.before, back), *(None,) * ctx.others

    @staticmethod
    def jvp(ctx: Ctx, _: object, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        box = ctx.box
        mine = box.share(box.comm.assemble(box.before, tangents[: box.parts]), ctx.saved_tensors)
        return box.comm.pick(box.after, run_steps(box.comm, (box.spread.partner,), mine, box.note))
