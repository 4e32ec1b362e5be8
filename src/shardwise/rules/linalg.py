"""Linear algebra: whoever holds a matrix works on it whole. Batch dims pass, and so do columns of right-hand sides.
Of Fourier transforms, linear too, the transformed dims are whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.layout.shapes import dense_stride, outermost_first
from shardwise.strategy import Answer, Factors, Gathered, Operand, Tensor, factors, line, operands_in, run_local, whole
from shardwise.strategy.memory import contiguous, formatted, restrided, stored
from shardwise.strategy.reading import dims_named
from shardwise.strategy.registry import program, rule

# results that have no cut factor are the same on all ranks (the factorization behind a solve) and carry no gradient
_LINES = {
    "cholesky_inverse linalg_matrix_exp": "*b n! n! -> *b n n",
    "cholesky_solve": "*b n! r, *b n! n! -> *b n r",
    "_linalg_slogdet": "*b n! n! -> *b, *b, *b n n, *b n",
    "triangular_solve": "*b n! r!, *b n! n! -> *b n r, *b n n",
    "linalg_lu": "*b m! n! -> *b m m, *b m k, *b k n",
    "lu_unpack": "*b m! n!, *b k! -> *b m m, *b m k, *b k n",
    "linalg_ldl_solve": "*b n! n!, *b n!, *b n! r -> *b n r",
    "linalg_qr": "*b m! n! -> *b m k, *b k n",
    "_linalg_svd": "*b m! n! -> *b m k, *b k, *b k n",
    "_linalg_eigh linalg_eig": "*b n! n! -> *b n, *b n n",
    "linalg_eigvals": "*b n! n! -> *b n",
}
for _names, _text in _LINES.items():
    line(_names, _text, same=True)
line("linalg_pinv", "*b m! n!, *b?, *b? -> *b n m", same=True, takes="x atol=None rtol=None")


def with_forms(names: str, text: str, right: str = "", vector: str = "") -> None:
    """Ops that have another line where the unknown stands on the left (left=False) or is a vector."""

    @rule(names)
    def form(*args: Any, left: bool = True, check_errors: bool = False, **kwargs: Any) -> Answer:
        operands = list(operands_in(args))
        if check_errors:
            return Gathered("gather, since every rank must learn of an error, and compute it on every rank")
        if next(operands_in(kwargs.values()), None) is not None:
            return None  # named, so in any order: below, torch gives them by position
        if vector and (operands[1].ndim == 1 or operands[1].shape == operands[0].shape[:-1]):  # torch's own condition
            return factors(vector, operands, same=True)
        return factors(text if left else right, operands, same=True)


def by_columns(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of matrices as LAPACK stores them."""
    return dense_stride(shape, (*range(len(shape), 2, -1), 1, 2))


for _names, _at in (("linalg_eig", 1), ("linalg_svd _linalg_svd", 2)):
    stored(_names, "cpu")(lambda result, *_, at=_at, **__: restrided(result[at], by_columns(result[at].shape)))


@stored("svd", device="cpu")
def of_old_svd(result: Sequence[torch.Tensor], *args: object, **kwargs: object) -> None:
    """Its third result is a transposed view of what LAPACK stored."""
    formatted(result[2], torch.contiguous_format)


with_forms("linalg_cholesky_ex linalg_inv_ex", "*b n! n! -> *b n n, *b")
with_forms("linalg_lu_factor_ex linalg_ldl_factor_ex", "*b m! n! -> *b m n, *b k, *b")
with_forms("linalg_solve_triangular", "*b n! n!, *b n! r -> *b n r", "*b n! n!, *b r n! -> *b r n")
with_forms("linalg_lu_solve", "*b n! n!, *b n!, *b n! r -> *b n r", "*b n! n!, *b n!, *b r n! -> *b r n")
with_forms(
    "_linalg_solve_ex",
    "*b n! n!, *b n! r -> *b n r, *b n n, *b n, *b",
    "*b n! n!, *b r n! -> *b r n, *b n n, *b n, *b",
    "*b n! n!, *b n! -> *b n, *b n n, *b n, *b",
)


@program("_linalg_check_errors")
def check_errors(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
    torch.ops.aten._linalg_check_errors(info.full_tensor(), api_name, is_matrix=is_matrix)


program("cholesky")(lambda x, upper=False: torch.linalg.cholesky(x, upper=upper))


@program("geqrf")
def geqrf(x: Tensor) -> Tensor:
    """A program, since torch has no meta kernel for it."""
    x = whole(x, (x.ndim - 2, x.ndim - 1))
    tau = x._layout.replace(shape=(*x.shape[:-2], min(x.shape[-2:])))
    found = run_local(torch.geqrf, [x], [x._layout.replace(stride=by_columns(x.shape)), tau])
    return torch.return_types.geqrf(found)


# -- kernels that refuse empty batches, or lose their gradients --------------------------------------------
line("_linalg_det", "*b n! n! -> *b, *b n n, *b n", same=True, never_empty=True)
line("linalg_householder_product", "*b m! n!, *b k! -> *b m n", never_empty=True)
line("linalg_cross", "*d!dim, *d -> *d", "each", takes="x other dim=-1")


@rule("ormqr")
def ormqr(x: Operand, tau: Operand, other: Operand, left: bool = True, transpose: bool = False) -> Factors:
    text = f"*b m! k!, *b k!, {'*b n! r -> *b n r' if left else '*b r n! -> *b r n'}"
    return factors(text, [x, tau, other], "each", joint={2}, never_empty=True)


# -- Fourier transforms: a transform of parts is a part of it ----------------------------------------------
# torch.fft's functions go by these, and by padding or slicing to the size asked for
line("_fft_c2c _fft_r2c _fft_c2r", "*d!dim -> *d", "joint", takes="x dim", never_empty=True)
_SIGNAL = "x n_fft hop_length=None win_length=None window=None"
line("stft", "*b t!, w!? -> *b f t", "each", takes=_SIGNAL, never_empty=True)  # linear in the window too


def transformed(result: torch.Tensor, x: torch.Tensor, dims: Sequence[int]) -> None:
    """What was transformed last lies innermost; around it the other dims, in the order in which they lie in `x`. Where
    that says nothing, the last ones come first, as far as there are transformed ones before them."""
    n = x.dim() - len(dims)
    late = [d for d in range(n, x.dim()) if d not in dims]
    rest = [late.pop() if d in dims else d for d in range(n)]
    order = [*outermost_first(x.stride(), rest), *dims]
    restrided(result, dense_stride(result.shape, [-order.index(d) for d in range(x.dim())]))


def of_c2c(result: torch.Tensor, x: torch.Tensor, dim: Sequence[int], *_: object, **__: object) -> None:
    transformed(result, x, outermost_first(x.stride(), dims_named(dim, x.dim())))


def of_r2c(result: torch.Tensor, x: torch.Tensor, dim: Sequence[int], *_: object, **__: object) -> None:
    *others, last = dims_named(dim, x.dim())
    transformed(result, x, [*outermost_first(x.stride(), others), last])


def of_c2r(result: torch.Tensor, x: torch.Tensor, dim: Sequence[int], *_: object, **__: object) -> None:
    """The last dim after all others."""
    if len(dim) > 1:
        halfway = torch.empty_like(x)
        of_c2c(halfway, x, dim[:-1])
        x = halfway
    transformed(result, x, dims_named(dim[-1], x.dim()))


# what MKL gives; where torch is built without it, results are contiguous
for _name, _strides in {"_fft_c2c": of_c2c, "_fft_r2c": of_r2c, "_fft_c2r": of_c2r}.items():
    stored(_name, device="cpu")(_strides if torch.backends.mkl.is_available() else contiguous)
