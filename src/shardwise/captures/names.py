"""The names that a piece of Python uses: which variables around it, and which attributes of anything."""

from __future__ import annotations

import dis
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_BY_TEXT = ("getattr", "hasattr", "setattr", "vars", "delattr")


@dataclass(frozen=True)
class Names:
    """What a code object, and those of functions inside of it, may look up.

    Attributes:
        variables: Global variables.
        attributes: Attributes that it reads.
        perhaps: Attributes that may be missing: those it sets, and strings where it looks attributes up by strings.
        imports: Modules that it imports by itself, with as many dots before the name as it gives.
    """

    variables: frozenset[str]
    attributes: frozenset[str]
    perhaps: frozenset[str]
    imports: frozenset[str]


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Names:
    """The names that code uses."""
    variables: set[str] = set()
    attributes: set[str] = set()
    perhaps: set[str] = set()
    imports: set[str] = set()
    before: list[object] = [0, 0]  # what the two instructions before were given: of an import, the dots come first
    for step in dis.get_instructions(code):
        if step.opname == "EXTENDED_ARG":  # a part of the next instruction, which is shown with all of its argument
            continue
        if step.opname == "IMPORT_NAME":
            dots = before[-2] if isinstance(before[-2], int) else 0
            imports.add("." * dots + step.argval)
        elif step.opname == "IMPORT_FROM":
            attributes.add(step.argval)
        elif step.opname in _GLOBALS:
            variables.add(step.argval)
        elif isinstance(step.argval, str) and ("ATTR" in step.opname or "METHOD" in step.opname):
            (perhaps if step.opname == "STORE_ATTR" else attributes).add(step.argval)
        before = [before[-1], step.argval]
    if not variables.isdisjoint(_BY_TEXT):
        perhaps.update(const for const in code.co_consts if isinstance(const, str) and const.isidentifier())
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found = names_in(inner)
            variables |= found.variables
            attributes |= found.attributes
            perhaps |= found.perhaps
            imports |= found.imports
    return Names(frozenset(variables), frozenset(attributes), frozenset(perhaps), frozenset(imports))
