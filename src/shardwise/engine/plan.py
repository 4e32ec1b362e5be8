"""From a call and a rule to a plan: which operands move, what is called locally, what layout comes out.

A plan is a function run(args, kwargs, local_args, local_kwargs): the call's own arguments, and the same arguments with
the local value in place of each distributed tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.comm.base import Comm
from shardwise.comm.bridge import kept_for_gradient
from shardwise.comm.capturing import tape_here, tapes
from shardwise.comm.record import Note, of_thread
from shardwise.context import is_strict, running
from shardwise.engine.aliasing import COPIES, after_write, before_write, note_copies, note_view, without_hooks
from shardwise.engine.call_shape import CallShape, Path, fetch, put, tensors_in
from shardwise.engine.keys import said_by_key
from shardwise.engine.local_copies import view_or_copy
from shardwise.engine.reduce_to_parts import spread_from_parts
from shardwise.engine.results import Finish, Memory, Results, one_wrapper
from shardwise.engine.saved import watched
from shardwise.engine.unseen import Again
from shardwise.errors import StrictError
from shardwise.layout import Layout
from shardwise.move import plan_steps, run_move
from shardwise.move.steps import MeshStep, Spread
from shardwise.protocols import LocalValue
from shardwise.strategy.empty_ranks import (
    as_views_of_nothing,
    imitating,
    in_new_memory_if_empty,
    is_empty_here_alone,
    knowing_its_views,
    rank_to_imitate,
)
from shardwise.strategy.program import leaves_empty
from shardwise.strategy.spec import Algorithm, LocalCall, PerCoords, Spec
from shardwise.torch_private.autograd import is_recorded, is_transforming, with_hook_errors_last
from shardwise.torch_private.tensors import schema_of, storage_id
from shardwise.wrapper import Wrapper, origin_of, shares_memory, storage_id_of

Plan = Callable[[Sequence[Any], dict[str, Any], list[Any], dict[str, Any]], Any]
Change = Callable[[Callable[..., object]], Callable[..., object]]
Moves = list[tuple[int, tuple[MeshStep, ...], bool]]  # of operands that change: number, steps, whether all only spread


def build_plan(func: Callable[..., Any], spec: Spec | Algorithm, call: CallShape, in_place: bool) -> Plan | None:
    """Build the plan that follows from a rule's answer; None where the result cannot be written into the first
    operand."""
    if isinstance(spec, Algorithm):
        result = call.check() if spec.is_checked else None
        memory = Memory(call, None if spec.knows_memory else result)
        run = _run_program(spec, func, call, memory)
        return None if in_place and not spec.writes else watched(run, call, None, may_keep_all=spec.keeps == "all")
    results = Results(spec, call, in_place)
    if results.refused:
        return lambda args, kwargs, local_args, local_kwargs: NotImplemented
    assignment = spec.assign(call.operands, results.metas, in_place)
    if assignment is None:
        return None
    pairs = zip(call.layouts, assignment.inputs, strict=True)
    inputs = [layout if layout.placements == p else layout.replace(placements=p) for layout, p in pairs]
    outputs = [] if in_place else results.layouts(call, assignment.outputs)
    split = split_axes(inputs, outputs)
    moves = operand_moves(call, inputs, assignment.splits or [split] * len(inputs))
    base = None if results.base is None else call.paths[results.base]
    moved = any(i == results.base and not spread_only for i, _, spread_only in moves)
    if results.same and results.single and not in_place and base is not None:
        return lambda args, kwargs, local_args, local_kwargs: fetch(args, kwargs, base)  # torch returns its argument
    change = as_it_is
    if results.base is None and spec.may_alias:
        change = in_new_memory
    elif results.base is not None and spec.view is not None:
        change = functools.partial(view_or_copy, spec.view)
    elif results.base is None and not in_place and assignment.splits is None and any(map(leaves_empty, inputs)):
        change = functools.partial(in_new_memory_if_empty, [output.dtype for output in outputs])
    local, takes_all = (assignment.local(inputs, outputs), False) if assignment.local is not None else (func, True)
    if spec.keeps == "operand":
        local = changed(local, keeping_operand)
    if assignment.around is not None and any(map(leaves_empty, inputs)):
        local = changed(local, assignment.around)
    imitates = False
    if results.base is None or in_place:
        alone, local = local, imitating_others(local, inputs, outputs, in_place)
        imitates = local is not alone
    local = changed(local, change)
    if not in_place and is_empty_here_alone([*inputs, *outputs]):
        local = changed(local, knowing_its_views if results.base is None else as_views_of_nothing)
    invoke = bind_local(call.mesh.comm, local, split, len(inputs))
    copies = {i: _moves_again(call, steps) for i, steps, spread_only in moves if not spread_only}
    if in_place:
        run = _run(call, inputs, moves, invoke, takes_all, lambda args, kwargs, out: args[0], assignment.reasons)
        noted = _with_writes_noted(run, call.name)
        if copies:
            return watched(noted, call, copies)
        noted.copies_nothing = True  # type: ignore[attr-defined]  # the ranks' own tensors meet in memory as torch's do
        return noted
    copied = base is not None and (moved or not assignment.aliases(inputs))
    plain = results.dtype in (None, outputs[0].dtype if outputs else None)  # a view of another dtype counts otherwise
    # a rank that imitates others gives another tensor than the one that autograd keeps
    keeps_others = bool(copies or spec.keeps not in ("", "all") or imitates)
    simple = not moves and not keeps_others and results.single and not copied and not results.same
    if simple and base in (None, (0,)) and plain:
        direct = _run_direct(call.paths, one_wrapper(outputs[0]), invoke, takes_all, results.begins[0])
        if direct is not None:
            return direct
    finish = results.finisher(outputs, base, copied, func, call.name)
    differentiable = any(out.dtype.is_floating_point or out.dtype.is_complex for out in outputs)
    run = _run(call, inputs, moves, invoke, takes_all, finish, assignment.reasons, differentiable)
    return watched(run, call, copies, may_keep_all=spec.keeps == "all") if keeps_others else run


def _moves_again(call: CallShape, steps: tuple[MeshStep, ...]) -> Again:
    comm, note = call.mesh.comm, Note(call.name)
    return lambda local: run_move(local, comm, steps, note)


def _run_program(algorithm: Algorithm, func: Callable[..., Any], call: CallShape, memory: Memory) -> Plan:
    """The plan that runs the program of an op. The ledger notes its moves under the op's name. If the op is a view op,
    its copied result is noted, too."""
    schema, program = schema_of(func), to_its_end(algorithm.run) if algorithm.writes else algorithm.run
    views = schema is not None and not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
    views = views or algorithm.is_view
    name, arguments = call.name, said_by_key(func, call.args, call.kwargs)  # a plan must not keep the call itself

    def run(args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        outer, of_thread.called_with = of_thread.called_with, arguments
        try:
            with running(name):
                result = program(*args, **kwargs)
        finally:
            of_thread.called_with = outer
        if not isinstance(result, Wrapper) or not any(result is arg for arg in args):
            memory.report(result, args)
            if not views and not is_transforming():
                no_views(result, args, memory)
        if views and not all(shares_memory(args[0], view) for view in tree_flatten(result)[0]):
            note_copies(func, args, kwargs, (0,), result, name)
        return result

    return run


def to_its_end(program: Callable[..., Any]) -> Callable[..., Any]:
    """Run a program that writes to its end. It writes last, and a checkpoint that recomputes may stop it before, once
    it has all saved tensors; torch's single kernel would have written by then."""

    def run(*args: object, **kwargs: object) -> Any:
        with with_hook_errors_last():
            return program(*args, **kwargs)

    return run


def no_views(result: object, args: Sequence[Any], memory: Memory | None = None) -> None:
    """Make sure that the local values of new tensors are no views, unless plain torch's results are views: autograd
    rebuilds the graph of a written view from its base, and a view that became a leaf and is then written loses the
    gradients of its own views. Views of the arguments `args`, and of copies of them, stay views."""
    given: set[int] | None = None
    made = [out for out in tree_flatten(result)[0] if isinstance(out, Wrapper)]
    known = memory is not None and memory.is_known and len(memory.hidden_views) == len(made)
    hidden = memory.hidden_views if memory is not None and known else [True] * len(made)
    for out, stays in zip(made, hidden, strict=True):
        if out._layout.mesh.comm.outside:
            continue
        comm = out._layout.mesh.comm
        values = comm.values(out._local)
        if any(value._base is not None and not (stays and value.requires_grad) for value in values):
            given = {storage_id_of(t) for _, t in tensors_in(args, {})} if given is None else given
            if storage_id_of(out) not in COPIES and storage_id_of(out) not in given:
                out._local = comm.rebuild(out._local, [_no_view(value, stays) for value in values])


def _no_view(value: torch.Tensor, stays: bool) -> torch.Tensor:
    if not value.requires_grad:
        return value.detach()
    return value if stays else cast(torch.Tensor, torch.ops.aten._unsafe_view(value, value.shape))


def _run_direct(
    paths: list[Path], wrap_one: Callable[..., Any], invoke: Callable[..., Any], takes_all: bool, begin: int | None
) -> Plan | None:
    """The shortest plans, where nothing moves and one tensor comes out: a new one, or a view of the first argument. A
    view begins `begin` elements after its argument in memory, and is noted if the argument is a copy of a view. None
    for arguments in other places."""
    is_view, behind = begin is not None, begin or 0

    def view(args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        result = wrap_one(invoke(local_args[0]), args[0]._offset + behind)
        result._origin = args[0]._origin or origin_of(args[0])
        if COPIES:
            note_view(args[0], result)
        return result

    def view_of_call(args: Sequence[Wrapper], _: object, local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        result = wrap_one(invoke(*local_args, **local_kwargs), args[0]._offset + behind)
        result._origin = args[0]._origin or origin_of(args[0])
        if COPIES:
            note_view(args[0], result)
        return result

    if takes_all:
        whole: Plan = lambda args, kwargs, local_args, local_kwargs: wrap_one(invoke(*local_args, **local_kwargs))
        return view_of_call if is_view else whole
    if paths == [(0,)]:
        return view if is_view else lambda args, kwargs, local_args, local_kwargs: wrap_one(invoke(local_args[0]))
    if paths == [(0,), (1,)] and not is_view:
        return lambda args, kwargs, local_args, local_kwargs: wrap_one(invoke(local_args[0], local_args[1]))
    return None


def _run(
    call: CallShape,
    inputs: list[Layout],
    moves: Moves,
    invoke: Callable[..., Any],
    takes_all: bool,
    finish: Finish,
    reasons: Sequence[str],
    differentiable: bool = True,
) -> Plan:
    """The plan in general: move the operands that must move, call locally, wrap the results."""
    # a plan must not keep the call itself, which holds its tensors
    name, paths, layouts, comm = call.name, call.paths, call.layouts, call.mesh.comm
    note = Note(name, called_with=said_by_key(call.func, call.args, call.kwargs))

    def move(args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> None:
        for i, steps, spread_only in moves:
            tensor = fetch(args, kwargs, paths[i])
            value = spread(tensor, steps, note) if spread_only else run_move(tensor._local, comm, steps, note)
            put(local_args, local_kwargs, paths[i], value)

    if not differentiable:  # as a comparison: torch ignores the operands' graphs, and a move could refuse some of them
        move = torch.no_grad()(move)

    def run(args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        if moves:
            if is_strict():
                refuse(name, moves, layouts, inputs, reasons)
            move(args, kwargs, local_args, local_kwargs)
        if takes_all:
            return finish(args, kwargs, invoke(*local_args, **local_kwargs))
        return finish(args, kwargs, invoke(*(fetch(local_args, local_kwargs, path) for path in paths)))

    return run


def _with_writes_noted(plan: Plan, name: str) -> Plan:
    """The plan of an op that writes into its first argument: a tensor, or a list of them."""

    def run(args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        written = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
        if COPIES:
            recorded = torch.is_grad_enabled() and any(t.requires_grad for _, t in tensors_in(args, kwargs))
            for target in written:
                before_write(target, name, recorded)
            for target in written:
                without_hooks(target)
            local_args[0] = args[0]._local if written is not args[0] else [target._local for target in written]
        result = plan(args, kwargs, local_args, local_kwargs)
        after_write(*written)
        return result

    return run


def in_new_memory(func: Callable[..., object]) -> Callable[..., object]:
    """`func` with a copy of each result that shares memory with its first argument: where reshape of the whole tensor
    copies, that of a rank's shard may return a view."""

    def call(x: torch.Tensor, *args: object, **kwargs: object) -> object:
        own = lambda out: out.clone() if storage_id(out) == storage_id(x) else out  # noqa: E731
        result = func(x, *args, **kwargs)
        return own(result) if type(result) is torch.Tensor else tree_map_only(torch.Tensor, own, result)

    return call


def keeping_operand(func: Callable[..., object]) -> Callable[..., object]:
    """`func`, such that autograd takes the gradient as a function of the first argument."""
    return lambda x, *args: func(kept_for_gradient(x), *args)


def changed(local: LocalCall, *changes: Change) -> LocalCall:
    """The local call with these changes, the first one innermost."""
    for change in changes:
        local = PerCoords(change(local.func), local.value_at) if isinstance(local, PerCoords) else change(local)
    return local


def imitating_others(local: LocalCall, inputs: Sequence[Layout], outputs: Sequence[Layout], writes: bool) -> LocalCall:
    """The local call; on a rank without elements, one that imitates a rank that has some."""
    layouts = [*inputs, *outputs]
    coords = rank_to_imitate(layouts) if is_empty_here_alone(layouts) else None
    if coords is None:
        return local
    shapes = [layout.local_shape_at(coords) for layout in inputs]
    last = (local.value_at(coords),) if isinstance(local, PerCoords) else ()
    return changed(local, lambda func: imitating(func, shapes, last, writes))


def as_it_is(func: Callable[..., object]) -> Callable[..., object]:
    return func


def bind_local(comm: Comm, local: LocalCall, split: Sequence[int], count: int) -> Callable[..., Any]:
    """The local call of a rule as a function of `count` local values."""
    if not isinstance(local, PerCoords):
        return comm.bind(local, split)
    bound, value = comm.bind(local.func, split), comm.per_rank(local.value_at)
    if count == 1:
        return lambda local: bound(local, value)
    return lambda *values: bound(*values, value)


def split_axes(inputs: Sequence[Layout], outputs: Sequence[Layout]) -> tuple[int, ...]:
    """The axes on which ranks do different work."""
    by_axis = enumerate(zip(*(layout.placements for layout in (*inputs, *outputs)), strict=True))
    return tuple(axis for axis, places in by_axis if not all(p.is_replicate() for p in places))


def operand_moves(call: CallShape, inputs: Sequence[Layout], splits: Sequence[Sequence[int]]) -> Moves:
    """The moves of operands to the layouts they need; `splits` are the axes on which each one's call is split."""
    moves: Moves = []
    for i, (now, need, split) in enumerate(zip(call.layouts, inputs, splits, strict=True)):
        spread_on = tuple(axis for axis in split if need.placements[axis].is_replicate())
        steps = plan_steps(now, need, spread_on)
        if steps:
            moves.append((i, steps, all(isinstance(step, Spread) for step in steps)))
    return moves


def spread(tensor: Wrapper, steps: tuple[MeshStep, ...], note: Note) -> LocalValue:
    """The local value with which a Replicate operand enters a split call: its gradient is summed over the ranks. It is
    kept on the tensor, so that several calls share one all-reduce."""
    local = tensor._local
    if not torch.is_grad_enabled():
        return local
    comm = tensor._layout.mesh.comm
    first = comm.first(local)
    if not is_recorded(first):
        return local
    # values from inside a transform cannot be used outside of it; a tangent has no version counter
    if is_transforming():
        return run_move(local, comm, steps, note)
    key = tuple(step.axes for step in steps)
    kept = tensor._spreads
    if kept is None:
        kept = tensor._spreads = {}
    found = kept.get(key)
    version = first._version
    if found is not None and found[0] is local and found[1] == version and _is_of_program(comm, found[2]):
        return found[2]
    value = spread_from_parts(tensor, key)
    if value is None:
        value = run_move(local, comm, steps, note)
    kept[key] = (local, version, value)
    return value


def _is_of_program(comm: Comm, value: LocalValue) -> bool:
    """Whether a value that was made earlier may be used. During a capture, only one that is part of the captured
    program."""
    if not tapes or (tape := tape_here()) is None:
        return True
    return all(map(tape.is_of_program, comm.values(value)))


def refuse(name: str, moves: Moves, now: Sequence[Layout], need: Sequence[Layout], reasons: Sequence[str]) -> None:
    """Under strict(): raise if an operand would move, and say which one, what conflicts, and what to write instead."""
    for i, steps, _ in moves:
        if any(step.kind != "local" for step in steps):
            here, there = now[i], need[i]
            others = ", ".join(f"operand {j}: {_places(layout)}" for j, layout in enumerate(now))
            meeting = f" to meet the others ({others})" if len(now) > 1 else ""
            axes = zip(here.mesh.axis_names, here.placements, there.placements, reasons, strict=False)
            why = "; ".join(f"on axis {a!r} the cheapest way is to {reason}" for a, p, q, reason in axes if p != q)
            raise StrictError(
                f"{name} would communicate under strict(): operand {i} of shape {here.shape} is laid out "
                f"{_places(here)} but must be {_places(there)}{meeting}"
                f"{': ' + why if why else ''}. Ask for it: "
                f"x.redistribute(placements=[{', '.join(map(repr, there.placements))}])"
            )


def _places(layout: Layout) -> str:
    return "[" + ", ".join(map(str, layout.placements)) + "]"
