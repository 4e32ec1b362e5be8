"""register_sharding: how an op of your own (or one of torch's) may be split, as a line or as a list of strategies,
whose promises are checked."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.caches import clear_caches
from shardwise.engine.call import ANY_FLOAT
from shardwise.errors import RuleError
from shardwise.experimental.mutating import OnCopies
from shardwise.layout import Layout, Placement, Shard, as_placements
from shardwise.layout.placement import REPLICATE
from shardwise.spec import TensorMeta
from shardwise.strategy import registry
from shardwise.strategy.notation import Line, forms
from shardwise.strategy.reading import line_rule
from shardwise.strategy.spec import Assignment, Choice, Factors, Operand, Spec, fitting, operands_in
from shardwise.torch_private.tensors import OpOverload, OpOverloadPacket, schema_of

Op = Callable[..., Any]  # an op of torch.ops or torch.library, or a Python function
Pair = tuple[tuple[Placement, ...], tuple[Placement, ...]]  # placements of outputs, of inputs


class TensorInfo:
    """A tensor argument as a sharding function sees it: everything but values. The shape is the global one."""

    def __init__(self, layout: Layout) -> None:
        self.shape, self.ndim, self.dtype = torch.Size(layout.shape), layout.ndim, layout.dtype
        self.mesh = self.device_mesh = layout.mesh.source
        self.placements = layout.placements
        self.tensor_meta = TensorMeta(self.shape, layout.stride, layout.dtype)

    def stride(self) -> tuple[int, ...]:
        return self.tensor_meta.stride

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()


def rule_from_strategies(op: Op, strategies: Callable[..., Any]) -> Callable[..., CheckedRule]:
    """The rule of an op from a function that lists what is right on one mesh axis."""

    def rule(*args: object, **kwargs: Any) -> CheckedRule:
        described = tree_map_only(Operand, lambda one: TensorInfo(one.layout), (args, kwargs))
        operands = list(operands_in((*args, *kwargs.values())))
        pairs = [_pair(op, n, pair, operands) for n, pair in enumerate(strategies(*described[0], **described[1]))]
        return CheckedRule(Strategies([()] * len(operands), [], pairs=pairs), op, args, kwargs)

    rule.__doc__ = strategies.__doc__
    return rule


def _pair(op: Op, number: int, pair: object, operands: Sequence[Operand]) -> Pair:
    """One strategy, checked: what is not a tensor left out, dims counted from the front."""
    what = f"{op}: strategy {number}, {pair!r}"
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise RuleError(f"{what}: expected a pair of output placements and input placements")
    one = lambda given: [given] if hasattr(given, "is_replicate") else given
    outs, ins = (as_placements([p for p in one(side) if p is not None]) for side in pair)
    if len(ins) != len(operands):
        raise RuleError(
            f"{what}: {len(ins)} input placements for {len(operands)} tensors; give one for each, None for every "
            f"argument that is not a tensor"
        )
    return outs, tuple(_from_the_front(p, x.ndim, f"{what}: input {i}") for i, (p, x) in enumerate(zip(ins, operands)))


def _from_the_front(placement: Placement, ndim: int, what: str) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    if not -ndim <= placement.dim < ndim:
        raise RuleError(f"{what}: {placement!r} of a tensor with {ndim} dims; give a dim it has")
    return placement.at(placement.dim % ndim)


@dataclasses.dataclass
class Strategies(Factors):
    """The strategies that a user lists, for any one axis.

    Where all dims that a strategy cuts are of one size, they may be cut in any way, so an existing cut is kept. Where
    they are of several sizes, only equal parts are known to belong together."""

    pairs: Sequence[Pair] = ()

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Any], pinned: bool) -> Assignment | None:
        self.shapes = [tuple(out.shape) for out in outputs]
        self.outputs = [()] * len(outputs)
        return super().assign(operands, outputs, pinned)

    def choices(
        self, operands: Sequence[Operand], axis: int, before: list[list[Placement]], kinds: set[torch.dtype]
    ) -> list[Choice]:
        is_whole = all(x.layout.placements[axis].is_replicate() for x in operands)  # and is to stay so
        pairs = [] if is_whole else self.pairs
        found = [self._choice(pair, operands, axis, before) for pair in pairs]
        everywhere = (REPLICATE,) * len(operands), (REPLICATE,) * len(self.shapes)
        return [c for c in found if c is not None] + [Choice(*everywhere, "compute it all on each rank")]

    def _choice(
        self, pair: Pair, operands: Sequence[Operand], axis: int, before: list[list[Placement]]
    ) -> Choice | None:
        outs, ins = pair
        if len(outs) != len(self.shapes):
            raise RuleError(
                f"strategy {pair!r} has {len(outs)} output placements, the op has {len(self.shapes)} results; give one "
                f"for each"
            )
        outs = tuple(_from_the_front(p, len(s), f"output {i}") for i, (p, s) in enumerate(zip(outs, self.shapes)))
        cut = [(p, x.shape) for p, x in zip(ins, operands)] + list(zip(outs, self.shapes))
        sizes = {shape[p.dim] for p, shape in cut if isinstance(p, Shard)}
        name = f"use the strategy {list(map(str, ins))} -> {list(map(str, outs))}"
        if len(sizes) > 1:
            return None if any(size % len(operands[0].mesh.ranks) for size in sizes) else Choice(ins, outs, name)
        there = (
            fitting(x.layout, axis, now, before[i])
            for i, (p, x) in enumerate(zip(ins, operands))
            if isinstance(p, Shard) and isinstance(now := x.layout.placements[axis], Shard) and now.dim == p.dim
        )
        kept = next(there, None)
        alike = lambda p: kept.at(p.dim) if kept is not None and isinstance(p, Shard) else p
        return Choice(tuple(map(alike, ins)), tuple(map(alike, outs)), name)


# -- a rule of the user's is not trusted -------------------------------------------------------------------
@dataclasses.dataclass
class CheckedRule(Spec):
    """A rule of the user's for one call. The op is run on meta tensors of the local shapes first: where the results do
    not have the shapes that the layouts promise, the values would be wrong and nobody would notice."""

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
        at = lambda layouts, rank: tuple(layout.local_shape_at(mesh.coords(rank)) for layout in layouts)
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


__all__ = ["TensorInfo", "register_sharding"]


def register_sharding(
    op: Op | Sequence[Op], line: str | None = None, *, linear: str = "none", reduce: str = "sum", replace: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Say how an op may be split: by a line of factors, or by a list of strategies.

    Without `line` this is a decorator, with the signature of torch's own experimental one: the function takes the op's
    arguments, tensors replaced by what describes them (a `TensorInfo`), and returns pairs of output placements and
    input placements that are right on one mesh axis; None stands for what is not a tensor.

    Args:
        op: an op of torch.library or torch.ops, a list of such, or a Python function that hands distributed tensors to
            `__torch_function__` (torch.overrides.wrap_torch_function makes one).
        line: a line of factors, one term for each tensor argument (docs/extending.md has the notation). A cut factor
            passes through every term that has it; one that no output has leaves a Partial(`reduce`). What an op writes
            into has a term among the outputs too, before those of its results.
        linear: which arguments may be pending sums: "none" of them, all together ("joint"), or any one ("each").
        reduce: the reduction of a factor that no output has.
        replace: whether this line takes the place of an earlier rule of yours (it always comes before the library's). A
            function that is decorated always does, as in torch.

    Returns:
        None with a `line`; else a decorator.

    Raises:
        RuleError: the line does not fit the op, or the op has a rule of yours already.

    Example:
        >>> import shardwise, torch
        >>> @torch.library.custom_op("doctest::scaled_mm", mutates_args=())
        ... def scaled_mm(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
        ...     return scale * (x @ y)
        >>> _ = scaled_mm.register_fake(lambda x, y, scale: x @ y)
        >>> register_sharding(scaled_mm, "m k, k n -> m n", linear="each")
        >>> mesh = shardwise.simulate(2)
        >>> x = shardwise.distribute_tensor(torch.ones(4, 6), mesh, [shardwise.Shard(1)])
        >>> y = shardwise.distribute_tensor(torch.ones(6, 2), mesh, [shardwise.Shard(0)])
        >>> scaled_mm(x, y, 0.5).placements
        (Partial(sum),)
    """
    ops = [one for asked in (op if isinstance(op, (list, tuple)) else [op]) for one in _overloads(asked)]
    if line is not None:
        for one in ops:
            for form in forms(line):
                _check_line(one, form, linear)
            _set_rule(one, lambda op: _from_line(op, line, linear, reduce), replace)
        return None

    def decorate(strategies: Callable[..., Any]) -> Callable[..., Any]:
        for one in ops:
            _set_rule(one, lambda op: rule_from_strategies(op, _of_results(op, strategies)), replace=True)
        return strategies

    return decorate


def _overloads(op: object) -> list[Op]:
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if isinstance(op, OpOverloadPacket):
        return [one for one in (getattr(op, name) for name in op.overloads()) if not schema_of(one).is_mutable]
    if isinstance(op, OpOverload) or inspect.isroutine(op):
        return [op]
    raise RuleError(
        f"op = {op!r} ({type(op).__name__}): expected an op of torch.ops or torch.library, or a function that hands "
        f"distributed tensors to __torch_function__"
    )


def _of_results(op: Op, strategies: Callable[..., Any]) -> Callable[..., Any]:
    return op.strategies(strategies) if isinstance(op, OnCopies) else strategies


def _set_rule(op: Op, rule_for: Callable[[Op], Callable[..., Any]], replace: bool) -> None:
    """Make it the op's rule, and forget what was planned without it. That of an op that writes into arguments is the
    rule of a function that writes into copies."""
    schema = schema_of(op)
    if schema is not None and schema.is_mutable:
        copying = OnCopies(op, _signature(op))
        registry.set_user_rule(op, copying.rule, replace)
        op = copying
    rule = rule_for(op)
    rule.__signature__ = _signature(op)  # type: ignore[attr-defined]
    registry.set_user_rule(op, rule, replace)
    ANY_FLOAT.discard(op)
    clear_caches()


def _signature(op: Op) -> inspect.Signature:
    """The arguments by name, so that a call may name them in any order."""
    schema = schema_of(op)
    if schema is None:
        return inspect.signature(op)
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    default = lambda a: a.default_value if a.has_default_value() else inspect.Parameter.empty
    every = [inspect.Parameter(a.name, kinds[a.kwarg_only], default=default(a)) for a in schema.arguments]
    return inspect.Signature(every)


# -- as a line ---------------------------------------------------------------------------------------------
def _check_line(op: Op, parsed: Line, linear: str) -> None:
    line = parsed.text
    if linear not in ("none", "joint", "each"):
        raise RuleError(f"{op}: linear = {linear!r}: expected 'none', 'joint' or 'each'")
    for term in (*parsed.inputs, *parsed.outputs):
        twice = sorted({name for name in term.names if term.names.count(name) > 1} - term.whole)
        if twice:
            raise RuleError(
                f"{op}: line = {line!r} has {twice[0]!r} twice in one term: no cut of it fits both dims; write "
                f"{twice[0] + '!'!r}, a dim that must be whole, or two names"
            )
    if parsed.names_dims and "dim" not in _signature(op).parameters:
        raise RuleError(
            f"{op}: line = {line!r} has a mark with `dim`, but {_signature(op)} has no argument of that name; name the "
            f"dims one by one"
        )
    schema = schema_of(op)
    if schema is None:
        return
    tensors = {a.name: str(a.type) for a in schema.arguments if "Tensor" in str(a.type)}
    if any("List[" in kind for kind in tensors.values()):
        return
    results = OnCopies(op, _signature(op)).results if schema.is_mutable else len(schema.returns)
    counts = (len(parsed.inputs), len(tensors)), (len(parsed.outputs), results)
    for what, (terms, have) in zip(("input terms", "output terms"), counts, strict=True):
        if terms != have:
            raise RuleError(
                f"{op}: line = {line!r} has {terms} {what}, but the op has {have} (tensors {', '.join(tensors)} -> "
                f"{results} results); write one term for each, `x?` for one that may be missing"
            )


def _from_line(op: Op, line: str, linear: str, reduce: str) -> Callable[..., CheckedRule]:
    rule = line_rule(line, linear, _signature(op))

    def from_line(*args: object, **kwargs: object) -> CheckedRule:
        spec = rule(*args, **kwargs)
        if spec is None:
            shapes = [tuple(op.shape) for op in operands_in((*args, *kwargs.values()))]
            raise RuleError(f"{op}: tensors of shapes {shapes} do not fit its line {line!r}; register another one")
        names = [name for names in spec.inputs for name in names if name is not None]
        return CheckedRule(dataclasses.replace(spec, reduce=dict.fromkeys(names, reduce)), op, args, kwargs)

    from_line.__doc__ = line
    return from_line
