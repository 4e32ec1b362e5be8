"""Rules of the user's for ops that write into arguments: `add_`, `out=`, `torch.library.custom_op(mutates_args=...)`.

Such an op is called on copies, by a function that returns them. That function has the rule; what it returns is written
into the arguments afterwards, in whatever layout each of them is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.errors import LayoutError
from shardwise.functions import is_written_argument
from shardwise.layout import Placement
from shardwise.strategy.spec import Algorithm
from shardwise.tensor import DTensor
from shardwise.torch_private.tensors import schema_of


class OnCopies:
    """An op as a function that writes into copies of its arguments, and returns those and what else the op returns.

    Args:
        op: The op, of which the schema says what it writes.
        signature: Its arguments by name.
    """

    def __init__(self, op: Callable[..., object], signature: inspect.Signature) -> None:
        schema = schema_of(op)
        self.op, self.arguments_of, self.__name__ = op, signature, f"{schema.name}_on_copies"
        self.written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.owners = [  # of each result: the argument that it is, or None
            next((a.name for a in schema.arguments if is_written_argument(result.alias_info, a.alias_info)), None)
            for result in schema.returns
        ]

    @property
    def results(self) -> int:
        """How many tensors, or lists of them, it returns."""
        return len(self.written) + self.owners.count(None)

    def __call__(self, *args: object, **kwargs: object) -> tuple[object, ...]:
        call = self.arguments_of.bind(*args, **kwargs)
        for name in self.written:
            if name in call.arguments:
                call.arguments[name] = tree_map_only(torch.Tensor, torch.clone, call.arguments[name])
        made = self.op(*call.args, **call.kwargs)
        several = made if isinstance(made, (tuple, list)) and len(self.owners) != 1 else [made]
        fresh = [value for value, owner in zip(several, self.owners) if owner is None]
        return tuple(t for t in (*self.targets(call.args, call.kwargs), *tree_leaves(fresh)) if torch.is_tensor(t))

    def targets(self, args: Sequence[object], kwargs: dict[str, object]) -> list[Any]:
        """What a call writes into: tensors, those of lists one by one."""
        found = self.arguments_of.bind(*args, **kwargs).arguments
        return [leaf for name in self.written for leaf in tree_leaves(found.get(name)) if leaf is not None]

    def strategies(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What a sharding function of the op says, for this one: what is written stays as it is laid out."""

        def adapted(*args: object, **kwargs: object) -> Iterator[tuple[list[Placement | None], list[Placement]]]:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, "placements")]
            places = [next(i for i, t in enumerate(tensors) if t is target) for target in self.targets(args, kwargs)]
            for outs, ins in function(*args, **kwargs):
                given = [p for p in _listed(ins) if p is not None]
                fresh = [p for p, owner in zip(_listed(outs), self.owners) if owner is None]
                yield [*(given[i] for i in places if i < len(given)), *fresh], given

        adapted.__doc__ = function.__doc__
        return adapted

    def rule(self, *args: object, **kwargs: object) -> Algorithm:
        """The rule of the op itself."""
        return Algorithm(self.run, writes=True)

    def run(self, *args: object, **kwargs: object) -> object:
        """The op on distributed tensors."""
        made = list(DTensor.__torch_function__(self, (), args, kwargs))
        targets = self.targets(args, kwargs)
        for target, value in zip(targets, made):
            if target.shape != value.shape:
                raise LayoutError(
                    f"{self.op}: its result has shape {tuple(value.shape)}, and is to be written into a tensor of "
                    f"shape {tuple(target.shape)}; give it one of that shape"
                )
        for target, value in zip(targets, made):
            target.copy_(value)
        arguments, fresh = self.arguments_of.bind(*args, **kwargs).arguments, iter(made[len(targets) :])
        results = [next(fresh) if owner is None else arguments[owner] for owner in self.owners]
        return results[0] if len(results) == 1 else tuple(results) or None


def _listed(given: Placement | Sequence[Placement | None] | None) -> list[Placement | None]:
    return list(given) if isinstance(given, (list, tuple)) else [given]  # type: ignore[list-item]
