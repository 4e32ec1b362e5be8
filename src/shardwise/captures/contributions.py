"""The parts of which autograd adds up the gradient of one tensor, so that a replay hands them on one by one.

A tensor that is used several times in a call gets a gradient from each use. Where the results of two calls are
differentiated together, autograd adds all of them up in the order in which they come. Were those of one call added up
inside of its backward program, the sum of both calls would be rounded otherwise than in an eager run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from shardwise.captures.program import GRADIENT_SUMS, Ref, Statement

MOST_BYTES = 1 << 28  # that parts of gradients may take in one backward pass beyond what an eager run keeps


class Parts:
    """Per tensor, the gradients that its uses have given, in their order.

    Attributes:
        found: Their numbers in the program.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], number_of: Callable[[torch.Tensor], Ref]) -> None:
        self._edges = [get_gradient_edge(t) for t in tensors]
        self._sizes = [t.numel() * t.element_size() for t in tensors]
        self._at = {_key(edge): i for i, edge in enumerate(self._edges)}
        self._number_of = number_of
        self.found: list[list[Ref]] = [[] for _ in tensors]

    @contextmanager
    def watching(self, roots: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, a backward pass from the roots is looked at."""
        for root, seed in zip(roots, seeds, strict=True):
            self._note(_key(get_gradient_edge(root)), seed)
        nodes = _nodes_behind(roots)
        with ExitStack() as stack:
            for node in nodes:
                edges = [_key(edge) for edge in node.next_functions]
                if any(edge in self._at for edge in edges):
                    register = getattr(node, "register_hook_on_locals", node.register_hook)
                    stack.callback(register(self._hook(edges)).remove)
            yield

    def _hook(self, edges: Sequence[tuple[object, int]]) -> Callable[..., None]:
        def note(gives: Sequence[torch.Tensor | None], _: object) -> None:
            for edge, grad in zip(edges, gives, strict=True):
                if grad is not None:
                    self._note(edge, grad)

        return note

    def _note(self, edge: tuple[object, int], grad: torch.Tensor) -> None:
        at = self._at.get(edge)
        if at is not None:
            self.found[at].append(self._number_of(grad))

    @property
    def extra_bytes(self) -> int:
        """What all parts together take beyond the two that an eager run has at a time."""
        return sum(max(len(parts) - 2, 0) * size for parts, size in zip(self.found, self._sizes, strict=True))

    def take_apart(self, statements: list[Statement], sums: Sequence[Ref | None]) -> bool:
        """Take out of a backward program what adds the parts up.

        Args:
            statements: The program.
            sums: The gradient of each tensor.

        Returns:
            Whether the parts are known; else nothing is taken out.
        """
        gone: set[int] = set()
        for parts, total in zip(self.found, sums, strict=True):
            chain = _chain(statements, parts, total)
            if chain is None:
                return False
            gone |= chain
        statements[:] = [s for i, s in enumerate(statements) if i not in gone]
        return True


def _key(edge: GradientEdge | tuple[Node | None, int]) -> tuple[object, int]:
    return edge[0], edge[1]


def _nodes_behind(roots: Sequence[torch.Tensor]) -> list[Node]:
    found: dict[Node, None] = {}
    waiting = [root.grad_fn for root in roots]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [behind for behind, _ in node.next_functions]
    return list(found)


def _chain(statements: Sequence[Statement], parts: Sequence[Ref], total: Ref | None) -> set[int] | None:
    """The places of the statements that add parts up to a total; None if others do."""
    if not parts:
        return set() if total is None else None
    found: set[int] = set()
    so_far, at = parts[0], 0
    for part in parts[1:]:
        while at < len(statements) and not _adds(statements[at], so_far, part):
            at += 1
        if at == len(statements):
            return None
        found.add(at)
        so_far, at = statements[at].outs[0] or so_far, at + 1
    return found if so_far is total else None


def _adds(statement: Statement, one: Ref, other: Ref) -> bool:
    given = statement.args
    return statement.func in GRADIENT_SUMS and len(given) == 2 and given[0] is one and given[1] is other
