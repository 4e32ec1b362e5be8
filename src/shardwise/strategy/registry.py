"""Which rule belongs to which function. A rule is registered by op name; every spelling of the op finds it:
torch.*, Tensor.*, operators, torch.nn.functional, torch.special, torch.linalg, aten overloads, in-place forms."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from shardwise.errors import RuleError
from shardwise.functions import writes_first
from shardwise.strategy.spec import Algorithm, Answer, Gathered, Program
from shardwise.torch_private.tensors import function_namespaces, schema_of

Rule = Callable[..., Answer]  # (operands and static arguments as in the call) -> how the call may be split
R = TypeVar("R", bound=Callable[..., Any])
Function = Any  # a function as torch hands it to us: an overload, a builtin, a Python function, a descriptor

_NAMESPACES = (torch, torch.Tensor, F, torch.special, torch.linalg, *function_namespaces)
_rules: dict[str, Found] = {}
_user_rules: dict[Function, Rule] = {}  # rules of the user's: by overload or function
_hidden: set[str] = set()  # names of aten ops that have one: torch is to take their functions apart
_by_function: dict[Function, Found | None] = {}

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
_OPERATORS = {  # what x.__add__, x.__radd__ and x.__iadd__ are
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "truediv": "div", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
SPELLINGS = {f"__{how}{name}__": op for name, op in _OPERATORS.items() for how in ("", "r", "i")} | {
    "__rtruediv__": "rdiv", "__rdiv__": "rdiv", "__matmul__": "matmul", "__rmatmul__": "rmatmul",
    "__neg__": "neg", "__abs__": "abs", "__invert__": "bitwise_not", "__eq__": "eq", "__ne__": "ne", "__lt__": "lt",
    "__le__": "le", "__gt__": "gt", "__ge__": "ge", "negative": "neg", "absolute": "abs", "not_equal": "ne",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "subtract": "sub", "rsub": "sub",
    "multiply": "mul", "divide": "div", "true_divide": "div",
}  # fmt: skip


class Found(NamedTuple):
    """The rule of a function, and whether the function writes into its first argument."""

    rule: Rule
    name: str
    in_place: bool = False
    any_float: bool = False  # a plan holds for every value of a float argument
    numbers: tuple[str | int, ...] = ()  # arguments, by name or position, that are numbers even if 0-d tensors
    family: str = ""  # the file of the rule's line


def rule(*names: str, any_float: bool = False, numbers: tuple[str | int, ...] = ()) -> Callable[[R], R]:
    """Register the function below as the rule of these ops (names separated by spaces). `any_float` promises that no
    answer depends on the value of a float argument that is finite and not zero; `numbers` as in `Found`."""

    def register(function: R) -> R:
        for name in (n for text in names for n in text.split()):
            if name in _rules:
                raise ValueError(f"op {name!r} has a rule already")
            _rules[name] = Found(function, name, False, any_float, numbers, _module_being_imported())
        _by_function.clear()
        return function

    return register


def _module_being_imported() -> str:
    frame = sys._getframe(1)
    while frame.f_code.co_name != "<module>" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals["__name__"].rpartition(".")[2]


def gathered(names: str, reason: str) -> None:
    """Register ops for which there is no better way than to gather, with the reason."""
    answer = Gathered(reason)
    rule(names)(lambda *args, **kwargs: answer)


def refused(names: str, reason: str) -> None:
    """Register ops that a distributed tensor cannot do, with the error that says so."""

    @rule(names)
    def refuse(*args: object, **kwargs: object) -> Answer:
        raise RuleError(reason)


def program(names: str, **how: bool) -> Callable[[Program], Program]:
    """Register the function below as the program of these ops on every layout; `how` are fields of `Algorithm`."""

    def register(run: Program) -> Program:
        rule(names)(functools.wraps(run)(lambda *args, **kwargs: Algorithm(run, **how)))  # type: ignore[arg-type]
        return run

    return register


def set_user_rule(op: Function, function: Rule, replace: bool) -> None:
    """Make `function` the rule of one overload or function, before any of ours."""
    if op in _user_rules and not replace:
        raise RuleError(f"{op} has a rule already, registered by you; pass replace=True to give it another")
    _user_rules[op] = function
    namespace, _, name = schema_of(op).name.partition("::") if schema_of(op) is not None else ("", "", "")
    if namespace == "aten":
        _hidden.update({name, name.lstrip("_")})  # softmax must arrive as _softmax
    _by_function.clear()


def is_users(func: Function) -> bool:
    """Whether a user has given this function a rule."""
    return func in _user_rules


def named(name: str) -> Rule:
    """The rule of an op that has one, for rules built on it."""
    return _rules[name].rule


def find(func: Function) -> Found | None:
    """The rule for a function as torch hands it to us, or None."""
    if func in _by_function:
        return _by_function[func]
    if len(_by_function) > 10_000:  # functions made on the fly (lambdas, partials) must not pile up
        _by_function.clear()
    _by_function[func] = found = _find(func)
    return found


def _find(func: Function) -> Found | None:
    schema, name = getattr(func, "_schema", None), getattr(func, "__name__", "")
    if func in _user_rules:
        return Found(_user_rules[func], name or str(func))
    if schema is not None:
        namespace, _, name = schema.name.partition("::")
        if namespace in _COLLECTIVES:
            return Found(refuse_collective, schema.name)
        if namespace != "aten" or any(a.is_out for a in schema.arguments):
            return None
        # a rule of "aten::unfold" is for that op only: F.unfold is another one
        return _named(schema.name, writes_first(func)) or _named(name, writes_first(func))
    if name == "__get__":  # a property such as Tensor.T
        return _rules.get(getattr(getattr(func, "__self__", None), "__name__", ""))
    torchs_own = any(getattr(space, name, None) == func for space in _NAMESPACES)
    if not torchs_own or SPELLINGS.get(name, name) in _hidden:
        return None
    return _named(name, writes_first(func))


def refuse_collective(*args: object, **kwargs: object) -> Answer:
    """A collective is for what a rank holds; on a whole tensor it would mean nothing, or lose its result."""
    raise RuleError(
        "a collective of torch.distributed was called on a distributed tensor; call it on x.to_local(), or say the "
        "layout you want: x.redistribute(placements=...). torch's own distribute_tensor and parallelize_module call "
        "collectives: use those of shardwise"
    )


def in_place_flag(func: Function, args: Sequence[object], kwargs: dict[str, Any]) -> bool:
    """Whether a call says inplace=True (torch.nn.functional.relu and its like), by name or by position."""
    if "inplace" in kwargs:
        return bool(kwargs["inplace"])
    code = getattr(func, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    return "inplace" in names and len(args) > names.index("inplace") and bool(args[names.index("inplace")])


def _named(name: str, writes: bool) -> Found | None:
    plain = name.removeprefix("special_")  # aten's names for torch.special
    for candidate in (name, plain, SPELLINGS.get(name), plain[:-1] if writes else None):
        found = None if candidate is None else _rules.get(SPELLINGS.get(candidate, candidate))
        if found is not None:
            return found._replace(in_place=writes)
    return None


def registered() -> dict[str, tuple[Rule, str]]:
    """All ops with a rule: by name, the rule and the file it is in."""
    return {name: (found.rule, found.family) for name, found in sorted(_rules.items())}


def by_name(name: str) -> Found | None:
    """The rule of an op by any of its names."""
    return _named(name, name.endswith("_"))


def user_rules() -> dict[Function, Rule]:
    """The rules the user has registered, by overload or function."""
    return dict(_user_rules)
