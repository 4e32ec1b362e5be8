"""What a plan returns: local results wrapped with the layouts that the plan knows, copies of views noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.engine.aliasing import COPIES, note_copies, note_view
from shardwise.engine.call_shape import CallShape, Path, fetch
from shardwise.engine.local_copies import note_local_copy
from shardwise.errors import RuleError
from shardwise.layout import Layout
from shardwise.protocols import LocalValue
from shardwise.strategy.spec import Result, Spec
from shardwise.torch_private.tensors import is_any_autocast_enabled, storage_id
from shardwise.wrapper import Wrapper, origin_of, restride, retype, shares_memory, wrap, wrapper_of

Given = TypeVar("Given")
Finish = Callable[[Sequence[Any], dict[str, Any], Any], Any]  # (args, kwargs, local result) -> the call's result

_ONE = tree_flatten(0)[1]
_NONE = tree_flatten(())[1]


class Results:
    """The outputs of a call as meta tensors (or as the rule describes them), and the container they come in."""

    def __init__(self, spec: Spec, call: CallShape, in_place: bool) -> None:
        flat: list[Any]
        if spec.result is not None and 0 not in spec.result.shape:  # the strides of empty results follow no rule
            flat, self.tree = [spec.result], _ONE
        elif in_place and spec.in_place_without_meta:
            flat, self.tree = [], _NONE
        elif spec.run_meta is not None:
            with torch.no_grad():
                flat, self.tree = tree_flatten(spec.run_meta(call.func))
        else:
            flat, self.tree = tree_flatten(call.described())
        self.refused = any(out is NotImplemented for out in flat)  # as of x == None: Python then asks the other operand
        self.is_tensor = [isinstance(out, (torch.Tensor, Result)) for out in flat]
        self.metas = [out for out, yes in zip(flat, self.is_tensor, strict=True) if yes]
        found = [call.base_of(meta) for meta in self.metas]
        bases = [i for i in found if i is not None]
        self.base = bases[0] if bases else None  # the operand torch's results are views of
        # for each result: None for a new tensor; for a view, its offset in memory relative to its base
        self.begins = [None if i is None else meta.storage_offset() for i, meta in zip(found, self.metas, strict=True)]
        self.dtype = None if self.base is None else call.layouts[self.base].dtype  # of that operand
        self.same = self.base is not None and self.metas[0] is call.metas[self.base]  # or the operand itself

    @property
    def single(self) -> bool:
        """Whether the call returns one tensor."""
        return self.tree.is_leaf() and self.is_tensor == [True]

    def layouts(self, call: CallShape, placements: Sequence[Any]) -> list[Layout]:
        """The layout of each output, from its placements."""
        asked = call.kwargs.get("device")  # meta results do not tell on which device the real ones will be
        default = call.layouts[0].device if asked is None else torch.device(asked)
        keys = [
            (places, tuple(out.shape), out.dtype, out.stride(), _device_of(out, default))
            for out, places in zip(self.metas, placements, strict=True)
        ]
        made = {key: Layout.make(call.mesh, *key) for key in set(keys)}  # the results of list ops are mostly alike
        return [made[key] for key in keys]

    def finisher(
        self, outputs: Sequence[Layout], base: Path | None, copied: bool, func: Callable[..., Any], name: str
    ) -> Finish:
        """A function that wraps local results. In torch they are views of the argument at `base`; it notes those that
        are copies here."""
        wrap_all, whole = self._wrapper(outputs), self.dtype is None or self.dtype == outputs[0].dtype
        if base is None or isinstance(base[0], str):
            return lambda args, kwargs, out: wrap_all(out)
        may_be_same = self.same and not copied

        def finish(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
            source = fetch(args, kwargs, base)
            if may_be_same and source._layout.mesh.comm.same(out, source._local):
                return source  # contiguous() of a contiguous tensor, to() of the dtype that it has
            at = source._offset
            result = wrap_all(out, at if whole or not at else at * source.dtype.itemsize // outputs[0].dtype.itemsize)
            if may_be_same and shares_memory(source, result):
                return source  # flatten() of a flat tensor
            origin = origin_of(source)
            for view in (result,) if isinstance(result, Wrapper) else tree_flatten(result)[0]:
                if isinstance(view, Wrapper):
                    view._origin = origin
            if copied:
                note_copies(func, args, kwargs, base, result, name)
            elif may_be_same:  # only on this rank: its local tensor has other strides than the whole one
                pairs = zip(*map(source._layout.mesh.comm.values, (source._local, out)), strict=True)
                for one, other in pairs:
                    if storage_id(one) != storage_id(other):
                        note_local_copy(one, other, lambda value: value)
            elif COPIES:
                for view in tree_flatten(result)[0]:
                    note_view(source, view)
            return result

        return finish

    def _wrapper(self, outputs: Sequence[Layout]) -> Callable[..., Any]:
        """A function that wraps all local results in their container. Its second argument is the storage offset of the
        base, from which the offsets of views follow."""
        if self.single:
            wrap_one, begin = one_wrapper(outputs[0]), self.begins[0]
            return wrap_one if not begin else lambda result, at=0: wrap_one(result, at + begin)
        if self.tree.type in (list, tuple) and len(outputs) == self.tree.num_children == self.tree.num_leaves:
            kind, by_layout = self.tree.type, {layout: wrapper_of(layout) for layout in outputs}
            wrappers = [by_layout[layout] for layout in outputs]
            begins = [begin for begin in self.begins if begin is not None]
            if not begins:
                return lambda result, at=0: kind([wrapped(x) for wrapped, x in zip(wrappers, result, strict=True)])
            if len(begins) == len(outputs):
                each = lambda result: zip(wrappers, result, begins, strict=True)
                return lambda result, at=0: kind([wrapped(x, at + begin) for wrapped, x, begin in each(result)])

        def wrap_all(result: object, at: int = 0) -> Any:
            made = zip(outputs, self.begins, strict=True)
            flat, _ = tree_flatten(result, is_leaf=lambda x: isinstance(x, torch.Tensor))
            wrapped = [_at(x, *next(made), at) if t else x for x, t in zip(flat, self.is_tensor, strict=True)]
            return tree_unflatten(wrapped, self.tree)

        return wrap_all


class Memory:
    """The strides and storage offsets that the results of a call have in plain torch, as far as they follow from
    shapes."""

    def __init__(self, call: CallShape, described: object) -> None:
        """`described` is the call's result on meta tensors; None where there is none."""
        flat = [out for out in tree_flatten(described)[0] if isinstance(out, torch.Tensor)]
        bases = [call.base_of(out) for out in flat]
        paths = [None if base is None else call.paths[base] for base in bases]
        self.of_results = [
            (tuple(out.shape), out.stride(), int(out.storage_offset()), path)
            for out, path in zip(flat, paths, strict=True)
        ]
        self.is_known = described is not None
        # which results are views of a tensor that the call does not return
        self.hidden_views = [base is None and out._base is not None for out, base in zip(flat, bases, strict=True)]

    def report(self, result: object, args: Sequence[Wrapper]) -> None:
        """Set these strides and offsets on the tensors in `result`. One of another shape depends on values, and has its
        own already."""
        tensors = [out for out in tree_flatten(result)[0] if isinstance(out, Wrapper)]
        if len(tensors) != len(self.of_results):
            return
        for tensor, (shape, stride, begin, base) in zip(tensors, self.of_results, strict=True):
            if tensor._layout.shape == shape:
                restride(tensor, stride, begin + (args[0]._offset if base == (0,) else 0))


def _at(local: LocalValue, layout: Layout, begin: int | None, at: int) -> Wrapper:
    return wrap(local, layout, 0 if begin is None else at + begin)


def one_wrapper(layout: Layout) -> Callable[..., Any]:
    """A function that wraps a single local result. Under autocast its dtype is known only when it is there."""
    if not is_any_autocast_enabled():
        return wrapper_of(layout)

    def wrap_cast(local: LocalValue, offset: int = 0) -> Any:
        dtype = layout.mesh.comm.first(local).dtype
        return wrap(local, layout if dtype == layout.dtype else layout.replace(dtype=dtype), offset)

    return wrap_cast


def _device_of(out: object, default: torch.device) -> torch.device:
    """The device of an output: that of the operands (meta tensors say none), unless the op asks for another."""
    device = getattr(out, "device", default)
    return default if device.type == "meta" else device


_CHECKED = 8  # simulated ranks whose shapes are looked at
Plan = Callable[..., Any]


def checked(name: str, plan: Plan, result: Given) -> tuple[Plan, Given]:
    """What the first run of a plan gave, and the plan for the next ones. Torch may have told the planner another dtype
    than it computes (its kernels for meta tensors are written by hand): then the results say what they are. If it told
    another shape, this raises. Some GPU kernels return an empty internal buffer, for which torch told another shape;
    that is allowed."""
    tensors = [out for out in tree_flatten(result)[0] if isinstance(out, Wrapper)]
    dtypes = [_computed_dtype(name, out) for out in tensors]
    if dtypes == [out._layout.dtype for out in tensors]:
        return plan, result

    def typed(*call: object) -> object:
        return _typed(plan(*call), dtypes)

    return typed, _typed(result, dtypes)


def _computed_dtype(name: str, out: Wrapper) -> torch.dtype:
    """The dtype of what the ranks hold; raises where a shape is another one than the layout says."""
    layout, comm = out._layout, out._layout.mesh.comm
    if comm.outside:
        return layout.dtype
    for coords in islice(comm.coords_here(), _CHECKED):
        value = comm.at(out._local, coords)
        here, expected = tuple(value.shape), layout.local_shape_at(coords)
        if here != expected and not (value.is_cuda and here == (0,)):
            raise RuleError(
                f"{name}: a rank computed a tensor of shape {here} where {layout} has {expected}; this is a defect of "
                f"shardwise, or of this version of torch. Compute it on local tensors (to_local) meanwhile"
            )
    return comm.first(out._local).dtype


def _typed(result: Given, dtypes: Sequence[torch.dtype]) -> Given:
    for out, dtype in zip((x for x in tree_flatten(result)[0] if isinstance(x, Wrapper)), dtypes, strict=True):
        if out._layout.dtype != dtype:
            retype(out, dtype)
    return result
