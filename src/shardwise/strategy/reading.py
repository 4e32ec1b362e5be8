"""A line of the notation applied to the tensors of one call, and the rules that are nothing but a line."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch

from shardwise.errors import dim_from_front
from shardwise.layout import Shard, contiguous_stride
from shardwise.strategy.notation import Line, Term, Word, forms, parse
from shardwise.strategy.registry import R, rule
from shardwise.strategy.spec import Algorithm, Factors, Names, Operand, Result, operands_in

Named = int | Sequence[int] | None  # what an argument called `dim` may be


def factors(
    text: str,
    operands: Sequence[Operand],
    linear: str = "none",
    *,
    dim: Named = None,
    keepdim: bool = False,
    sizes: Mapping[str, int] | None = None,
    joint: Collection[int] | None = None,
    reduce: str = "sum",
    contiguous: bool = False,
    outputs: int = 1,
    call: Callable[..., Any] | None = None,
    **more: Any,
) -> Factors:
    """The line `text` applied to the tensors of a call: a name for every dim, None for a dim that must be whole.

    Args:
        linear, joint: As in `Factors`; tensors marked `+` are no factors of a product ("each").
        dim, keepdim: What `dim` in the line stands for (None: all), and whether dims that `*d-dim` leaves out stay.
        sizes: How many blocks a bracket has, where the sizes of the dims do not tell.
        reduce: The reduction of factors that no result has.
        contiguous: Whether the one result is always new and without gaps, of the tensors' common dtype.
        outputs: How often the last result of the line comes.
        call: A function of the local tensors to call on every rank, instead of the op itself.
        more: Other fields of `Factors`."""
    named = dim if dim is None or isinstance(dim, int) else tuple(dim)
    spelling = spelled(text, tuple([op.ndim for op in operands]), named, keepdim)
    if joint is None and spelling.addends and linear == "each":
        joint = frozenset(range(len(operands))) - spelling.addends
    size, alike = _sizes(spelling, operands)
    whole = {name for name in spelling.merged if not _passes(spelling, name, operands, (sizes or {}).get(name))}
    inputs: list[Names] = []
    for names, op in zip(spelling.inputs, operands, strict=True):
        free = [None if n in spelling.whole or n in whole else n for n in names]
        if not alike:  # a dim of one element that is broadcast
            free = [n if n in spelling.merged or k == size[m] else None for n, m, k in zip(free, names, op.shape)]
        inputs.append(tuple(free))
    results: list[Names] = [tuple([None if n in whole else n for n in names]) for names in spelling.outputs]
    results = [*results[:-1], *results[-1:] * outputs]
    joined = None if joint is None else frozenset(joint)
    spec = Factors(inputs, results, linear, joined, addends=spelling.addends, **more)
    if reduce != "sum":
        spec.reduce = {name: reduce for names in inputs for name in names if name}
    if contiguous and alike:
        spec.result = _result(spelling, operands, size)
    if call is not None:
        spec.local = lambda inputs, outputs: call
    return spec


@dataclass(frozen=True)
class Spelling:
    """A line for tensors of so many dims: the factor of every dim."""

    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[Names, ...]
    first: tuple[str, ...]  # the factors of the first result, those that are whole too
    whole: frozenset[str]
    merged: frozenset[str]  # factors in brackets: whether they pass depends on sizes and layouts
    blocks: frozenset[str]  # factors that are blocks in a bracket which only a result has
    addends: frozenset[int]


@lru_cache(4096)
def spelled(text: str, ndims: tuple[int, ...], dim: int | tuple[int, ...] | None, keepdim: bool) -> Spelling:
    """The line `text` for tensors with `ndims` dims each."""
    line = parse(text)
    terms = line.terms(len(ndims))
    counts: dict[str, int] = {}  # how many dims a group has
    for term, ndim in zip(terms, ndims, strict=True):
        for word in term.words:
            if word.many:
                counts[word.name] = max(counts.get(word.name, 0), ndim - term.single)
    words = [word for term in (*terms, *line.outputs) for word in term.words]
    marked = {w.name: dims_named(dim, counts[w.name] + (w.named == "+")) for w in words if w.named}

    def group(word: Word, many: int | None = None) -> list[str]:
        """The factors of a word; a group of fewer dims than others of its name has the rightmost ones."""
        count = counts.get(word.name, 0)
        first = 0 if many is None else count - many
        return [f"{word.name}{i}" for i in range(first, count)] if word.many else [word.name]

    whole = {name for word in words for name in word.inner}
    whole |= {name for word in words if word.whole for name in group(word)}
    whole |= {f"{word.name}{i}" for word in words if word.named == "!" for i in marked[word.name]}

    known = {word for term in terms for word in term.words}
    new = [word for term in line.outputs for word in term.words if word not in known]
    in_input = lambda term, ndim: tuple(n for word in term.words for n in group(word, ndim - term.single))
    in_result = lambda word: _in_result(word, group(word), whole, marked, keepdim)
    return Spelling(
        tuple(map(in_input, terms, ndims)),
        tuple(tuple(name for word in term.words for name in in_result(word)) for term in line.outputs),
        tuple(name for word in line.outputs[0].words for name in group(word)),
        frozenset(whole),
        frozenset(word.name for word in words if word.inner),
        frozenset(name for word in new for name in word.inner),
        frozenset(i for i, term in enumerate(terms) if term.addend),
    )


def _in_result(
    word: Word, names: Sequence[str], whole: Collection[str], marked: Mapping[str, Sequence[int]], keepdim: bool
) -> list[str | None]:
    """The factors that a word stands for in a result."""
    found = [None if name in whole else name for name in names]
    if word.named == "+":
        found.insert(marked[word.name][0], None)
    elif word.named == "-":
        gone = marked[word.name]
        found = [None if d in gone else name for d, name in enumerate(found) if keepdim or d not in gone]
    return found


def _sizes(spelling: Spelling, operands: Sequence[Operand]) -> tuple[dict[str, int], bool]:
    """How large each factor is, and whether all dims of each factor have one size."""
    sizes: dict[str, int] = {}
    alike = True
    for names, op in zip(spelling.inputs, operands, strict=True):
        for name, size in zip(names, op.shape, strict=True):
            before = sizes.setdefault(name, size)
            if before != size:
                alike = False
                sizes[name] = max(before, size) if before and size else 0
    return sizes, alike


def _passes(spelling: Spelling, name: str, operands: Sequence[Operand], count: int | None) -> bool:
    """Whether a factor in brackets may be cut: where a block is one element, or all ranks have as many blocks."""
    dims = [(op, names.index(name)) for op, names in zip(operands, spelling.inputs) if name in names]
    sizes = [op.shape[d] for op, d in dims]
    count = math.gcd(*sizes) if count is None else count
    cuts = [(axis, p) for op, d in dims for axis, p in enumerate(op.layout.placements) if p.is_shard(d)]
    ranks = math.prod(operands[0].mesh.shape[axis] for axis in dict(cuts))
    if all(isinstance(p, Shard) and p.pieces is None for _, p in cuts) and count % ranks == 0:
        return True
    size, _ = _sizes(spelling, operands)
    return set(sizes) == {count} and all(size.get(inner) == 1 for inner in spelling.blocks)


def _result(spelling: Spelling, operands: Sequence[Operand], sizes: Mapping[str, int]) -> Result | None:
    """A result without gaps of the tensors' common dtype; None where they have none, or the call may be wrong."""
    kinds = {op.dtype for op in operands if op.dtype.is_floating_point} or {op.dtype for op in operands}
    if len(kinds) != 1 or not sizes.keys() >= set(spelling.first):
        return None
    shape = tuple(sizes[name] for name in spelling.first)
    return Result(shape, kinds.pop(), contiguous_stride(shape))


def dims_named(dim: Named, ndim: int) -> tuple[int, ...]:
    """The dims that `dim` names, counted from the front: all of them for None."""
    if dim is None:
        return tuple(range(ndim))
    found = tuple(dim_from_front(d, ndim) for d in ([dim] if isinstance(dim, int) else dim))
    return found if ndim else ()


def rearranged(line: Line, x: Operand, sizes: Mapping[str, int]) -> Algorithm:
    """The program of a line that only moves elements: dims taken apart, in another order, put together again."""
    many = x.ndim - line.inputs[0].single
    source, target = (list(_brackets(term, many)) for term in (line.inputs[0], line.outputs[0]))
    shape: list[int] = []
    for size, names in zip(x.shape, source, strict=True):
        parts = [sizes.get(name, 1) for name in names]
        rest, left = divmod(size, math.prod(parts))
        if left:
            raise ValueError(f"{line.text!r}: a dim of size {size} is not made of blocks of {math.prod(parts)}")
        shape += [part if name in sizes else rest for name, part in zip(names, parts, strict=True)]
    at = _numbered(source)
    order = [at.index(name) for name in _numbered(target)]
    ends = list(accumulate(map(len, target), initial=0))
    final = [math.prod(shape[i] for i in order[a:b]) for a, b in pairwise(ends)]
    return Algorithm(
        lambda x, *_, **__: x.reshape(shape).permute(order).clone(memory_format=torch.contiguous_format).reshape(final)
    )


def _brackets(term: Term, many: int) -> Iterator[tuple[str, ...]]:
    """The factors of each dim, of a group of `many` dims one each."""
    for word in term.words:
        yield from [(f"{word.name}{i}",) for i in range(many)] if word.many else [(word.name, *word.inner)]


def _numbered(dims: Iterable[Iterable[str]]) -> list[tuple[str, int]]:
    """All factors in order; the second of a name is another one than the first."""
    names = [name for dim in dims for name in dim]
    return [(name, names[:i].count(name)) for i, name in enumerate(names)]


# -- rules that are lines ----------------------------------------------------------------------------------
def line(names: str, text: str, linear: str = "none", **more: Any) -> None:
    """Register a rule that is nothing but its line; arguments as of `line_rule`."""
    rule(names)(line_rule(text, linear, **more))


def line_rule(
    text: str, linear: str = "none", takes: str | inspect.Signature = "", **more: Any
) -> Callable[..., Factors | None]:
    """The rule a line stands for; it answers None for a call whose tensors do not fit the line. Of several, with `|`
    between them, the first that fits counts.

    `takes` are the arguments of the op, as ``"x dim=-1 keepdim=False"``: those named `dim` and `keepdim` are what the
    line means by them. Without it, tensors are taken in the order of the call, by position."""
    lines, signature = forms(text), _signature(takes) if isinstance(takes, str) else takes
    names_dims = any(form.names_dims for form in lines)

    def from_line(*args: Any, **kwargs: Any) -> Factors | None:
        if not kwargs and not names_dims:  # the common case: no need to know which argument is which
            operands = list(operands_in(args))
            form = next((form for form in lines if form.fits(operands)), None)
            return None if form is None else factors(form.text, operands, linear, **more)
        arguments = _bound(signature, args, kwargs)
        operands = list(operands_in(arguments.values()))
        form = next((form for form in lines if form.fits(operands)), None)
        by_name = any(isinstance(value, Operand) for value in arguments.get("named", {}).values())
        if by_name or form is None:
            return None  # tensors by name may come in any order: below, torch gives them by position
        if not names_dims:
            return factors(form.text, operands, linear, **more)
        dim, keepdim = arguments["dim"], arguments.get("keepdim", False)
        if isinstance(dim, (bool, str, torch.dtype)):
            return None  # another form of the call, with something else in this place
        every = isinstance(dim, (list, tuple)) and not dim  # as torch has it
        return factors(form.text, operands, linear, dim=None if every else dim, keepdim=keepdim, **more)

    return _described(from_line, text, signature)


def rearrangement(names: str, text: str, takes: str) -> None:
    """Register ops that only move the elements of one tensor, by a line with the same factors on both sides, as
    ``"n (g c) *s -> n (c g) *s"``. Of what the ops take, as ``"x g"``, numbers are the sizes of factors."""
    parsed, signature = parse(text), _signature(takes)

    def from_line(*args: object, **kwargs: object) -> Algorithm:
        arguments = _bound(signature, args, kwargs)
        sizes = {name: value for name, value in arguments.items() if isinstance(value, int)}
        return rearranged(parsed, next(operands_in(arguments.values())), sizes)

    rule(names)(_described(from_line, text, signature))


def _bound(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _described(function: R, text: str, signature: inspect.Signature) -> R:
    """The function with what people and the engine read off a rule: its line, and the arguments it takes."""
    function.__doc__ = text
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _signature(takes: str) -> inspect.Signature:
    """
    >>> _signature("x dim=-1")
    <Signature (x, dim=-1, *rest, **named)>
    """
    found = []
    for word in takes.split():
        name, _, default = word.partition("=")
        value = ast.literal_eval(default) if default else inspect.Parameter.empty
        found.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value))
    rest = inspect.Parameter("rest", inspect.Parameter.VAR_POSITIONAL)
    return inspect.Signature([*found, rest, inspect.Parameter("named", inspect.Parameter.VAR_KEYWORD)])
