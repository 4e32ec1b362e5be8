"""What a plan returns: local results wrapped with the layouts that the plan knows, copies of views noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.engine.aliasing import COPIES, note_copies, note_view
from shardwise.engine.call_shape import CallShape, Path, fetch
from shardwise.layout import Layout
from shardwise.protocols import LocalValue
from shardwise.strategy.spec import Result, Spec
from shardwise.torch_private import is_any_autocast_enabled
from shardwise.wrapper import shares_memory, wrap, wrapper_of

Finish = Callable[[Sequence[Any], dict[str, Any], Any], Any]  # (args, kwargs, local result) -> the call's result

_ONE = tree_flatten(0)[1]
_NONE = tree_flatten(())[1]


class Results:
    """The outputs of a call as meta tensors (or as the rule describes them), and the container they come in."""

    def __init__(self, spec: Spec, call: CallShape, in_place: bool) -> None:
        flat: list[Any]
        if spec.result is not None:
            flat, self.tree = [spec.result], _ONE
        elif in_place and spec.in_place_without_meta:
            flat, self.tree = [], _NONE
        elif spec.run_meta is not None:
            with torch.no_grad():
                flat, self.tree = tree_flatten(spec.run_meta(call.func))
        else:
            flat, self.tree = tree_flatten(call.described())
        self.refused = any(out is NotImplemented for out in flat)  # x == None: the other operand may know
        self.is_tensor = [isinstance(out, (torch.Tensor, Result)) for out in flat]
        self.metas = [out for out, yes in zip(flat, self.is_tensor, strict=True) if yes]
        bases = [i for i in map(call.base_of, self.metas) if i is not None]
        self.base = bases[0] if bases else None  # the operand torch's results are views of
        self.same = self.base is not None and self.metas[0] is call.metas[self.base]  # or the operand itself

    @property
    def single(self) -> bool:
        """Whether the call returns one tensor."""
        return self.tree.is_leaf() and self.is_tensor == [True]

    def layouts(self, call: CallShape, placements: Sequence[Any]) -> list[Layout]:
        """The layout of each output, from its placements."""
        default = call.layouts[0].device
        keys = [
            (places, tuple(out.shape), out.dtype, out.stride(), _device_of(out, default))
            for out, places in zip(self.metas, placements, strict=True)
        ]
        made = {key: Layout.make(call.mesh, *key) for key in set(keys)}  # the results of list ops are mostly alike
        return [made[key] for key in keys]

    def finisher(
        self, outputs: Sequence[Layout], base: Path | None, copied: bool, func: Callable[..., Any], name: str
    ) -> Finish:
        """A function that wraps local results. Torch's are views of the argument at `base`; it notes where ours are
        copies instead."""
        wrap_all = self._wrapper(outputs)
        if base is None or isinstance(base[0], str):
            return lambda args, kwargs, out: wrap_all(out)
        may_be_same = self.same and not copied

        def finish(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
            source = fetch(args, kwargs, base)
            if may_be_same and source._layout.mesh.comm.same(out, source._local):
                return source  # contiguous() of a contiguous tensor, to() of the dtype that it has
            result = wrap_all(out)
            if may_be_same and shares_memory(source, result):
                return source  # flatten() of a flat tensor
            if copied or may_be_same:
                note_copies(func, args, kwargs, base, result, name)
            elif COPIES:
                for view in tree_flatten(result)[0]:
                    note_view(source, view)
            return result

        return finish

    def _wrapper(self, outputs: Sequence[Layout]) -> Callable[[Any], Any]:
        """A function that wraps all local results in the container they come in."""
        if self.single:
            return one_wrapper(outputs[0])
        if self.tree.type in (list, tuple) and len(outputs) == self.tree.num_children == self.tree.num_leaves:
            kind, by_layout = self.tree.type, {layout: wrapper_of(layout) for layout in outputs}
            wrappers = [by_layout[layout] for layout in outputs]
            return lambda result: kind([wrapped(x) for wrapped, x in zip(wrappers, result, strict=True)])

        def wrap_all(result: Any) -> Any:
            layouts = iter(outputs)
            flat, _ = tree_flatten(result, is_leaf=lambda x: isinstance(x, torch.Tensor))
            wrapped = [wrap(x, next(layouts)) if t else x for x, t in zip(flat, self.is_tensor, strict=True)]
            return tree_unflatten(wrapped, self.tree)

        return wrap_all


def one_wrapper(layout: Layout) -> Callable[[LocalValue], Any]:
    """A function that wraps a single local result. Under autocast its dtype is known only when it is there."""
    if not is_any_autocast_enabled():
        return wrapper_of(layout)

    def wrap_cast(local: LocalValue) -> Any:
        dtype = layout.mesh.comm.first(local).dtype
        return wrap(local, layout if dtype == layout.dtype else layout.replace(dtype=dtype))

    return wrap_cast


def _device_of(out: Any, default: torch.device) -> torch.device:
    """The device of an output: that of the operands (meta tensors say none), unless the op asks for another."""
    device = getattr(out, "device", default)
    return default if device.type == "meta" else device
