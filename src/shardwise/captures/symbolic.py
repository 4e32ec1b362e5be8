"""Stretches of ops of several captures that differ in sizes alone: compiled once, with symbols for what differs.

A new shape is a new capture, which is cheap; a new compilation is not. So a stretch is taken apart into what it does
and the whole numbers in it: sizes in arguments of ops, and the shapes of the tensors that it takes. The first stretch
of a kind is compiled as it is. When another one comes that differs in numbers only, those that differ become symbols,
each one symbol for all places where both have the same pair of numbers, and torch.compile makes code for all of them,
with guards of its own. Later stretches that fit the symbols run that code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import fx

from shardwise.captures.program import Ref, Statement
from shardwise.protocols import Item
from shardwise.torch_private.tensors import mark_sizes, schema_of

Numbers = tuple[int, ...]
Code = Callable[..., Sequence[torch.Tensor]]
CompileAlone = Callable[[fx.GraphModule, list[torch.Tensor]], Code]
CompileModule = Callable[[fx.GraphModule], Code]

_MOST = 4  # sets of symbols for one kind of stretch
_MOST_SYMBOLS = 48  # in one of them: they are the dims of a tensor


class Stretch:
    """Statements for a compiler, the tensors that they take and those that others need of them.

    Attributes:
        kind: What it does, without numbers: equal for stretches that differ in sizes alone.
        numbers: The numbers in its arguments.
        with_grad: Whether grad mode is on where it runs.
    """

    def __init__(self, body: Sequence[Statement], taken: Sequence[Ref], outs: Sequence[Ref]) -> None:
        self.body, self.taken, self.outs = body, taken, outs
        self.with_grad = any(s.with_grad for s in body)
        self._numbers: list[int] = []
        place = {ref: i for i, ref in enumerate(taken)}
        kinds: list[Hashable] = []
        for s in body:
            for ref in s.outs:
                if ref is not None:
                    place[ref] = len(place)
            args = tuple(self._kind(item, is_size, place) for item, is_size in _arguments(s))
            kinds.append((s.func, args, tuple(ref is not None and place[ref] for ref in s.outs)))
        self.kind: Hashable = (tuple(kinds), len(taken), tuple(place[ref] for ref in outs), self.with_grad)
        self.numbers: Numbers = tuple(self._numbers)

    def _kind(self, item: Item, is_size: bool, place: dict[Ref, int]) -> Hashable:
        if isinstance(item, Ref):
            return "tensor", place[item]
        if isinstance(item, (list, tuple)):
            return tuple(self._kind(inner, is_size, place) for inner in item)
        if is_size and type(item) is int:
            self._numbers.append(item)
            return "number"
        return type(item), repr(item) if isinstance(item, (float, complex)) else item

    def as_graph(self, symbols: Sequence[int | None] | None = None) -> fx.GraphModule:
        """The statements as a graph of torch.fx. With `symbols`, which tell for each number the symbol that it is, or
        None where it is itself, the graph takes a tensor more, whose shape has the values of the symbols."""
        graph = fx.Graph()
        nodes: dict[Ref, fx.Node] = {ref: graph.placeholder(f"t{ref.number}") for ref in self.taken}
        values: dict[int, fx.Node] = {}
        if symbols is not None:
            sizes = graph.placeholder("sizes")
            for symbol in sorted({s for s in symbols if s is not None}):
                values[symbol] = graph.call_function(torch.ops.aten.sym_size.int, (sizes, symbol))
        given = iter(symbols or [None] * len(self.numbers))

        def put(item: Item, is_size: bool) -> Item:
            if isinstance(item, Ref):
                return nodes[item]
            if isinstance(item, (list, tuple)):
                return type(item)([put(inner, is_size) for inner in item])
            if is_size and type(item) is int:
                symbol = next(given)
                return item if symbol is None else values[symbol]
            return item

        for s in self.body:
            found = [put(item, is_size) for item, is_size in _arguments(s)]
            args, kwargs = tuple(found[: len(s.args)]), dict(zip(s.kwargs, found[len(s.args) :], strict=True))
            func = s.func
            if any(isinstance(item, fx.Node) and item in values.values() for item in found) and _takes_numbers(s):
                func = func.overloadpacket  # type: ignore[attr-defined]
            node = graph.call_function(func, args, kwargs)
            for i, ref in enumerate(s.outs):
                if ref is not None:
                    nodes[ref] = node if s.single else graph.call_function(operator.getitem, (node, i))
        graph.output(tuple(nodes[ref] for ref in self.outs))
        return fx.GraphModule({}, graph)


def _arguments(s: Statement) -> Iterator[tuple[Item, bool]]:
    """The arguments of an op in order, and whether numbers in each are sizes, which may be symbols."""
    schema = schema_of(s.func) if s.is_op else None
    sizes = {} if schema is None else {a.name: _is_size(a.real_type) for a in schema.arguments}
    in_order = list(sizes.values())
    for i, item in enumerate(s.args):
        yield item, i < len(in_order) and in_order[i]
    for name, item in s.kwargs.items():
        yield item, sizes.get(name, False)


def _is_size(kind: Item) -> bool:
    """Whether an argument of this type is a size, a list of sizes, or a number to compute with."""
    while kind.kind() in ("OptionalType", "ListType"):
        kind = kind.getElementType()
    return kind.kind() in ("SymIntType", "NumberType", "TensorType")


def _takes_numbers(s: Statement) -> bool:
    """Whether an op is given a number where its schema wants a tensor: torch makes one of it, not of a symbol."""
    arguments = schema_of(s.func).arguments  # type: ignore[union-attr]
    return any(type(item) is int and str(a.type) == "Tensor" for item, a in zip(s.args, arguments, strict=False))


class Family:
    """Stretches of one kind, and the code that they share.

    Args:
        alone: Compiles a graph for tensors of fixed sizes.
        shared: Compiles one with symbols.
    """

    def __init__(self, alone: CompileAlone, shared: CompileModule) -> None:
        self._alone, self._shared = alone, shared
        self._members: list[Numbers] = []
        self._by_size: dict[Hashable, Code] = {}
        self._by_symbols: list[tuple[list[int | None], Numbers, Code]] = []

    def compiled(self, stretch: Stretch, tensors: list[torch.Tensor]) -> Code:
        """Code for a stretch that is given tensors of these sizes."""
        mine = stretch.numbers + tuple(size for t in tensors for size in t.shape)
        if mine not in self._members:
            for symbols, example, code in self._by_symbols:
                if (values := _values(symbols, example, mine)) is not None:
                    return self._with(code, values, symbols[len(stretch.numbers) :], tensors)
            first = next((member for member in self._members if len(member) == len(mine)), None)
            symbols = [] if first is None else _symbols(first, mine)
            if first is not None and len(self._by_symbols) < _MOST and len({*symbols}) <= _MOST_SYMBOLS:
                code = self._shared(stretch.as_graph(symbols[: len(stretch.numbers)]))
                self._by_symbols.append((symbols, first, code))
                values = _values(symbols, first, mine)
                assert values is not None
                return self._with(code, values, symbols[len(stretch.numbers) :], tensors)
            self._members.append(mine)
        key = mine, *((t.stride(), t.dtype, t.device) for t in tensors)
        if any(s.writes for s in stretch.body):  # what shares memory with what is no part of the key
            return self._alone(stretch.as_graph(), tensors)
        if key not in self._by_size:
            self._by_size[key] = self._alone(stretch.as_graph(), tensors)
        return self._by_size[key]

    @staticmethod
    def _with(code: Code, values: Sequence[int], shapes: Sequence[int | None], tensors: Sequence[torch.Tensor]) -> Code:
        sizes = torch.empty((*values, 0), device=tensors[0].device if tensors else None)
        mark_sizes(sizes, range(len(values)))
        ndims = [t.dim() for t in tensors]
        starts = [sum(ndims[:i]) for i in range(len(ndims))]
        marks = [
            (i, dims)
            for i, (start, n) in enumerate(zip(starts, ndims, strict=True))
            if (dims := [dim for dim in range(n) if shapes[start + dim] is not None])
        ]

        def run(*given: torch.Tensor) -> Sequence[torch.Tensor]:
            if marks:  # once: they are for the compiler
                own = [t.detach() for t in given]
                for i, dims in marks:
                    mark_sizes(own[i], dims)
                marks.clear()
                return code(*own, sizes)
            return code(*given, sizes)

        return run


def _symbols(one: Numbers, other: Numbers) -> list[int | None]:
    """For each number of two stretches, None where they are equal, else the number of the pair."""
    pairs: dict[tuple[int, int], int] = {}
    return [None if a == b else pairs.setdefault((a, b), len(pairs)) for a, b in zip(one, other, strict=True)]


def _values(symbols: Sequence[int | None], example: Numbers, mine: Numbers) -> list[int] | None:
    """The values of the symbols in a stretch; None where it does not fit them."""
    if len(mine) != len(example):
        return None
    found: dict[int, int] = {}
    for symbol, known, number in zip(symbols, example, mine, strict=True):
        if symbol is None:
            if number != known:
                return None
        elif found.setdefault(symbol, number) != number:
            return None
    return [found[i] for i in range(len(found))]
