"""Products of matrices: cut a row, column or batch factor and it passes; cut the contracted one and the result is a
Partial sum."""

from __future__ import annotations

from typing import Any

from shardwise.layout import contiguous_stride
from shardwise.rules.notation import factors, line, parse
from shardwise.rules.registry import rule
from shardwise.rules.spec import Algorithm, Factors, Operand, Result

line("mm", "m k, k n -> m n", linear="each")
line("bmm", "b m k, b k n -> b m n", linear="each")
line("mv", "m k, k -> m", linear="each")
line("dot vdot", "k, k -> ", linear="each")
line("outer ger", "m, n -> m n", linear="each")


_LINEAR = parse("*b k, n k, n? -> *b n")


@rule("linear")
def linear(x: Operand, weight: Operand, bias: Operand | None = None) -> Factors | None:
    """``*b k, n k, n? -> *b n``: the bias joins the one part of a sum, if k is cut."""
    operands = [op for op in (x, weight, bias) if op is not None]
    if weight.ndim != 2 or not all(isinstance(op, Operand) for op in operands):
        return None
    known = x.shape[-1:] == weight.shape[1:] and len({op.dtype for op in operands}) == 1
    shape = (*x.shape[:-1], weight.shape[0])
    result = Result(shape, x.dtype, contiguous_stride(shape)) if known else None
    return factors(_LINEAR, operands, "each", joint=frozenset({0, 1}), addends=frozenset({2}), result=result)


@rule("matmul")
def matmul(x: Operand, other: Operand, **kwargs: Any) -> Factors:
    """Vectors stand for a row on the left and a column on the right."""
    left, right = ("k" if x.ndim == 1 else "*b m k"), ("k" if other.ndim == 1 else "*b k n")
    batch = "*b " if max(x.ndim, other.ndim) > 2 else ""
    out = batch + ("" if x.ndim == 1 else "m ") + ("" if other.ndim == 1 else "n")
    return factors(parse(f"{left}, {right} -> {out}"), [x, other], linear="each")


@rule("rmatmul")
def rmatmul(y: Operand, x: Operand) -> Factors:
    """y.__rmatmul__(x) is x @ y."""
    product = matmul(x, y)
    product.inputs = [product.inputs[1], product.inputs[0]]
    return product


def _plus_product(text: str, addend: Operand, x: Operand, y: Operand) -> Factors:
    """An addend that is broadcast to the product of two others."""
    product = factors(parse(text), [x, y], linear="each")
    names = product.outputs[0]
    sizes = {f: n for op, fs in zip((x, y), product.inputs, strict=True) for f, n in zip(fs, op.shape, strict=True)}
    mine = [
        f if n == sizes.get(f) else None for f, n in zip(names[len(names) - addend.ndim :], addend.shape, strict=True)
    ]
    return Factors(
        [tuple(mine), *product.inputs], product.outputs, linear="each", joint=frozenset({1, 2}), addends=frozenset({0})
    )


@rule("addmm")
def addmm(addend: Operand, x: Operand, y: Operand, *, beta: Any = 1, alpha: Any = 1) -> Factors:
    return _plus_product("m k, k n -> m n", addend, x, y)


@rule("baddbmm")
def baddbmm(addend: Operand, x: Operand, y: Operand, *, beta: Any = 1, alpha: Any = 1) -> Factors:
    return _plus_product("b m k, b k n -> b m n", addend, x, y)


@rule("addmv")
def addmv(addend: Operand, x: Operand, y: Operand, *, beta: Any = 1, alpha: Any = 1) -> Algorithm:
    """By its parts: torch's kernel does not broadcast the addend of an empty product."""

    def run(addend: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if not (addend.is_floating_point() or addend.is_complex()):
            alpha, beta = int(alpha), int(beta)
        product = alpha * (x @ y)
        return product if beta == 0 else beta * addend + product

    return Algorithm(run)


@rule("einsum")
def einsum(equation: str, *operands: Any) -> Factors | None:
    """The equation is the rule. One with an ellipsis or a repeated letter goes by its parts."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "." in equation or any(len(set(t)) != len(t) for t in terms) or len(terms) != len(tensors):
        return None
    if not arrow:
        right = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    sizes: dict[str, int] = {}
    for term, op in zip(terms, tensors, strict=True):
        for c, n in zip(term, op.shape, strict=True):
            sizes[c] = max(n, sizes.get(c, 0))
    ins = [
        tuple(c if n == sizes[c] else None for c, n in zip(t, op.shape, strict=True))
        for t, op in zip(terms, tensors, strict=True)
    ]
    return Factors(ins, [tuple(right)], linear="each")
