"""`shardwise rules`: which ops have a rule, what one op's rule derives, and which ops fall back to gathering."""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli.derive import Blank, Derivation, NoSample, derive
from shardwise.cli.help import Help
from shardwise.strategy import registry
from shardwise.strategy.registry import Rule
from shardwise.strategy.spec import Gathered
from shardwise.torch_private.tensors import all_op_names, has_kernel, schema_of

_EXAMPLES = """examples:
  shardwise rules                            every op that has a rule
  shardwise rules mm                         the ways to split mm
  shardwise rules mm --shapes 4,5 5,6        the same, for these shapes
  shardwise rules softmax --shapes 8,16 --args dim=1
  shardwise rules --fallback --all           what gathers its operands, and why
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "rules",
        help="how ops may be split",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument("op", nargs="?", help="the op to explain, as mm or aten::mm; without one, a list of all")
    parser.add_argument(
        "--shapes", nargs="+", type=_tensor, default=[], metavar="SHAPE", help="its tensors, as 4,5 or 8:int64"
    )
    parser.add_argument("--args", nargs="+", default=[], metavar="ARG", help="its other arguments, as 1 or dim=1")
    parser.add_argument("--fallback", action="store_true", help="the ops that gather their operands, with the reason")
    parser.add_argument("--all", action="store_true", help="with --fallback: the ops of torch that have no rule, too")
    parser.set_defaults(run=run)


def _tensor(text: str) -> Blank:
    """
    >>> _tensor("4,5"), _tensor("():int64")
    (tensor([4, 5]), tensor([], int64))
    """
    sizes, _, kind = text.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{text!r}: {kind!r} is no dtype of torch; write 4,5 or 4,5:int64")
    given = [size.strip() for size in sizes.strip("()").split(",") if size.strip()]
    if not all(size.isdecimal() for size in given):
        raise argparse.ArgumentTypeError(f"{text!r}: {sizes!r} are no sizes; write 4,5 or 4,5:int64")
    return Blank(tuple(map(int, given)), dtype)


def run(options: argparse.Namespace, console: Console) -> int:
    if options.fallback or options.op is None:
        console.print(fallback_table(options.all) if options.fallback else all_table())
        return 0
    name = rule_name(options.op)
    if name is not None:
        return explain(name, options, console)
    without = without_rule(options.op)
    if without is not None:
        console.print(f"{options.op} has no rule of its own: {without}.")
        return 0
    close = difflib.get_close_matches(options.op, [*registry.registered(), *aten_ops()], n=5)
    hint = f"; did you mean {', '.join(dict.fromkeys(close))}?" if close else "; `shardwise rules` lists all"
    print(f"shardwise rules: no op is called {options.op!r}{hint}", file=sys.stderr)
    return 2


# -- lists -------------------------------------------------------------------------------------------------
def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def all_table() -> Table:
    table = _table("op", "file", "rule")
    for name, (rule, family) in registry.registered().items():
        table.add_row(Text(name), f"rules/{family}.py", Text(in_one_line(rule)))
    for op, rule in registry.user_rules().items():
        table.add_row(Text(str(op)), "yours", Text(in_one_line(rule)))
    return table


def fallback_table(everything: bool) -> Table:
    table = _table("op", "when", "why it gathers")
    for name, (rule, _) in registry.registered().items():
        always, reasons = gathering(rule)
        for reason in reasons:
            table.add_row(Text(name), "always" if always else "in some forms", Text(reason))
    if everything:
        for name in without_any_rule():
            table.add_row(Text(name), "always", "no rule, and torch does not take it apart")
    return table


# -- one op ------------------------------------------------------------------------------------------------
def explain(name: str, options: argparse.Namespace, console: Console) -> int:
    rule, family = registry.registered()[name]
    console.print(Text(name, style="bold"), Text(f"rules/{family}.py"), Text(in_one_line(rule)), sep="  ")
    args, kwargs = _arguments(options.args)
    try:
        found = derive(name, rule, options.shapes, args, kwargs)
    except NoSample as error:
        print(f"shardwise rules: {error}", file=sys.stderr)
        return 2
    console.print(Text(f"\n{found.call}"))
    console.print(_strategies(found))
    for note in found.notes:
        console.print(Text(note))
    return 0


def _arguments(texts: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """
    >>> _arguments(["1", "keepdim=True", "mode=mean"])
    ([1], {'keepdim': True, 'mode': 'mean'})
    """
    args, kwargs = [], {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        if equals:
            kwargs[name] = _literal(value)
        else:
            args.append(_literal(text))
    return args, kwargs


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _strategies(found: Derivation) -> Table:
    """The rows with the columns that say something."""
    seen = any(row.travels for row in found.rows)
    inputs = [f"operand {i}" for i in range(found.operands)]
    table = _table(*["on one axis"] * (not seen), *inputs, "->", "result", *["what travels"] * seen)
    for row in found.rows:
        results = ", ".join(map(str, row.outputs))
        cells = [*[row.name] * (not seen), *row.inputs, "", results, *[row.travels] * seen]
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table


# -- what is known of ops without calling them -------------------------------------------------------------
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
    always = bool(reasons)
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
        if namespace == "aten" and hasattr(torch.ops.aten, name):  # some have a kernel and no schema
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
