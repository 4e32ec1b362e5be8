"""What is known of ops without calling them: names, the lines of rules, which rules gather, which ops have none."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

from shardwise.strategy import registry
from shardwise.strategy.registry import Rule
from shardwise.strategy.spec import Gathered
from shardwise.torch_private import all_op_names, has_kernel, schema_of


def _bare(op: str) -> str:
    return op.removeprefix("torch.").removeprefix("aten::").removeprefix("aten.").partition(".")[0]


def rule_name(op: str) -> str | None:
    """The name under which an op's rule is registered, whichever way the op is spelled."""
    name = _bare(op)
    found = registry.by_name(name)
    return name if name in registry.registered() else None if found is None else found.name


def in_one_line(rule: Rule) -> str:
    """A rule's line, or what its docstring starts with, or what kind of rule it is."""
    always, reasons = gathering(rule)
    if always:
        return reasons[0]
    function = _function_of(rule)
    text = (function.__doc__ or "").strip().partition("\n")[0]
    return text or function.__name__.replace("<lambda>", "a program").replace("_", " ").strip()


def _function_of(rule: Rule) -> types.FunctionType:
    while isinstance(rule, functools.partial):
        rule = rule.func
    assert isinstance(rule, types.FunctionType)  # or a lambda: rules are written in Python
    return rule


# -- gathering ---------------------------------------------------------------------------------------------
def gathering(rule: Rule) -> tuple[bool, list[str]]:
    """Whether a rule always gathers, and its reasons: read from its code, since its answer depends on the arguments."""
    function = _function_of(rule)
    code_of = function.__code__
    cells = {n: c.cell_contents for n, c in zip(code_of.co_freevars, function.__closure__ or (), strict=True)}
    reasons = [v.reason for v in cells.values() if isinstance(v, Gathered)]
    always = bool(reasons) or function.__annotations__.get("return") == "Gathered"
    for code in _codes(code_of):
        named = [function.__globals__.get(name) for name in code.co_names]
        reasons += [value.reason for value in named if isinstance(value, Gathered)]
        if Gathered in named:
            reasons += [text for text in code.co_consts if isinstance(text, str) and text.startswith("gather")]
    return always, list(dict.fromkeys(reasons))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


# -- ops of torch ------------------------------------------------------------------------------------------
@functools.cache
def aten_ops() -> dict[str, list[Any]]:
    """The overloads of all aten ops that the dispatcher knows, by name."""
    found: dict[str, list[Any]] = {}
    for full in sorted(all_op_names()):
        namespace, _, name = full.partition("::")
        name, _, overload = name.partition(".")
        if namespace == "aten":
            found.setdefault(name, []).append(getattr(getattr(torch.ops.aten, name), overload or "default"))
    return found


def without_rule(op: str) -> str | None:
    """What happens to an op of torch that has no rule; None for what is no op of torch."""
    overloads = aten_ops().get(_bare(op))
    if overloads is None:
        return None
    if any(map(_is_gathered, overloads)):
        return "its operands are gathered and it is computed on every rank"
    return "torch takes it apart, and its parts have rules"


def without_any_rule() -> list[str]:
    """aten ops on tensors that have no rule and are not taken apart. Backward ops, which autograd calls on local
    tensors only, and forms with out= or in place, which the engine makes of the others, do not count."""
    return [name for name, ops in aten_ops().items() if "backward" not in name and any(map(_is_gathered, ops))]


def _is_gathered(overload: Any) -> bool:
    schema = schema_of(overload)
    takes_tensors = any("Tensor" in str(a.type) for a in schema.arguments)
    taken_apart = has_kernel(overload.name(), "CompositeImplicitAutograd")
    return takes_tensors and not schema.is_mutable and not taken_apart and registry.find(overload) is None
