"""Products of matrices: cut a row, column or batch factor and it passes; cut the contracted one and the result is a
Partial sum."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.layout import contiguous_stride
from shardwise.strategy.notation import factors, line, parse
from shardwise.strategy.registry import rule
from shardwise.strategy.spec import Algorithm, Factors, Operand, Result

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


def plus_product(name: str, text: str) -> None:
    """An addend that is broadcast to the product of two others."""
    line = parse(text)

    @rule(name)
    def sum_of(addend: Operand, x: Operand, y: Operand, *, beta: Any = 1, alpha: Any = 1) -> Factors:
        product = factors(line, [x, y], linear="each")
        names = product.outputs[0]
        sizes = {f: n for op, fs in zip((x, y), product.inputs, strict=True) for f, n in zip(fs, op.shape, strict=True)}
        aligned = zip(names[len(names) - addend.ndim :], addend.shape, strict=True)
        mine = tuple(f if n == sizes.get(f) else None for f, n in aligned)
        inputs, joint, addends = [mine, *product.inputs], frozenset({1, 2}), frozenset({0})
        spec = Factors(inputs, product.outputs, linear="each", joint=joint, addends=addends)
        if not (
            addend.dtype.is_floating_point or addend.dtype.is_complex
        ):  # torch's kernels for empty parts do not cast
            whole = {"beta": int(beta), "alpha": int(alpha)}
            spec.local = lambda inputs, outputs: lambda *tensors: getattr(torch, name)(*tensors, **whole)
        return spec


plus_product("addmm", "m k, k n -> m n")
plus_product("baddbmm", "b m k, b k n -> b m n")
plus_product("addbmm", "b m k, b k n -> m n")
plus_product("addr", "m, n -> m n")


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


@rule("_trilinear")
def trilinear(x: Operand, y: Operand, z: Operand, *without: Any, **kwargs: Any) -> Factors:
    """What bilinear is made of: `without` says which dims of the product each of the three, and the sum, lacks."""
    every = range(x.ndim + len(without[0]))
    *inputs, output = (tuple(f"d{d}" for d in every if d not in lacks) for lacks in without[:4])
    return Factors(inputs, [output], linear="each")


# -- distances ---------------------------------------------------------------------------------------------
_DISTANCES = parse("*b m k!, *b n k! -> *b m n")
_MODES = ["use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"]


@rule("cdist _cdist_forward")
def cdist(x: Operand, y: Operand, p: float = 2.0, compute_mode: Any = _MODES[0]) -> Factors:
    """The pairs pass. Whether torch goes by a product of matrices follows from the global sizes, not a rank's."""
    mode = compute_mode if isinstance(compute_mode, str) else _MODES[compute_mode or 0]
    if mode == _MODES[0]:
        mode = _MODES[1 if max(x.shape[-2], y.shape[-2]) > 25 else 2]
    return factors(_DISTANCES, [x, y], local=lambda inputs, outputs: lambda a, b: torch.cdist(a, b, p, mode))


line("pdist _pdist_forward", "n! k! -> m")  # every row meets every other


@rule("block_diag")
def block_diag(*tensors: Any) -> Algorithm:
    def run(*tensors: Any) -> Any:
        blocks = [torch.atleast_2d(t) for t in (tensors[0] if isinstance(tensors[0], (list, tuple)) else tensors)]
        rows, before, after = [], 0, sum(b.shape[1] for b in blocks)
        for block in blocks:
            n, after = len(block), after - block.shape[1]
            rows.append(torch.cat([block.new_zeros(n, before), block, block.new_zeros(n, after)], 1))
            before += block.shape[1]
        return torch.cat(rows)

    return Algorithm(run)
