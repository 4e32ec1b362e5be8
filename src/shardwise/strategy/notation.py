"""Rules as lines: ``"*b m k, *b k n -> *b m n"``. Parsed once, applied to the shapes of a call.

| written | means                                                                              |
|---------|------------------------------------------------------------------------------------|
| `k`     | one dim; the same letter is the same factor wherever it stands                     |
| `k!`    | a dim that must be whole                                                           |
| `*b`    | any number of leading dims, aligned at the right and broadcast as torch does       |
| `n?`    | the operand may be missing                                                         |
| in inputs only | the result is a Partial sum where the factor is cut                         |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import RuleError
from shardwise.strategy.registry import Rule, rule
from shardwise.strategy.spec import Factors, Operand


@dataclass(frozen=True)
class Term:
    """One operand of a line."""

    names: tuple[str, ...]
    whole: frozenset[str]
    optional: bool


@dataclass(frozen=True)
class Line:
    """A parsed line."""

    text: str
    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]


def parse(text: str) -> Line:
    """
    >>> parse("m k, k n -> m n").outputs[0].names
    ('m', 'n')
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"rule line {text!r} has no '->'")
    return Line(text, tuple(map(_term, left.split(","))), tuple(map(_term, right.split(","))))


def _term(text: str) -> Term:
    names, whole, optional = [], set(), False
    for token in text.split():
        name = token.rstrip("!?")
        if not name.lstrip("*").isidentifier():
            raise RuleError(f"rule term {text.strip()!r}: {token!r} is not a factor")
        optional |= "?" in token
        if "!" in token:
            whole.add(name)
        names.append(name)
    return Term(tuple(names), frozenset(whole), optional)


def factors(line: Line, operands: Sequence[Operand], linear: str = "none", **more: Any) -> Factors:
    """The line applied to operands: variadic factors spelled out, broadcast dims of size 1 set free."""
    sizes: dict[str, int] = {}
    rank: dict[str, int] = {}
    for term, op in zip(line.inputs, operands, strict=False):
        fixed = [n for n in term.names if not n.startswith("*")]
        for name in term.names:
            if name.startswith("*"):
                rank[name] = max(rank.get(name, 0), op.ndim - len(fixed))
    spelled = [_spell(term, rank, op.ndim) for term, op in zip(line.inputs, operands, strict=False)]
    for names, op in zip(spelled, operands, strict=True):
        for name, size in zip(names, op.shape, strict=True):
            sizes[name] = max(sizes.get(name, 0), size) if sizes.get(name) != 0 and size != 0 else 0
    whole = frozenset(f for term in line.inputs for f in term.whole)
    inputs = [
        tuple(
            None if name in whole or size != sizes[name] else name for name, size in zip(names, op.shape, strict=True)
        )
        for names, op in zip(spelled, operands, strict=True)
    ]
    outputs = [tuple(None if n in whole else n for n in _spell(term, rank, None)) for term in line.outputs]
    return Factors(inputs, outputs, linear, **more)


def _spell(term: Term, rank: dict[str, int], ndim: int | None) -> tuple[str, ...]:
    """The factor of each dim; `*b` of an operand with fewer dims keeps its rightmost ones."""
    fixed = sum(not n.startswith("*") for n in term.names)
    out: list[str] = []
    for name in term.names:
        if name.startswith("*"):
            count = rank.get(name, 0)
            have = count if ndim is None else ndim - fixed
            out += [f"{name}{i}" for i in range(count - have, count)]
        else:
            out.append(name)
    return tuple(out)


def line(names: str, text: str, linear: str = "none", **more: Any) -> None:
    """Register a rule that is nothing but its line."""
    rule(names)(line_rule(text, linear, **more))


def line_rule(text: str, linear: str = "none", **more: Any) -> Rule:
    """The rule a line stands for. Tensor operands are taken in the order of the call."""
    parsed = parse(text)
    least = sum(not term.optional for term in parsed.inputs)

    def from_line(*args: Any, **kwargs: Any) -> Factors | None:
        operands = list(operands_in(args))
        if any(isinstance(value, Operand) for value in kwargs.values()):
            return None  # named, so in any order: below, torch gives them by position
        if not least <= len(operands) <= len(parsed.inputs):
            return None
        for term, op in zip(parsed.inputs, operands, strict=False):
            fixed = sum(not n.startswith("*") for n in term.names)
            if op.ndim != fixed and (op.ndim < fixed or fixed == len(term.names)):
                return None
        return factors(parsed, operands, linear, **more)

    from_line.__doc__ = text
    return from_line


def operands_in(values: Sequence[Any]) -> Any:
    """The operands among the arguments, lists looked into."""
    for value in values:
        if isinstance(value, Operand):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from operands_in(value)
