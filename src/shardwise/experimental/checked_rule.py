"""A rule of the user's is not trusted: what it promises is compared with what the op does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.errors import RuleError
from shardwise.layout import Layout
from shardwise.strategy.spec import Assignment, Factors, Operand

Op = Callable[..., Any]  # an op of torch.ops or torch.library, or a Python function


@dataclasses.dataclass
class CheckedRule:
    """A rule of the user's for one call.

    Before it is used, the op is run on meta tensors of the local shapes. The results must have the shapes that the
    layouts promise: else the values would be wrong and nobody would notice."""

    spec: Factors
    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Any], pinned: bool) -> Assignment | None:
        found = self.spec.assign(operands, outputs, pinned)
        if found is None:
            return None
        ins = [x.layout.replace(placements=p) for x, p in zip(operands, found.inputs, strict=True)]
        outs = [Layout.make(x.mesh, p, o.shape, o.dtype) for x, o, p in zip(ins * len(outputs), outputs, found.outputs)]
        mesh = operands[0].mesh
        at = lambda layouts, rank: tuple(layout.local_shape_at(mesh.coords(rank)) for layout in layouts)  # noqa: E731
        for given, promised in {(at(ins, rank), at(outs, rank)) for rank in mesh.ranks}:
            made = self._made_of(given, operands)
            if made != promised:
                places = ", ".join(str([str(p) for p in places]) for places in found.inputs)
                raise RuleError(
                    f"{self.op}: its rule cuts the inputs as {places} and promises results of shapes {list(promised)} "
                    f"from what a rank then holds, {list(given)}; the op makes {list(made)} of it. Correct the rule"
                )
        return found

    def _made_of(self, shapes: Sequence[tuple[int, ...]], operands: Sequence[Operand]) -> tuple[tuple[int, ...], ...]:
        metas = iter([torch.empty(s, dtype=x.dtype, device="meta") for s, x in zip(shapes, operands, strict=True)])
        args, kwargs = tree_map_only(Operand, lambda _: next(metas), (self.args, self.kwargs))
        with torch.no_grad():
            made = tree_flatten(self.op(*args, **kwargs))[0]
        return tuple(tuple(m.shape) for m in made if isinstance(m, torch.Tensor))
