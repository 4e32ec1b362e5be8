"""The names that a piece of Python uses: which variables around it, and which attributes of anything."""

from __future__ import annotations

import dis
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_BY_TEXT = ("getattr", "hasattr", "setattr", "vars", "delattr", "attrgetter", "methodcaller")
_CALL = "PRECALL" if "PRECALL" in dis.opmap else "CALL"  # the first instruction behind the arguments of a call
_WITH_TEXT = ("getattr", "hasattr")  # whose second argument is a name, mostly a constant
_OPERATORS = dict(  # the methods that stand behind signs
    zip(
        "+ - * @ / // % ** << >> & | ^".split(),
        "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor".split(),
        strict=True,
    )
)
_COMPARED = {"<": ("lt", "gt"), "<=": ("le", "ge"), "==": ("eq",), "!=": ("ne",)}
_COMPARED |= {">": _COMPARED["<"], ">=": _COMPARED["<="]}
_SIGNS = {"UNARY_NEGATIVE": "neg", "UNARY_INVERT": "invert", "BINARY_SUBSCR": "getitem", "STORE_SUBSCR": "setitem"}
_SIGNS |= {"CONTAINS_OP": "contains", "BINARY_SLICE": "getitem", "STORE_SLICE": "setitem"}
_WHOLE = frozenset({"vars", "dir", "__dict__", "__getattribute__", "attrgetter", "methodcaller"})
_SHOWING = frozenset({"str", "repr", "ascii", "format", "print", "pprint", "pformat", "substitute", "safe_substitute"})
_SHOWN = frozenset({"__str__", "__repr__", "__format__", "write", "flush"})


@dataclass(frozen=True)
class Names:
    """What a code object, and those of functions inside of it, may look up.

    Attributes:
        variables: Global variables.
        attributes: Attributes that it reads.
        perhaps: Attributes that may be missing: those it sets, and strings where it looks attributes up by strings.
        imports: Modules that it imports by itself, with as many dots before the name as it gives.
        is_wide: Whether it may read attributes whose names it makes up.
    """

    variables: frozenset[str]
    attributes: frozenset[str]
    perhaps: frozenset[str]
    imports: frozenset[str]
    is_wide: bool


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Names:
    """The names that code uses."""
    variables: set[str] = set()
    attributes: set[str] = set()
    perhaps: set[str] = set()
    imports: set[str] = set()
    before: list[object] = [0, 0]  # what the two instructions before were given: of an import, the dots come first
    # EXTENDED_ARG is a part of the next instruction, which is shown with all of its argument
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for step in steps:
        if step.opname == "IMPORT_NAME":
            dots = before[-2] if isinstance(before[-2], int) else 0
            imports.add("." * dots + step.argval)
        elif step.opname == "IMPORT_FROM":
            attributes.add(step.argval)
        elif step.opname in _GLOBALS:
            variables.add(step.argval)
        elif isinstance(step.argval, str) and ("ATTR" in step.opname or "METHOD" in step.opname):
            (perhaps if step.opname == "STORE_ATTR" else attributes).add(step.argval)
        attributes.update(_methods_of(step))
        before = [before[-1], step.argval]
    named = variables | attributes
    if not named.isdisjoint(_BY_TEXT):
        texts = [part for const in code.co_consts if isinstance(const, str) for part in const.split(".")]
        perhaps.update(text for text in texts if text.isidentifier())
    if not named.isdisjoint(_SHOWING) or any(map(_shows, steps)):
        attributes |= _SHOWN
    is_wide = not named.isdisjoint(_WHOLE) or any(_makes_up_a_name(steps, i) for i in range(len(steps)))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found = names_in(inner)
            variables |= found.variables
            attributes |= found.attributes
            perhaps |= found.perhaps
            imports |= found.imports
            is_wide = is_wide or found.is_wide
    return Names(frozenset(variables), frozenset(attributes), frozenset(perhaps), frozenset(imports), is_wide)


def _shows(step: dis.Instruction) -> bool:
    """Whether an instruction puts an object into a text: an f-string does, and `%` may."""
    return step.opname.startswith("FORMAT_") or (step.opname == "BINARY_OP" and step.argrepr.startswith("%"))


def _methods_of(step: dis.Instruction) -> list[str]:
    """The methods by which objects answer an operator."""
    names: Iterable[str] = ()
    if step.opname == "BINARY_OP":
        name = _OPERATORS.get(step.argrepr.removesuffix("="), "getitem")
        names = (name, f"r{name}", f"i{name}")
    elif step.opname == "COMPARE_OP":
        names = _COMPARED.get(step.argval, ())
    elif step.opname in _SIGNS:
        names = (_SIGNS[step.opname],)
    return [f"__{name}__" for name in names]


def _makes_up_a_name(steps: list[dis.Instruction], at: int) -> bool:
    """Whether an instruction begins a call of `getattr` or `hasattr` whose second argument is no constant.

    The height of the stack tells where arguments end: the second one is what stands between the last instruction that
    leaves one value and the call, or the last that leaves two.
    """
    if steps[at].opname not in _GLOBALS or steps[at].argval not in _WITH_TEXT:
        return False
    height, ends = 0, {1: at, 2: at}
    for i in range(at + 1, len(steps)):
        step = steps[i]
        if step.opname == _CALL and step.arg == height and height in (2, 3):
            second = steps[ends[1] + 1 : i if height == 2 else ends[2] + 1]
            return [s.opname for s in second] != ["LOAD_CONST"]
        if "JUMP" in step.opname or step.opname.startswith("RETURN"):
            return True  # a choice among the arguments, or no call at all
        height += dis.stack_effect(step.opcode, step.arg, jump=False)
        ends[height] = i
    return True
