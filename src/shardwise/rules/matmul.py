"""Products of matrices: a cut row, column or batch factor passes; if the contracted one is cut, a Partial sum comes."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.strategy import Algorithm, Factors, Gathered, Operand, Tensor, factors, line
from shardwise.strategy.lost import loses
from shardwise.strategy.order import is_endless
from shardwise.strategy.registry import program, rule
from shardwise.torch_private.tensors import is_any_autocast_enabled

line("mm", "m k, k n -> m n", linear="each")
line("bmm", "b m k, b k n -> b m n", linear="each")
line("mv", "m k, k -> m", linear="each")
line("dot vdot", "k, k -> ", linear="each")
line("outer ger", "m, n -> m n", linear="each")


@rule("kron")
def kron(x: Operand, y: Operand) -> Gathered | Algorithm:
    """After a write to an operand, the backward pass of torch's kron takes the new values and does not raise. A moved
    operand no longer has them, so kron is then made of views, with which a write raises in the backward pass."""
    if all(op.layout.is_plain for op in (x, y)):
        return Gathered("compute it on every rank, which has the operands as a whole")
    return Algorithm(_kron_of_views)


def _kron_of_views(x: Tensor, y: Tensor) -> Tensor:
    dims = max(x.dim(), y.dim())
    x, y = (t.reshape((1,) * (dims - t.dim()) + tuple(t.shape)) for t in (x, y))
    left = x.reshape([n for size in x.shape for n in (size, 1)])
    right = y.reshape([n for size in y.shape for n in (1, size)])
    return (left * right).reshape([m * n for m, n in zip(x.shape, y.shape, strict=True)])


line("linear", "*b k, n k, +n? -> *b n", "each", takes="x weight bias=None", contiguous=True)


# vectors stand for a row on the left and a column on the right
_FORMS = "k, k -> | *b m k, k -> *b m | k, *b k n -> *b n | *b m k, *b k n -> *b m n"
line("matmul", _FORMS, "each", takes="x other")
program("rmatmul")(lambda y, x: x @ y)


# where infinity times zero comes in, kernels differ in when they multiply
_ENDLESS = Gathered("gather, since what is infinity times a sum depends on the kernel, and compute it on every rank")


def plus_product(name: str, text: str) -> None:
    """An addend that is broadcast to the product of two others."""
    out = text.partition("->")[2].split()

    @rule(name)
    def sum_of(addend: Operand, x: Operand, y: Operand, *, beta: Any = 1, alpha: Any = 1) -> Factors | Gathered:
        if is_endless(beta, alpha):
            return _ENDLESS
        spec = factors(f"+{' '.join(out[-addend.ndim :] if addend.ndim else ())}, {text}", [addend, x, y], "each")
        if not any(op.dtype.to_real().is_floating_point for op in (addend, x, y)):
            # torch's kernels for empty parts do not cast
            spec.local = lambda *_: lambda *xs: getattr(torch, name)(*xs, beta=int(beta), alpha=int(alpha))
        return spec


plus_product("addmm", "m k, k n -> m n")
plus_product("baddbmm", "b m k, b k n -> b m n")
plus_product("addbmm", "b m k, b k n -> m n")
plus_product("addr", "m, n -> m n")


@rule("addmv")
def addmv(addend: Operand, x: Operand, y: Operand, *, beta: complex = 1, alpha: complex = 1) -> Algorithm | Gathered:
    return _ENDLESS if is_endless(beta, alpha) else Algorithm(_addmv)


def _addmv(addend: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """By its parts: torch's kernel does not broadcast the addend of an empty product."""
    if not any(t.dtype.to_real().is_floating_point for t in (addend, x, y)):
        alpha, beta = int(alpha), int(beta)
    product = alpha * (x @ y)
    return product if beta == 0 else beta * addend.expand(x.shape[:1]) + product


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
    return factors(f"{', '.join(map(' '.join, terms))} -> {' '.join(right)}", tensors, "each")


@rule("bilinear")
def bilinear(x: Operand, y: Operand, weight: Operand, bias: Operand | None = None) -> Factors | None:
    """By its one part, below. But autocast casts products inside of that part, so then ranks call the whole."""
    if not is_any_autocast_enabled():
        return None
    operands = [op for op in (x, y, weight, bias) if op is not None]
    return factors("*b i!, *b j!, n i! j!, +n? -> *b n", operands, "each")


@rule("_trilinear")
def trilinear(x: Operand, y: Operand, z: Operand, *without: Any, **kwargs: object) -> Factors:
    """What bilinear is made of: `without` says which dims of the product each of the three, and the sum, lacks."""
    every = range(x.ndim + len(without[0]))
    *inputs, output = (tuple(f"d{d}" for d in every if d not in lacks) for lacks in without[:4])
    return Factors(inputs, [output], linear="each")


# -- distances ---------------------------------------------------------------------------------------------
_MODES = ["use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"]


@rule("cdist _cdist_forward")
def cdist(x: Operand, y: Operand, p: float = 2.0, compute_mode: Any = _MODES[0]) -> Factors:
    """The pairs pass. Whether torch goes by a product of matrices follows from the global sizes, not a rank's."""
    mode = compute_mode if isinstance(compute_mode, str) else _MODES[compute_mode or 0]
    if mode == _MODES[0]:
        mode = _MODES[1 if max(x.shape[-2], y.shape[-2]) > 25 else 2]
    return factors("*b m k!, *b n k! -> *b m n", [x, y], call=lambda a, b: torch.cdist(a, b, p, mode))


line("pdist _pdist_forward", "n! k! -> m")  # every row meets every other


@program("block_diag")
def block_diag(*tensors: object) -> Tensor:
    blocks = [torch.atleast_2d(t) for t in (tensors[0] if isinstance(tensors[0], (list, tuple)) else tensors)]
    ends = list(accumulate(b.shape[1] for b in blocks))
    return torch.cat([F.pad(b, (end - b.shape[1], ends[-1] - end)) for b, end in zip(blocks, ends, strict=True)])


loses(torch.chain_matmul, "out")(lambda out, *matrices: torch.linalg.multi_dot(matrices, out=out))
