"""Rules as lines: ``"*b m k, *b k n -> *b m n"``. A line names the dims of every tensor argument, then of every result.

docs/extending.md has the table of what is written: `k!`, `*b`, `*d!dim`, `*d-dim`, `*d+dim`, `(g c)`, `n?`, `+n`, `..`,
`|`. A factor that only inputs have is reduced: where it is cut, every rank has a part of the result. A factor that
only results have is never cut."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from shardwise.errors import RuleError
from shardwise.strategy.spec import Operand

_NAME = r"[^\W\d]\w*"
_WORDS = re.compile(r"\([^)]*\)\S*|\S+")
_WORD = re.compile(rf"(?P<many>\*?)(?P<name>{_NAME})(?P<marks>[!?]*|[-+!]dim)")
_BRACKET = re.compile(rf"\(\s*(?P<name>{_NAME})(?P<inner>(\s+{_NAME})+)\s*\)(?P<marks>\??)")


@dataclass(frozen=True)
class Word:
    """One word of a term: a dim, or with `many` any number of dims in a row."""

    name: str
    many: bool = False
    whole: bool = False
    named: str = ""  # the mark before `dim`: what becomes of the dims that this argument names
    inner: tuple[str, ...] = ()  # of a dim in brackets, the factors after the first


@dataclass(frozen=True)
class Term:
    """One tensor of a line."""

    words: tuple[Word, ...]
    optional: bool
    addend: bool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(word.name for word in self.words)

    @property
    def whole(self) -> frozenset[str]:
        return frozenset(word.name for word in self.words if word.whole)

    @cached_property
    def single(self) -> int:
        """How many dims are written one by one."""
        return sum(not word.many for word in self.words)

    def fits(self, ndim: int) -> bool:
        return ndim == self.single or (ndim > self.single and self.single < len(self.words))


@dataclass(frozen=True)
class Line:
    """A parsed line."""

    text: str
    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    repeats: bool  # the last input stands for all tensors that follow

    def terms(self, count: int) -> Sequence[Term]:
        """The terms of a call with `count` tensors."""
        return (*self.inputs, *self.inputs[-1:] * (count - len(self.inputs)))[:count]

    def fits(self, operands: Sequence[Operand]) -> bool:
        """Whether a call with these tensors can be read with this line."""
        least = sum(not term.optional for term in self.inputs)
        if len(operands) < least or (len(operands) > len(self.inputs) and not self.repeats):
            return False
        return all(term.fits(op.ndim) for term, op in zip(self.terms(len(operands)), operands, strict=True))

    @cached_property
    def names_dims(self) -> bool:
        """Whether the line speaks of the call's argument `dim`."""
        return any(word.named for term in (*self.inputs, *self.outputs) for word in term.words)


def forms(text: str) -> list[Line]:
    """The lines of a rule that is several, with `|` between them: the first that fits a call counts.

    >>> [form.text for form in forms("k, k -> | m k, k -> m")]
    ['k, k ->', 'm k, k -> m']
    """
    return [parse(form.strip()) for form in text.split("|")]


@lru_cache(4096)
def parse(text: str) -> Line:
    """
    >>> parse("m k, k n -> m n").outputs[0].names
    ('m', 'n')
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"rule line {text!r} has no '->'")
    terms = left.split(",")
    repeats = terms[-1].strip() == ".."
    inputs = tuple(map(_term, terms[: len(terms) - repeats]))
    for term, written in zip(inputs, terms):
        if len(term.words) - term.single > 1:
            raise RuleError(f"rule term {written.strip()!r}: two groups of any number of dims; which has how many?")
    return Line(text, inputs, tuple(map(_term, right.split(","))), repeats)


def _term(text: str) -> Term:
    text = text.strip()
    words, optional = [], False
    for token in _WORDS.findall(text.removeprefix("+")):
        found = _WORD.fullmatch(token) or _BRACKET.fullmatch(token)
        if found is None:
            raise RuleError(f"rule term {text!r}: {token!r} is not a factor")
        groups = found.groupdict("")
        marks = groups["marks"]
        optional |= "?" in marks
        named = marks[0] if marks.endswith("dim") else ""
        inner = tuple(groups.get("inner", "").split())
        words.append(Word(groups["name"], bool(groups.get("many")), "!" in marks and not named, named, inner))
    return Term(tuple(words), optional, text.startswith("+"))
