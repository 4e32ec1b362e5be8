"""register_sharding: how an op of your own (or one of torch's) may be split, as a line or as a list of strategies."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from shardwise.caches import clear_caches
from shardwise.engine.call import ANY_FLOAT
from shardwise.errors import RuleError
from shardwise.experimental.strategies import CheckedRule, Op, TensorInfo, rule_from_strategies
from shardwise.strategy import registry
from shardwise.strategy.notation import parse
from shardwise.strategy.reading import line_rule
from shardwise.strategy.spec import operands_in
from shardwise.torch_private import OpOverload, OpOverloadPacket, schema_of

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
            passes through every term that has it; one that no output has leaves a Partial(`reduce`).
        linear: which arguments may be pending sums: "none" of them, all together ("joint"), or any one ("each").
        reduce: the reduction of a factor that no output has.
        replace: whether this rule takes the place of an earlier one of yours (it always comes before the library's).

    Returns:
        None with a `line`; else a decorator.

    Raises:
        RuleError: the line does not fit the op, the op writes into an argument, or it has a rule of yours already.

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
            _check_line(one, line, linear)
            _set_rule(one, _from_line(one, line, linear, reduce), replace)
        return None

    def decorate(strategies: Callable[..., Any]) -> Callable[..., Any]:
        for one in ops:
            _set_rule(one, rule_from_strategies(one, strategies), replace)
        return strategies

    return decorate


def _overloads(op: Any) -> list[Op]:
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if isinstance(op, OpOverloadPacket):
        return [one for one in (getattr(op, name) for name in op.overloads()) if not schema_of(one).is_mutable]
    if isinstance(op, OpOverload) or inspect.isroutine(op):
        return [op]
    raise RuleError(
        f"op = {op!r} ({type(op).__name__}): expected an op of torch.ops or torch.library, or a function that hands "
        f"distributed tensors to __torch_function__"
    )


def _set_rule(op: Op, rule: Callable[..., Any], replace: bool) -> None:
    """Make it the op's rule, and forget what was planned without it."""
    schema = schema_of(op)
    if schema is not None and schema.is_mutable:
        raise RuleError(f"{op} writes into an argument: {schema}; register an op that returns its result instead")
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
def _check_line(op: Op, line: str, linear: str) -> None:
    if linear not in ("none", "joint", "each"):
        raise RuleError(f"{op}: linear = {linear!r}: expected 'none', 'joint' or 'each'")
    parsed = parse(line)
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
    counts = (len(parsed.inputs), len(tensors)), (len(parsed.outputs), len(schema.returns))
    for what, (terms, have) in zip(("input terms", "output terms"), counts, strict=True):
        if terms != have:
            raise RuleError(
                f"{op}: line = {line!r} has {terms} {what}, but the op has {have} (tensors {', '.join(tensors)} -> "
                f"{len(schema.returns)} results); write one term for each, `x?` for one that may be missing"
            )


def _from_line(op: Op, line: str, linear: str, reduce: str) -> Callable[..., CheckedRule]:
    rule = line_rule(line, linear, _signature(op))

    def from_line(*args: Any, **kwargs: Any) -> CheckedRule:
        spec = rule(*args, **kwargs)
        if spec is None:
            shapes = [tuple(op.shape) for op in operands_in((*args, *kwargs.values()))]
            raise RuleError(f"{op}: tensors of shapes {shapes} do not fit its line {line!r}; register another one")
        names = [name for names in spec.inputs for name in names if name is not None]
        return CheckedRule(dataclasses.replace(spec, reduce=dict.fromkeys(names, reduce)), op, args, kwargs)

    from_line.__doc__ = line
    return from_line
