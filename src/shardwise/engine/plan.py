"""From a call and a rule to a plan: which operands move, what is called locally, what layout comes out.

A plan is a function run(args, kwargs, locals, local_kwargs): the call's own arguments, and the same with every tensor
replaced by its local value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardwise.comm.record import Note
from shardwise.engine.aliasing import after_write, before_write, note_copy, note_view
from shardwise.engine.context import is_strict
from shardwise.errors import MeshError, StrictError
from shardwise.layout import Layout
from shardwise.move import plan_steps, run_move
from shardwise.move.steps import MoveStep, Spread
from shardwise.rules.spec import Algorithm, Operand, PerCoords, Result
from shardwise.wrapper import Wrapper, wrap, wrapper_of

Plan = Callable[[Sequence[Any], dict[str, Any], list[Any], dict[str, Any]], Any]
Path = tuple[Any, ...]


def op_name(func: Any) -> str:
    """The name of an op for people: no overloads, no dunders, no in-place mark."""
    schema = getattr(func, "_schema", None)
    if schema is not None:
        return schema.name.removeprefix("aten::")
    name = getattr(func, "__name__", str(func))
    if name == "__getitem__":
        return "x[...]"
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Every distributed tensor of a call with the path to it, in order; lists and tuples are looked into."""
    for i, value in enumerate(args):
        yield from _tensors(value, (i,))
    for name, value in kwargs.items():
        yield from _tensors(value, (name,))


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Wrapper):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _tensors(item, (*path, i))


def fetch(args: Sequence[Any], kwargs: dict[str, Any], path: Path) -> Any:
    value = kwargs[path[0]] if isinstance(path[0], str) else args[path[0]]
    for i in path[1:]:
        value = value[i]
    return value


def put(args: list[Any], kwargs: dict[str, Any], path: Path, value: Any) -> None:
    """Set the value at `path`; containers on the way are lists by then."""
    holder: Any = kwargs if isinstance(path[0], str) else args
    for key in path[:-1]:
        if not isinstance(holder[key], list):
            holder[key] = list(holder[key])
        holder = holder[key]
    holder[path[-1]] = value


def meta_like(layout: Layout) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def common_mesh(name: str, layouts: Sequence[Layout]) -> Any:
    mesh = layouts[0].mesh
    for layout in layouts[1:]:
        if layout.mesh is not mesh:
            raise MeshError(
                f"{name}: operands are on different meshes, {mesh!r} and {layout.mesh!r}; "
                f"redistribute one of them to the other's mesh first"
            )
    return mesh


def device_of(out: Any, default: Any) -> Any:
    """Where an output lives: where the operands do, unless the op says another place."""
    device = getattr(out, "device", default)
    return default if device.type == "meta" else device


def autocast_wrapper(layout: Layout) -> Callable[[Any], Any]:
    """Under autocast the local result knows the dtype; meta kernels do not."""

    def wrap_local(local: Any) -> Any:
        dtype = layout.mesh.comm.first(local).dtype
        return wrap(local, layout if dtype == layout.dtype else layout.replace(dtype=dtype))

    return wrap_local


class CallShape:
    """A call with its tensors named: operands for rules, metas for shapes."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        found = list(tensors_in(args, kwargs))
        self.func, self.args, self.kwargs, self.name = func, args, kwargs, op_name(func)
        self.paths = [path for path, _ in found]
        self.tensors = [tensor for _, tensor in found]
        self.layouts: list[Layout] = [t._layout for t in self.tensors]
        self.mesh = common_mesh(self.name, self.layouts)
        self.metas: list[torch.Tensor] = []
        self.operands = [Operand(layout, i) for i, layout in enumerate(self.layouts)]

    def with_tensors(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the tensors replaced."""
        spare = iter(values)
        return tree_map_only(Wrapper, lambda _: next(spare), (tuple(self.args), dict(self.kwargs)))

    def run_meta(self) -> Any:
        """The call on meta tensors: global shapes, strides and dtypes of the result; torch's own errors for bad input."""
        self.metas = [meta_like(layout) for layout in self.layouts]
        args, kwargs = self.with_tensors(self.metas)
        with torch.no_grad():
            return self.func(*args, **kwargs)

    def base_of(self, out: Any) -> int | None:
        """The operand that `out`, a result of `run_meta`, is a view of."""
        base = getattr(out, "_base", None)
        return next((i for i, meta in enumerate(self.metas) if meta is base or meta is out), None)


_LEAF = tree_flatten(0)[1]


def build_plan(func: Any, spec: Any, call: CallShape, in_place: bool) -> Plan | None:
    """The plan a spec leads to; None where the result cannot be written into the first operand as it is laid out."""
    if isinstance(spec, Algorithm):
        program = spec.run
        return lambda args, kwargs, locals, local_kwargs: program(*args, **kwargs)
    known = getattr(spec, "result", None)
    if in_place and getattr(spec, "in_place_without_meta", False):
        outs, tree = [], tree_flatten(())[1]
    else:
        outs, tree = ([known], _LEAF) if known is not None else tree_flatten(call.run_meta())
    is_tensor = [isinstance(out, (torch.Tensor, Result)) for out in outs]
    metas = [out for out, yes in zip(outs, is_tensor, strict=True) if yes]
    assignment = spec.assign(call.operands, metas, in_place)
    if assignment is None:
        return None
    device = call.layouts[0].device
    inputs = [layout.replace(placements=p) for layout, p in zip(call.layouts, assignment.inputs, strict=True)]
    outputs = [] if in_place else [
        Layout.make(call.mesh, p, tuple(o.shape), o.dtype, o.stride(), device_of(o, device))
        for o, p in zip(metas, assignment.outputs, strict=True)
    ]  # fmt: skip
    split = split_axes(call.mesh, inputs, outputs)
    moves = operand_moves(call, inputs, split)
    note = Note(call.name)
    comm = call.mesh.comm
    if assignment.local is None:
        invoke, takes_all = comm.bind(func, split), True
    else:
        invoke, takes_all = bind_local(comm, assignment.local(inputs, outputs), split, len(inputs)), False
    base = next((i for i in map(call.base_of, metas) if i is not None), None)
    copied_view = base is not None and (
        any(i == base and not spread_only for i, _, spread_only in moves) or not assignment.aliases(inputs)
    )
    if in_place:
        finish: Callable[[Any, Any], Any] = lambda args, _: args[0]  # noqa: E731
    elif copied_view:
        finish = _wrap_copied_view(call.name, call.paths[base or 0], outputs, is_tensor, tree)
    elif tree.is_leaf() and is_tensor[0]:
        wrap_one = wrapper_of(outputs[0]) if not torch._C._is_any_autocast_enabled() else autocast_wrapper(outputs[0])
        if base == 0 and call.paths[0] == (0,):
            wrap_one = _wrap_view(wrap_one)
            finish = lambda args, out: wrap_one(out, args[0])  # noqa: E731
            if not moves and call.paths == [(0,)] and not takes_all:
                return lambda args, kwargs, locals, local_kwargs: wrap_one(invoke(locals[0]), args[0])
        elif not moves and takes_all:
            return lambda args, kwargs, locals, local_kwargs: wrap_one(invoke(*locals, **local_kwargs))
        elif not moves and call.paths == [(0,)]:
            return lambda args, kwargs, locals, local_kwargs: wrap_one(invoke(locals[0]))
        elif not moves and call.paths == [(0,), (1,)]:
            return lambda args, kwargs, locals, local_kwargs: wrap_one(invoke(locals[0], locals[1]))
        else:
            finish = lambda _, out: wrap_one(out)  # noqa: E731
    else:
        finish = _wrap_many(outputs, is_tensor, tree)
    # what the plan keeps: never the call itself, which holds its tensors
    name, paths, layouts = call.name, call.paths, call.layouts

    def run(args: Sequence[Any], kwargs: dict[str, Any], locals: list[Any], local_kwargs: dict[str, Any]) -> Any:
        if in_place:
            written = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            for target in written:
                before_write(target, name)
        if moves:
            if is_strict():
                refuse(name, moves, layouts, inputs)
            for i, steps, spread_only in moves:
                tensor = fetch(args, kwargs, paths[i])
                if spread_only:
                    value = spread(tensor, steps, note)
                else:
                    value = run_move(tensor._local, comm, steps, note)
                put(locals, local_kwargs, paths[i], value)
        if takes_all:
            result = invoke(*locals, **local_kwargs)
        else:
            result = invoke(*(fetch(locals, local_kwargs, path) for path in paths))
        if in_place:
            for target in written:
                after_write(target)
        return finish(args, result)

    return run


def bind_local(comm: Any, local: Any, split: Sequence[int], count: int) -> Callable[..., Any]:
    """A rule's local call as a function of local values."""
    if not isinstance(local, PerCoords):
        return comm.bind(local, split)
    bound, value = comm.bind(local.func, split), comm.per_rank(local.of)
    if count == 1:
        return lambda local: bound(local, value)
    return lambda *locals: bound(*locals, value)


def split_axes(mesh: Any, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> tuple[int, ...]:
    """The axes on which ranks do different work."""
    return tuple(
        axis
        for axis in range(len(mesh.shape))
        if any(not layout.placements[axis].is_replicate() for layout in (*inputs, *outputs))
    )


Moves = list[tuple[int, tuple[MoveStep, ...], bool]]


def operand_moves(call: CallShape, inputs: Sequence[Layout], split: Sequence[int]) -> Moves:
    """For each operand that must change, its steps, and whether they only spread (so that no data moves)."""
    moves: Moves = []
    for i, (now, need) in enumerate(zip(call.layouts, inputs, strict=True)):
        spread_on = tuple(axis for axis in split if need.placements[axis].is_replicate())
        steps = plan_steps(now, need, spread_on)
        if steps:
            moves.append((i, steps, all(isinstance(step, Spread) for step in steps)))
    return moves


def spread(tensor: Any, steps: tuple[MoveStep, ...], note: Note) -> Any:
    """A Replicate operand entering a split call. Kept on the tensor, so that several users share one all-reduce."""
    local = tensor._local
    if not torch.is_grad_enabled():
        return local
    comm = tensor._layout.mesh.comm
    first = comm.first(local)
    if not first.requires_grad:
        return local
    key = tuple(step.axis for step in steps)
    kept = tensor._spreads
    if kept is None:
        kept = tensor._spreads = {}
    found = kept.get(key)
    version = first._version
    if found is not None and found[0] is local and found[1] == version:
        return found[2]
    value = run_move(local, comm, steps, note)
    kept[key] = (local, version, value)
    return value


def _wrap_view(wrap_one: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """For results that share memory with the tensor they come from, or are that tensor (contiguous, to)."""

    def wrap_view(out: Any, base: Any) -> Any:
        if base._layout.mesh.comm.same(out, base._local):
            return base
        view = wrap_one(out)
        note_view(base, view)
        return view

    return wrap_view


def _wrap_many(outputs: Sequence[Layout], is_tensor: Sequence[bool], tree: Any) -> Callable[[Any, Any], Any]:
    def finish(args: Any, result: Any) -> Any:
        layouts = iter(outputs)
        flat, _ = tree_flatten(result, is_leaf=lambda x: isinstance(x, torch.Tensor))
        wrapped = [wrap(x, next(layouts)) if t else x for x, t in zip(flat, is_tensor, strict=True)]
        return tree_unflatten(wrapped, tree)

    return finish


def _wrap_copied_view(name: str, base: Path, outputs: Sequence[Layout], is_tensor: Sequence[bool], tree: Any) -> Any:
    wrap_all = _wrap_many(outputs, is_tensor, tree)

    def finish(args: Any, result: Any) -> Any:
        wrapped = wrap_all(args, result)
        for copy in tree_flatten(wrapped)[0]:
            if not isinstance(base[0], str):
                note_copy(fetch(args, {}, base), copy, name)
        return wrapped

    return finish


def refuse(name: str, moves: Moves, now: Sequence[Layout], need: Sequence[Layout]) -> None:
    """Under strict(): say which operand would move, why, and what to write instead."""
    for i, steps, _ in moves:
        if any(step.kind != "local" for step in steps):
            here, there = now[i], need[i]
            others = ", ".join(f"operand {j}: {_places(layout)}" for j, layout in enumerate(now))
            raise StrictError(
                f"{name} would communicate under strict(): operand {i} of shape {here.shape} is laid out "
                f"{_places(here)} but must be {_places(there)} to meet the others ({others}). Ask for it: "
                f"x.redistribute(placements=[{', '.join(map(repr, there.placements))}])"
            )


def _places(layout: Layout) -> str:
    return "[" + ", ".join(map(str, layout.placements)) + "]"


__all__ = ["CallShape", "Plan", "build_plan", "op_name", "refuse", "spread"]
