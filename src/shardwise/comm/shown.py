"""Prints the values of a tensor in few lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.layout.split import Intervals, count
from shardwise.torch_private.tensors import body_of, print_limits

MOST_LINES = 34  # of values, under torch's default options
_LETTERS = 4  # of the shortest elements, about: `0., `


def value_text(value: torch.Tensor) -> str:
    """A plain tensor in few lines."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta or value.numel() <= 8:
        return repr(value)
    text = numbers_of(tuple(value.shape), lambda wanted: picked(value, wanted), len("tensor("))
    facts = [f"shape={tuple(value.shape)}", f"dtype={value.dtype}"]
    facts += ["requires_grad=True"] if value.requires_grad else []
    return f"tensor({text}, {', '.join(facts)})"


Wanted = list[Intervals]  # for each dim, the indices to be shown
Pick = Callable[[Wanted], torch.Tensor]  # their values


def numbers_of(shape: tuple[int, ...], pick: Pick, indent: int) -> str:
    """The values of a tensor of this shape as torch prints them, in few lines unless the program asked torch for more.

    Args:
        shape: The shape of the whole tensor.
        pick: Gives the values at some indices.
        indent: How far lines after the first are indented.
    """
    threshold, edges, width = print_limits()
    most = MOST_LINES if threshold <= 1000 and edges <= 3 else None
    elements = 1
    for n in shape:
        elements *= n
    if not elements:
        return "[]"
    wraps = -(-shape[-1] * _LETTERS // max(1, width)) if shape else 1
    if elements <= threshold and (most is None or _lines(shape, elements) * wraps <= most):
        text = body_of(pick([((0, n),) for n in shape]), indent, threshold, edges)
        if most is None or text.count("\n") < most:
            return text
    edge = next((e for e in range(edges, 1, -1) if most is None or _lines(shape, e) <= most), 1)
    text = body_of(_with_gaps(pick([_ends(n, edge) for n in shape]), shape, edge), indent, 0, edge)
    lines = text.splitlines()
    if most is None or len(lines) <= most:
        return text
    return "\n".join([*lines[: most - 8], " " * indent + "...", *lines[-6:]])


def _lines(shape: Sequence[int], edge: int) -> int:
    """How many lines torch prints, if a row fits on one."""
    lines = 1
    for blanks, n in enumerate(reversed(shape[:-1])):
        shown = min(n, 2 * edge)
        dots = 1 if n > shown else 0
        lines = shown * lines + dots + (shown + dots - 1) * blanks
    return lines


def _ends(n: int, edge: int) -> Intervals:
    return ((0, n),) if n <= 2 * edge else ((0, edge), (n - edge, n))


def _with_gaps(corner: torch.Tensor, shape: Sequence[int], edge: int) -> torch.Tensor:
    """The shown elements, with one more index in each dim that torch is to abbreviate: it prints dots for it."""
    for dim, n in enumerate(shape):
        if n > 2 * edge:
            first, last = corner.narrow(dim, 0, edge), corner.narrow(dim, edge, edge)
            corner = torch.cat([first, first.narrow(dim, 0, 1), last], dim)
    return corner


def picked(value: torch.Tensor, wanted: Wanted) -> torch.Tensor:
    """The elements of a tensor at some indices."""
    value = readable(value)
    for dim, held in enumerate(wanted):
        if count(held) < value.shape[dim]:
            value = torch.cat([value.narrow(dim, a, b - a) for a, b in held], dim)
    return value


def readable(value: torch.Tensor) -> torch.Tensor:
    """The values of a tensor without its graph, lazy conjugation and negation done."""
    value = value.detach()
    return value.resolve_conj().resolve_neg() if value.is_complex() or value.is_neg() else value
