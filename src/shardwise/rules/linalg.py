"""Linear algebra: whoever holds a matrix works on it whole. Batch dims pass, and so do columns of right-hand sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardwise.layout.placement import REPLICATE
from shardwise.strategy.lines import line
from shardwise.strategy.program import Tensor, run_local, whole
from shardwise.strategy.reading import factors
from shardwise.strategy.registry import program, rule
from shardwise.strategy.spec import Assignment, Choice, Factors, Gathered, Operand, Shard, operands_in

# `!` marks what must be whole; letters that only outputs have are never cut. The second line is for left=False, the
# third for right-hand sides that are vectors.
_LINES = {
    "linalg_cholesky_ex linalg_inv_ex": "*b n! n! -> *b n n, *b",
    "linalg_lu_factor_ex linalg_ldl_factor_ex": "*b m! n! -> *b m n, *b k, *b",
    "cholesky_inverse linalg_matrix_exp": "*b n! n! -> *b n n",
    "cholesky_solve": "*b n! r, *b n! n! -> *b n r",
    "_linalg_slogdet": "*b n! n! -> *b, *b, *b n n, *b n",
    "linalg_solve_triangular": "*b n! n!, *b n! r -> *b n r | *b n! n!, *b r n! -> *b r n",
    "triangular_solve": "*b n! r!, *b n! n! -> *b n r, *b n n",
    "linalg_lu": "*b m! n! -> *b m m, *b m k, *b k n",
    "linalg_lu_solve": "*b n! n!, *b n!, *b n! r -> *b n r | *b n! n!, *b n!, *b r n! -> *b r n",
    "lu_unpack": "*b m! n!, *b k! -> *b m m, *b m k, *b k n",
    "linalg_ldl_solve": "*b n! n!, *b n!, *b n! r -> *b n r",
    "linalg_qr": "*b m! n! -> *b m k, *b k n",
    "_linalg_svd": "*b m! n! -> *b m k, *b k, *b k n",
    "_linalg_eigh linalg_eig": "*b n! n! -> *b n, *b n n",
    "linalg_eigvals": "*b n! n! -> *b n",
    "linalg_pinv": "*b m! n!, *b?, *b? -> *b n m",
    "_linalg_solve_ex": "*b n! n!, *b n! r -> *b n r, *b n n, *b n, *b | *b n! n!, *b r n! -> *b r n, *b n n, *b n, *b"
    "| *b n! n!, *b n! -> *b n, *b n n, *b n, *b",
}


class PerMatrix(Factors):
    """Nothing is summed: an output without the factor that is cut is the same on all ranks (the factors of a solve), or
    empty where the call does not ask for it. None of those carries a gradient."""

    def assign(self, operands: Sequence[Operand], outputs: Sequence[Any], pinned: bool) -> Assignment | None:
        pairs = zip(self.outputs, outputs, strict=True)
        self.outputs = [names if len(names) == out.dim() else (None,) * out.dim() for names, out in pairs]
        return super().assign(operands, outputs, pinned)

    def cut(self, factor: str, shard: Shard) -> Choice:
        choice = super().cut(factor, shard)
        return replace(choice, outputs=tuple(REPLICATE if p.is_partial() else p for p in choice.outputs))


def matrices(lines: Sequence[Any], local: Any, *args: Any, left: bool = True, **kwargs: Any) -> PerMatrix | None:
    """The first line, or the one for this form of the call."""
    operands = list(operands_in((*args, *kwargs.values())))
    if len(operands) > len(list(operands_in(args))) and "tol" not in "".join(kwargs):
        return None  # named, so in any order: below, torch gives them by position
    which = int(len(lines) > 1 and not left)
    if len(lines) > 2 and (operands[1].ndim == 1 or operands[1].shape == operands[0].shape[:-1]):
        which = 2  # torch's own condition
    plain = factors(lines[which], operands)
    return PerMatrix(plain.inputs, plain.outputs, local=local)


def checked(lines: Sequence[Any], *args: Any, check_errors: bool = False, **kwargs: Any) -> PerMatrix | Gathered | None:
    if check_errors:
        return Gathered("gather, since every rank must hear of an error, and compute it on every rank")
    return matrices(lines, None, *args, **kwargs)


for _names, _text in _LINES.items():
    _lines = _text.split("|")
    rule(_names)(partial(checked, _lines) if _names.endswith("_ex") else partial(matrices, _lines, None))


@program("_linalg_check_errors")
def check_errors(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
    torch.ops.aten._linalg_check_errors(info.full_tensor(), api_name, is_matrix=is_matrix)


program("cholesky")(lambda x, upper=False: torch.linalg.cholesky(x, upper=upper))


@program("geqrf")
def geqrf(x: Tensor) -> Tensor:
    """A program, since torch has no meta kernel for it."""
    x = whole(x, (x.ndim - 2, x.ndim - 1))
    tau = x._layout.replace(shape=(*x.shape[:-2], min(x.shape[-2:])))
    return torch.return_types.geqrf(run_local(torch.geqrf, [x], [x._layout, tau]))


# -- kernels that refuse empty batches, or lose their gradients --------------------------------------------
def or_empty(func: Callable[..., Any], like: int = 0) -> Callable[..., Any]:
    """func for tensors that may be empty: the kernel gets zeros there, and what it makes of them is cut away. The dims
    of the result are those of argument `like`, as far as that may be empty."""

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        if all(t.numel() for t in tensors):
            return func(*tensors)
        filled = (t if t.numel() else t.sum() + t.new_zeros([max(n, 1) for n in t.shape]) for t in tensors)
        return func(*filled)[tuple(slice(None if n else 0) for n in tensors[like].shape)]

    return call


def _det(x: torch.Tensor) -> Any:
    """Of no matrices torch makes no graph: some are put in, and what comes of them is cut away."""
    if 0 not in x.shape[:-2]:
        return torch.ops.aten._linalg_det(x)
    ones = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand(*(max(n, 1) for n in x.shape[:-2]), -1, -1)
    return tuple(out[tuple(slice(n) for n in x.shape[:-2])] for out in torch.ops.aten._linalg_det(x.sum() + ones))


rule("_linalg_det")(partial(matrices, ["*b n! n! -> *b, *b n n, *b n"], lambda inputs, outputs: _det))
_householder = or_empty(torch.linalg.householder_product)
line("linalg_householder_product", "*b m! n!, *b k! -> *b m n", call=_householder)
line("linalg_cross", "*d!dim, *d -> *d", "each", takes="x other dim=-1")


@rule("ormqr")
def ormqr(x: Operand, tau: Operand, other: Operand, left: bool = True, transpose: bool = False) -> Factors:
    local = or_empty(lambda x, tau, other: torch.ormqr(x, tau, other, left, transpose), 2)
    text = f"*b m! k!, *b k!, {'*b n! r -> *b n r' if left else '*b r n! -> *b r n'}"
    return factors(text, [x, tau, other], "each", joint={2}, call=local)
