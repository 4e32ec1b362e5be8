"""A line of the notation applied to the tensors of one call: what its rule answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from shardwise.layout import Shard, contiguous_stride
from shardwise.strategy.notation import Line, Term, Word, parse
from shardwise.strategy.spec import Algorithm, Factors, Names, Operand, Result

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
    """The line `text` applied to tensors.

    Args:
        text: The line.
        operands: The tensors of the call, in order.
        linear: As in `Factors`; tensors marked `+` are no factors of a product ("each").
        dim: What `dim` in the line stands for: a dim, several, or None for all.
        keepdim: Whether dims that `*d-dim` leaves out stay with one element.
        sizes: How many blocks a bracket has, where the sizes of the dims do not tell.
        joint: The tensors `linear` speaks of; None for all.
        reduce: The reduction of factors that no result has.
        contiguous: Whether the one result is always new and without gaps, of the tensors' common dtype.
        outputs: How often the last result of the line comes.
        call: A function of the local tensors to call on every rank, instead of the op itself.
        more: Other fields of `Factors`.

    Returns:
        A name for every dim, None for a dim that must be whole.
    """
    reading = _Reading(parse(text), operands, dim, keepdim, sizes or {})
    addends = frozenset(i for i, term in enumerate(reading.terms) if term.addend)
    if joint is None and addends and linear == "each":
        joint = frozenset(range(len(operands))) - addends
    inputs, results = reading.names()
    results = [*results[:-1], *results[-1:] * outputs]
    spec = Factors(inputs, results, linear, None if joint is None else frozenset(joint), addends=addends, **more)
    if reduce != "sum":
        spec.reduce = {name: reduce for names in spec.inputs for name in names if name}
    if contiguous:
        spec.result = reading.result()
    if call is not None:
        spec.local = lambda inputs, outputs: call
    return spec


class _Reading:
    """A line next to the tensors of one call: the factor of every dim, and how large each factor is."""

    def __init__(
        self, line: Line, operands: Sequence[Operand], dim: Named, keepdim: bool, blocks: Mapping[str, int]
    ) -> None:
        self.line, self.operands, self.keepdim = line, operands, keepdim
        self.terms = line.terms(len(operands))
        pairs = list(zip(self.terms, operands, strict=True))
        words = [word for term in (*self.terms, *line.outputs) for word in term.words]
        self.counts: dict[str, int] = {}  # how many dims a group has
        for term, op in pairs:
            for word in term.words:
                if word.many:
                    self.counts[word.name] = max(self.counts.get(word.name, 0), op.ndim - term.single)
        # the dims of a group that the call's `dim` names
        self.marked = {w.name: dims_named(dim, self.counts[w.name] + (w.named == "+")) for w in words if w.named}
        self.spelled = [
            [name for word in term.words for name in self._group(word, op.ndim - term.single)] for term, op in pairs
        ]
        merged = {word.name for word in words if word.inner}
        self.sizes: dict[str, int] = {}
        self.alike = not merged  # whether all dims of a factor have one size
        for names, op in zip(self.spelled, operands, strict=True):
            for name, size in zip(names, op.shape, strict=True):
                before = self.sizes.get(name, size)
                self.alike &= before == size
                self.sizes[name] = max(before, size) if before and size else 0
        self.whole = {name for word in words for name in self._whole(word)}
        self.whole |= {name for name in merged if not self._passes(name, blocks.get(name))}
        self.merged = merged

    def _group(self, word: Word, many: int) -> list[str]:
        """The factors a word stands for; a group of fewer dims than others of its name has the rightmost ones."""
        count = self.counts.get(word.name, 0)
        return [f"{word.name}{i}" for i in range(count - many, count)] if word.many else [word.name]

    def _whole(self, word: Word) -> Iterator[str]:
        yield from word.inner
        if word.whole:
            yield from self._group(word, self.counts.get(word.name, 0))
        elif word.named == "!":
            yield from (f"{word.name}{i}" for i in self.marked[word.name])

    def _passes(self, name: str, count: int | None) -> bool:
        """Whether a factor in brackets may be cut: where a block is one element, or all ranks have as many blocks."""
        dims = [(op, names.index(name)) for op, names in zip(self.operands, self.spelled) if name in names]
        sizes = [op.shape[d] for op, d in dims]
        count = math.gcd(*sizes) if count is None else count
        cuts = [(axis, p) for op, d in dims for axis, p in enumerate(op.layout.placements) if p.is_shard(d)]
        ranks = math.prod(self.operands[0].mesh.shape[axis] for axis in dict(cuts))
        chunked = all(isinstance(p, Shard) and p.pieces is None for _, p in cuts)
        return (set(sizes) == {count} and self._are_single(name)) or (chunked and count % ranks == 0)

    def _are_single(self, name: str) -> bool:
        """Whether the blocks of the results, too, are of one element, if those of the inputs are."""
        known = {word for term in self.terms for word in term.words}
        new = [w for term in self.line.outputs for w in term.words if w.name == name and w not in known]
        return all(self.sizes.get(inner) == 1 for word in new for inner in word.inner)

    def names(self) -> tuple[list[Names], list[Names]]:
        """The factors of the inputs and of the results."""
        sizes = self.sizes
        free = lambda name, size: name in self.whole or (size != sizes[name] and name not in self.merged)
        inputs: list[Names] = [
            tuple(None if free(*dim) else dim[0] for dim in zip(names, op.shape, strict=True))
            for names, op in zip(self.spelled, self.operands, strict=True)
        ]
        return inputs, [tuple(self._result_names(term)) for term in self.line.outputs]

    def _result_names(self, term: Term) -> Iterator[str | None]:
        for word in term.words:
            names = [None if n in self.whole else n for n in self._group(word, self.counts.get(word.name, 0))]
            if word.named == "+":
                names.insert(self.marked[word.name][0], None)
            elif word.named == "-":
                gone = self.marked[word.name]
                names = [None if d in gone else n for d, n in enumerate(names) if self.keepdim or d not in gone]
            yield from names

    def result(self) -> Result | None:
        """A result without gaps of the tensors' common dtype; None where the call may be wrong."""
        kinds = {op.dtype for op in self.operands if op.dtype.is_floating_point} or {op.dtype for op in self.operands}
        words = self.line.outputs[0].words
        names = [name for word in words for name in self._group(word, self.counts.get(word.name, 0))]
        if not self.alike or len(kinds) != 1 or not self.sizes.keys() >= set(names):
            return None
        shape = tuple(self.sizes[name] for name in names)
        return Result(shape, kinds.pop(), contiguous_stride(shape))


def dims_named(dim: Named, ndim: int) -> tuple[int, ...]:
    """The dims that `dim` names, counted from the front: all of them for None."""
    if dim is None:
        return tuple(range(ndim))
    found = tuple(range(ndim or 1)[d] for d in ([dim] if isinstance(dim, int) else dim))
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
