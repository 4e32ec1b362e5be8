"""What is proved: the entries of PyTorch's databases of operators, list operators and modules, as samples in every form
of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.func import functional_call

from shardwise.imports import later
from shardwise.layout import Replicate, Shard
from shardwise.tensor import DTensor
from shardwise.testing.check import as_sample
from shardwise.testing.seeding import database_samples, seed_torch
from shardwise.testing.spread import (
    channels_last,
    is_float,
    repeated_in_memory,
    reversed_in_memory,
    with_holes,
    with_holes_between,
)
from shardwise.testing.trial import Sample

if TYPE_CHECKING:
    from torch.testing._internal import common_methods_invocations as operators
    from torch.testing._internal import common_modules as modules
else:  # the databases take seconds to import, and need packages that not everybody has
    operators = later("torch.testing._internal.common_methods_invocations")
    modules = later("torch.testing._internal.common_modules")

FORMS: dict[str, torch.dtype] = {
    **dict.fromkeys(("function", "in-place", "out=", "ties", "nan"), torch.float64),
    **dict.fromkeys(("holes in memory", "transposed", "one transposed", "transposed, with holes"), torch.float64),
    **dict.fromkeys(("channels last", "expanded"), torch.float64),
    "complex128": torch.complex128,
    "int64": torch.int64,
    "bool": torch.bool,
    "bfloat16": torch.bfloat16,
}
_STORED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "holes in memory": with_holes,
    "transposed": reversed_in_memory,
    "transposed, with holes": lambda t: with_holes_between(reversed_in_memory(t)),
    "channels last": channels_last,
    "expanded": repeated_in_memory,
}


@lru_cache(maxsize=1)
def subjects() -> dict[str, Operator | Module]:
    """Everything with a dense tensor input, by name and variant."""
    found: dict[str, Operator | Module] = {}
    for op in operators.op_db:
        if op.name not in SPARSE and not op.name.startswith("jiterator"):
            found[f"{op.name} [{op.variant_test_name}]" if op.variant_test_name else op.name] = Operator(op)
    for kind in ("unary", "binary", "pointwise", "reduce", "other"):
        for op in getattr(operators, f"foreach_{kind}_op_db"):
            found[op.name] = Operator(op)
    for info in modules.module_db:
        found[f"{info.name} (train)"] = Module(info, True)
        if info.train_and_eval_differ:
            found[f"{info.name} (eval)"] = Module(info, False)
    return found


def chosen(found: list[Any], limit: int) -> list[Any]:
    """Up to `limit` of the samples that the database has, taken evenly."""
    return found if len(found) <= limit else [found[i * len(found) // limit] for i in range(limit)]


# -- operators -------------------------------------------------------------------------------------------------------
# what is laid out here is dense: a sparse result or operand is outside of the library's scope. And torch.cuda.jiterator
# makes functions that read the memory of their arguments without asking these
SPARSE = {"to_sparse", "sparse.sampled_addmm", "sparse.mm"}
# torch promises shape and dtype of these, not values
_UNINITIALIZED = {"empty_like", "new_empty", "new_empty_strided", "empty", "empty_strided", "empty_permuted"}
# kernels whose value where a NaN comes in is more than what the algorithm happens to do (a NaN as a degree is not)
_NAN_IS_DEFINED = ("UnaryUfuncInfo", "BinaryUfuncInfo", "ReductionOpInfo")
_NAN_TOO = {"max", "min", "sort", "topk", "cumsum", "cumprod", "cummax", "cummin", "where", "maximum", "minimum"}
# torch leaves open which of equal values these pick, so only the values are compared where there may be ties
_ANY_OF_EQUALS = {"topk"}
# torch fills memory with holes in another order than memory without, or reads what is in the holes
_BY_MEMORY = {
    "as_strided", "as_strided_copy", "as_strided_scatter",
    "normal", "bernoulli", "uniform", "exponential", "cauchy", "geometric", "log_normal",
}  # fmt: skip
# the other results are states of a random generator that was not used
_FIRST_TWO = {"torch.ops.aten._efficient_attention_forward", "torch.ops.aten._flash_attention_forward"}
# plain torch's result depends on whether `out` is given
_OUT_IS_ANOTHER_RESULT = {"fft.ihfft2", "fft.ihfftn"}
# with ties, matrices are not of full rank: which solution a driver gives depends on rounding
_MANY_SOLUTIONS = {"linalg.lstsq"}
# where all elements along a dim are equal: the order of thousands of them, and factors of matrices of rank one
_OPEN_IF_EXPANDED = {"topk", "sort", "argsort", "linalg.lstsq", "svd_lowrank", "pca_lowrank"}
# given a tolerance of one, it asks whether a number is greater than itself
_ON_THE_EDGE = {"linalg.matrix_rank"}
# it reads memory by the sizes it is told, whatever the tensor has
_TRUSTS_SIZES = {"native_group_norm"}
# plain torch reads past the end of a tensor whose elements are one in memory
_TRUSTS_STRIDES = {"native_group_norm", "masked.median", "median", "nanmedian"}


class Operator:
    """An entry of the database of operators."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def _has(self, form: str, dtype: torch.dtype, device: str) -> bool:
        name = self.op.name
        return dtype in self.op.supported_dtypes(device) and {
            "in-place": self.op.inplace_variant is not None,
            "out=": self.op.supports_out and name not in _OUT_IS_ANOTHER_RESULT,
            "nan": (type(self.op).__name__ in _NAN_IS_DEFINED or name in _NAN_TOO) and "polynomial" not in name,
            "ties": name not in _MANY_SOLUTIONS,
            "bool": name != "_foreach_pow",  # of which torch's own kernels give different dtypes
            "holes in memory": name not in _BY_MEMORY,
            "transposed, with holes": name not in _BY_MEMORY,
            "expanded": name not in _BY_MEMORY | _OPEN_IF_EXPANDED | _TRUSTS_STRIDES,
        }.get(form, True)

    def samples(self, form: str, limit: int, device: str = "cpu") -> list[Sample]:
        op, dtype = self.op, FORMS[form]
        if form == "function":
            supported = op.supported_dtypes(device)
            dtype = next((d for d in (dtype, *FORMS.values(), *supported) if d in supported), dtype)
        if not self._has(form, dtype, device):
            return []
        call = op.op
        if form == "in-place":
            call = _in_place(op.inplace_variant)
        elif form == "out=":
            call = _into(op.op)
        elif op.name in _FIRST_TWO:
            call = lambda *args, **kwargs: op.op(*args, **kwargs)[:2]
        elif form != "function" and op.name in _ANY_OF_EQUALS:
            call = lambda *args, **kwargs: op.op(*args, **kwargs)[0].detach()
        if form == "in-place" and op.name.startswith("_foreach"):  # torch's gradients of empty tensors in lists raise
            call = torch.no_grad()(call)
        grad = op.supports_autograd and form not in ("out=", "bfloat16", "nan", "expanded") and is_float(dtype)
        seed_torch()  # the database draws from torch's own stream
        raws = [raw for raw in database_samples(op, device, dtype) if self._takes(form, raw)]
        more = {"grad": grad, "values": op.name not in _UNINITIALIZED, "holes": form == "holes in memory"}
        kept = [
            as_sample(_processed(call, raw.output_process_fn_grad), (raw.input, *raw.args), raw.kwargs, **more)
            for raw in chosen(raws, limit)
        ]
        for sample in kept:
            sample.takes_any_sizes = op.name not in _TRUSTS_SIZES
            sample.tensors = [_of_form(t, form, first=not i) for i, t in enumerate(sample.tensors)]
        return kept

    def _takes(self, form: str, raw: Any) -> bool:
        """Whether a sample of the database can be laid out, and is a call of this form."""
        if form == "in-place" and raw.broadcasts_input:
            return False
        tensors = list(_tensors_in((raw.input, *raw.args, *raw.kwargs.values())))
        if self.op.name in _ON_THE_EDGE and len(tensors) > 1:
            return False
        return bool(tensors) and all(t.layout is torch.strided for t in tensors)


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
        elif isinstance(value, dict):
            yield from _tensors_in(value.values())


def _processed(call: Callable[..., Any], process: Callable[[Any], Any]) -> Callable[..., Any]:
    """The call with the database's processing of its result: where its sign is free, what is fixed."""
    return lambda *args, **kwargs: process(call(*args, **kwargs))


def _in_place(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        target = [t.clone() for t in x] if isinstance(x, (list, tuple)) else x.clone()
        result = call(target, *args, **kwargs)
        return target if result is None else result

    return run


def _into(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call with out=: the result is written into tensors with another layout than it would have."""

    def target(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return torch.zeros_like(x)
        cut = any(p.is_shard() for p in x.placements)
        places = [Replicate() if cut or not x.dim() else Shard(x.dim() - 1) for _ in x.placements]
        moved = DTensor.redistribute(torch.zeros_like(x), placements=places)  # type: ignore[arg-type]
        return DTensor.from_local(moved.to_local(), moved.device_mesh, places, shape=x.shape, stride=x.stride())

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            first = call(*args, **kwargs)
            into = target(first) if isinstance(first, torch.Tensor) else tuple(map(target, first))
            return call(*args, **kwargs, out=into)

    return run


def _of_form(t: torch.Tensor, form: str, first: bool) -> torch.Tensor:
    """The values of a form: ties are halves, so that many are equal and some are zero (but none is -0: a sum of parts
    does not keep its sign). One transposed: the operands lie in memory in different orders."""
    if form == "ties" and t.is_floating_point():
        return (t * 2).round() / 2 + 0.0
    if form == "nan" and t.is_floating_point() and t.numel():
        t = t.clone()
        t.view(-1)[t.numel() // 2] = float("nan")
    if form == "one transposed":
        return t if first else reversed_in_memory(t)
    return _STORED.get(form, lambda t: t)(t)


# -- modules ---------------------------------------------------------------------------------------------------------
class Module:
    """An entry of the database of modules: its parameters, buffers and inputs are all laid out."""

    def __init__(self, info: Any, training: bool) -> None:
        self.info, self.training = info, training

    def samples(self, form: str, limit: int, device: str = "cpu") -> list[Sample]:
        if form != "function" or torch.float64 not in self.info.dtypes:
            return []
        seed_torch()
        inputs_of = self.info.module_inputs_func(
            self.info, device=device, dtype=torch.float64, requires_grad=False, training=self.training
        )
        inputs = [i for i in inputs_of if i.forward_input is not None]
        return [self._sample(i, device) for i in chosen(inputs, limit)]

    def _sample(self, inputs: Any, device: str) -> Sample:
        make, forward = inputs.constructor_input, inputs.forward_input
        module = self.info.module_cls(*make.args, **make.kwargs).to(device, torch.float64).train(self.training)
        if any(torch.nn.parameter.is_lazy(p) for p in module.parameters()):
            module(*forward.args, **forward.kwargs)
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())

        def run(buffers: Any, parameters: Any, args: Any, kwargs: Any) -> Any:
            buffers = {name: value.clone() for name, value in buffers.items()}
            return functional_call(module, {**parameters, **buffers}, args, kwargs), buffers

        sample = as_sample(run, (buffers, parameters, forward.args, forward.kwargs), takes_any_sizes=False)
        sample.differentiable[: len(buffers)] = [False] * len(buffers)  # statistics are written, not differentiated
        return sample
