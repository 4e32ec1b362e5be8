"""PyTorch's own database of operators and sample inputs, as samples to be tried in every form of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

from shardwise.layout import Replicate, Shard
from shardwise.tensor import DTensor
from shardwise.testing.check import as_sample
from shardwise.testing.spread import with_holes
from shardwise.testing.trial import Sample

# torch promises shape and dtype of these, not values
UNINITIALIZED = {"empty_like", "new_empty", "new_empty_strided", "empty", "empty_strided", "empty_permuted"}
# what is laid out here is dense: a sparse result or operand is outside of the library's scope
SPARSE = {"to_sparse", "sparse.sampled_addmm", "sparse.mm"}
# kernels whose value where a NaN comes in is no more than what the algorithm happens to do
_NAN_IS_DEFINED = ("UnaryUfuncInfo", "BinaryUfuncInfo", "ReductionOpInfo")
_NAN_TOO = {"max", "min", "sort", "topk", "cumsum", "cumprod", "cummax", "cummin", "where", "maximum", "minimum"}

# torch leaves open which of equal values these pick, so with ties only the values are compared
_ANY_OF_EQUALS = {"topk"}

FORMS: dict[str, torch.dtype] = {
    "function": torch.float64,
    "in-place": torch.float64,
    "out=": torch.float64,
    "ties": torch.float64,
    "nan": torch.float64,
    "holes in memory": torch.float64,
    "complex128": torch.complex128,
    "int64": torch.int64,
    "bool": torch.bool,
    "bfloat16": torch.bfloat16,
}


@lru_cache(maxsize=1)
def operators() -> dict[str, Any]:
    """Every entry with a dense tensor input, by name and variant."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = {}
    for op in op_db:
        if op.name not in SPARSE:
            found[f"{op.name} [{op.variant_test_name}]" if op.variant_test_name else op.name] = op
    return found


def samples_of(op: Any, form: str, limit: int) -> list[Sample]:
    """Up to `limit` samples of one form, spread over the list that the database gives."""
    dtype, call = FORMS[form], op.op
    if form == "function":
        dtype = next((d for d in (dtype, *FORMS.values(), *op.dtypes) if d in op.dtypes), dtype)
    if dtype not in op.dtypes:
        return []
    if form == "in-place":
        if op.inplace_variant is None:
            return []
        call = _in_place(op.inplace_variant)
    if form == "out=":
        if not op.supports_out:
            return []
        call = _into(op.op)
    if form == "nan" and type(op).__name__ not in _NAN_IS_DEFINED and op.name not in _NAN_TOO:
        return []
    grad = op.supports_autograd and form != "out=" and (dtype.is_floating_point or dtype.is_complex)
    if form == "ties" and op.name in _ANY_OF_EQUALS:
        grad, call = False, _values_only(op.op)
    torch.manual_seed(0)  # the database draws from torch's own stream
    found = []
    for raw in op.sample_inputs("cpu", dtype, requires_grad=False):
        if form == "in-place" and (raw.broadcasts_input or not isinstance(raw.input, torch.Tensor)):
            continue
        sample = as_sample(
            _processed(call, raw.output_process_fn_grad),
            (raw.input, *raw.args),
            raw.kwargs,
            grad=grad and dtype != torch.bfloat16,
            values=op.name not in UNINITIALIZED,
        )
        if sample.tensors and all(t.layout is torch.strided for t in sample.tensors):
            found.append(sample)
    chosen = found if len(found) <= limit else [found[i * len(found) // limit] for i in range(limit)]
    for sample in chosen:
        sample.tensors = list(_changed(sample.tensors, form))
        sample.holes = form == "holes in memory"
    return chosen


def _processed(call: Callable[..., Any], process: Callable[[Any], Any]) -> Callable[..., Any]:
    """What the database compares: for a result fixed only up to a phase or a sign, that which is fixed."""
    return lambda *args, **kwargs: process(call(*args, **kwargs))


def _values_only(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: call(*args, **kwargs)[0]


def _in_place(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: call(x.clone(), *args, **kwargs)


def _into(call: Callable[..., Any]) -> Callable[..., Any]:
    """The result written into tensors that are there already, in another layout than it would have."""

    def target(x: Any) -> Any:
        if isinstance(x, DTensor):
            return DTensor.redistribute(torch.zeros_like(x), placements=_other(x))  # type: ignore[arg-type]
        return torch.zeros_like(x)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            first = call(*args, **kwargs)
            into = target(first) if isinstance(first, torch.Tensor) else tuple(map(target, first))
            return call(*args, **kwargs, out=into)

    return run


def _other(x: DTensor) -> list[Any]:
    cut = any(p.is_shard() for p in x.placements)
    return [Replicate() if cut or not x.dim() else Shard(x.dim() - 1) for _ in x.placements]


def _changed(tensors: list[torch.Tensor], form: str) -> Iterator[torch.Tensor]:
    """The values of a form: ties are halves, so that many are equal and some are zero."""
    for t in tensors:
        if form == "ties" and t.is_floating_point():
            yield (t * 2).round() / 2
        elif form == "nan" and t.is_floating_point() and t.numel():
            t = t.clone()
            t.view(-1)[t.numel() // 2] = float("nan")
            yield t
        elif form == "holes in memory":
            yield with_holes(t)
        else:
            yield t
