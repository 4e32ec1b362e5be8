"""Normalisation. Where what is averaged over is whole, torch's kernel runs on what a rank holds; where it is cut, the
mean and then the variance are all-reduced, one number per channel or row, and gradients flow through both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.errors import dim_from_front
from shardwise.functions import also_writes
from shardwise.layout.placement import REPLICATE
from shardwise.protocols import Ctx
from shardwise.strategy import Algorithm, Answer, Factors, Named, Operand, factors, line, operands_in
from shardwise.strategy.memory import as_first_suggests, stored
from shardwise.strategy.program import Tensor, leaves_empty, reduced, run_local, sum_dtype
from shardwise.strategy.registry import program, rule
from shardwise.strategy.two_stages import whole_along
from shardwise.torch_private.autograd import without_transforms
from shardwise.torch_private.tensors import are_transforms_active, held_by_transforms, is_transformed
from shardwise.wrapper import wrap

Average = Callable[[torch.Tensor], torch.Tensor]


def over(dims: Iterable[int]) -> Average:
    """The average of a tensor, in a shape that broadcasts against it."""
    return lambda t: reduced(t.mean(tuple(dims), keepdim=True))


def scaled(
    x: torch.Tensor,
    average: Average,
    eps: float | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    known: Sequence[torch.Tensor | None] | None = None,
    centre: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x normalised, and its mean, variance and inverse deviation, where not `known`: in float32 for halves, as torch
    does, and the mean first, since a difference of large sums loses digits."""
    v = x.to(sum_dtype(x.dtype))
    mean, var = known or (average(v) if centre else None, None)
    centred = v if mean is None else v - mean
    var = average(centred * centred) if var is None else var
    inverse = (var + (torch.finfo(v.dtype).eps if eps is None else eps)).rsqrt()
    out = centred * inverse if weight is None else centred * inverse * weight
    # without a centre the mean is None, and nobody looks at it
    return (out if bias is None else out + bias).to(x.dtype), mean, var, inverse  # type: ignore[return-value]


# -- over trailing dims ------------------------------------------------------------------------------------
def trailing(name: str, normed: Callable[..., Any]) -> None:
    """What stands before the normalised dims passes."""

    @rule(name)
    def over_trailing(x: Operand, normalized_shape: Any, *args: Any, **kwargs: Any) -> Answer:
        kept = x.ndim - (1 if isinstance(normalized_shape, int) else len(normalized_shape))
        if name in ("native_layer_norm", "_fused_rms_norm") or any(map(x.layout.is_cut, range(kept, x.ndim))):
            average = over(range(kept, x.ndim))
            return Algorithm(lambda x, normalized_shape, *args, **kwargs: normed(reduced(x), average, *args, **kwargs))
        operands = [x, *operands_in((*args, *kwargs.values()))]
        dense = name != "rms_norm"  # which torch computes elementwise, in the order of the input's memory
        return factors("*d!dim, *w!, .. -> *d", operands, dim=range(kept, x.ndim), contiguous=dense)


def _native_layer_norm(
    x: torch.Tensor,
    average: Average,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, ...]:
    out, mean, _, inverse = scaled(x, average, eps, weight, bias)
    dtype = sum_dtype(x.dtype) if x.is_cuda else x.dtype if weight is None else weight.dtype
    mean = mean if x.numel() else torch.zeros_like(mean)  # as torch's kernel says of rows without elements
    return out, *(t.detach().to(dtype) for t in (mean, inverse))


def _fused_rms_norm(
    x: torch.Tensor, average: Average, weight: torch.Tensor | None = None, eps: float | None = None
) -> tuple[torch.Tensor, ...]:
    out, _, _, inverse = scaled(x, average, eps, weight, None, centre=False)
    return out, inverse


trailing("native_layer_norm", _native_layer_norm)
trailing("layer_norm", lambda x, average, *args, **kwargs: _native_layer_norm(x, average, *args[:3], **kwargs)[0])
trailing("_fused_rms_norm", _fused_rms_norm)
trailing("rms_norm", lambda x, average, weight=None, eps=None: scaled(x, average, eps, weight, None, centre=False)[0])


# -- over groups of channels -------------------------------------------------------------------------------
@stored("native_group_norm", device="cpu")
def _statistics_of_groups(
    result: Sequence[torch.Tensor], x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *_: object
) -> None:
    """They have the dtype of the parameters, where that is another one than the input's."""
    given = weight if weight is not None else bias
    if given is not None and given.dtype != x.dtype:
        for statistic in result[1:]:
            statistic.data = statistic.to(given.dtype)


@rule("native_group_norm")
def group_norm(x: Operand, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float) -> Answer:
    """Samples pass. What the kernel keeps may be a copy: on a rank, memory may lie in another order."""
    if 0 not in x.shape and any(map(x.layout.is_cut, range(1, x.ndim))):
        return Algorithm(by_groups)

    def kernel(v: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(given)
        scale, shift = (None if t is None else next(rest).contiguous() for t in (weight, bias))
        return torch.native_group_norm(v.contiguous(), scale, shift, len(v), C, HxW, group, eps)

    operands, text = [x, *operands_in((weight, bias))], "n *d!, *w!, .. -> n *d, n g"
    return factors(text, operands, outputs=2, call=kernel, never_empty=True, keeps="more")


def by_groups(x: Tensor, weight: Tensor, bias: Tensor, N: int, C: int, HxW: int, group: int, eps: float) -> Tensor:
    """The averages of channels are small: they are regrouped, however the channels are cut, and not `x`."""
    x, ones = reduced(x), [1] * (x.ndim - 2)
    dtype = x.dtype if weight is None else weight.dtype

    def average(t: torch.Tensor) -> torch.Tensor:
        channels = t.mean(tuple(range(2, t.ndim))) if ones else t
        groups = reduced(channels.reshape(N, group, C // group).mean(2, keepdim=True))
        return groups.expand(N, group, C // group).reshape(N, C, *ones)

    weight, bias = (t if t is None else t.reshape(C, *ones) for t in (weight, bias))
    out, mean, _, inverse = scaled(x, average, eps, weight, bias)
    return _WithStatistics.apply(out, *(t.reshape(N, group, C // group)[:, :, 0].to(dtype) for t in (mean, inverse)))


class _WithStatistics(torch.autograd.Function):
    """Values pass. Of the gradients, as in torch's kernel, those of the statistics count only if there are both."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(value.clone() for value in values)

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Ctx, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        both = grads[1] is not None and grads[2] is not None
        return grads if both else (grads[0], None, None)

    @staticmethod
    def jvp(ctx: Ctx, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tangent.clone() for tangent in tangents)


# -- over the batch ----------------------------------------------------------------------------------------
def batch_norm(names: str, fixed: bool | None = None, reserves: int = 0, copies: bool = False) -> None:
    """A form aten has: with training `fixed`, with reserves for its own backward, or with new statistics returned. In
    evaluation torch's own kernel on a GPU gives the statistics, too."""

    def run(
        x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, *settings: Any, **named: Any
    ) -> Any:
        kept = [running_mean, running_var]
        if isinstance(running_mean, bool):  # no statistics
            kept, settings = [None, None], (*kept, *settings)
        kept = [t.clone() for t in kept] if copies else kept
        given = (*kept, *(() if fixed is None else (fixed,)), *settings)
        gives_used = x.is_cuda and not reserves
        out = _batch_norm(gives_used, reduced(x), weight, bias, *given, **named)
        return *out, *[x.new_empty(0, dtype=torch.uint8)] * reserves, *(kept if copies else ())

    program(names, writes=True)(run)


for _names in (
    "batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional",
    "_batch_norm_with_update _batch_norm_with_update_functional _batch_norm_no_update",
):
    stored(_names, device="cpu")(as_first_suggests)
batch_norm("native_batch_norm miopen_batch_norm _native_batch_norm_legit")
batch_norm("cudnn_batch_norm", reserves=1)
batch_norm("_native_batch_norm_legit_functional", copies=True)
batch_norm("_batch_norm_with_update", True, 1)
batch_norm("_batch_norm_with_update_functional", True, 1, copies=True)
batch_norm("_batch_norm_no_update", False, 1)


for _func, _first, _when, _default in (
    (F.batch_norm, 1, "training", False),
    (torch.batch_norm, 3, "training", False),
    (torch.native_batch_norm, 3, "training", False),
    (torch.ops.aten.native_batch_norm.default, 3, "training", False),
    (F.instance_norm, 1, "use_input_stats", True),
    (torch.instance_norm, 3, "use_input_stats", True),
):
    also_writes(_func, (_first, "running_mean"), (_first + 1, "running_var"), when=(5, _when), default=_default)


def _batch_norm(
    gives_used: bool, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: Any, eps: Any
) -> Any:
    """Channels pass, the running statistics follow them, and what was moved of those is written back. `gives_used`:
    whether it returns the statistics also where it did not compute them."""
    for name, statistics in (("running_mean", mean), ("running_var", var)):
        if statistics is not None and torch.is_grad_enabled() and statistics.requires_grad:
            raise RuntimeError(f"batch_norm is not differentiable with respect to {name}, which requires grad")
    layout, dims = x._layout, [d for d in range(x.ndim) if d != 1]
    follow = [p.at(0) if p.is_shard(1) else REPLICATE for p in layout.placements]
    moved = [t if t is None else t.redistribute(placements=follow) for t in (weight, bias, mean, var)]
    renewed = moved[2:]  # which torch's kernel writes
    dtype = sum_dtype(x.dtype) if x.is_cuda else next((t.dtype for t in moved if t is not None), x.dtype)
    gives = training or gives_used
    if not leaves_empty(layout) and not (training and any(map(layout.is_cut, dims))):  # the kernel divides by sizes
        shape, places = (x.shape[1:2], follow) if gives else ((0,), [REPLICATE] * len(follow))
        saved = layout.replace(shape=shape, dtype=dtype, placements=places)
        kernel = torch.native_batch_norm if gives else _normalised_alone
        out = run_local(kernel, [x, *moved, training, momentum, eps], [layout, saved, saved])
    else:
        shape = [-1 if d == 1 else 1 for d in range(x.ndim)]
        scale, shift, *known = (t if t is None else t.reshape(shape) for t in moved)
        y, now, variance, inverse = scaled(x, over(dims), eps, scale, shift, None if training else known)
        out = y, *(t.detach().flatten().to(dtype) if gives else x.new_empty(0, dtype=dtype) for t in (now, inverse))
        if training:
            n = x.numel() // max(x.shape[1], 1)
            fresh = now.detach(), variance.detach() * (n / (n - 1) if n > 1 else float("nan"))
            pairs = zip(renewed, fresh, strict=True)
            renewed = [t if t is None else (1 - momentum) * t + momentum * new.flatten() for t, new in pairs]
    for kept, value in zip((mean, var), renewed, strict=True):
        if training and value is not kept:
            _store(value, kept)
    return out


def _store(value: Tensor, into: Tensor) -> None:
    """Write new statistics, unseen by autograd, as in torch: a pass in evaluation has saved the old ones. Its kernel
    writes also what a transformed function captured."""
    comm = into._layout.mesh.comm
    if are_transforms_active() and not any(map(is_transformed, comm.values(into._local))):
        held = [held_by_transforms(part) for part in comm.values(value._local)]
        if not any(is_batched for _, is_batched in held):
            with without_transforms():
                parts = [part.detach() for part, _ in held]
                into.data.copy_(wrap(comm.rebuild(value._local, parts), value._layout))
            return
    into.data.copy_(value)


def _normalised_alone(*args: object) -> tuple[torch.Tensor, ...]:
    """In evaluation; without the statistics, which torch's own kernel gives on a GPU."""
    out, mean, inverse = torch.native_batch_norm(*args)  # type: ignore[arg-type]
    return out, mean[:0], inverse[:0]


# -- by neighbours, or by a vector's length ----------------------------------------------------------------
# of nothing, torch returns its argument; of something, all ranks must have a quotient
line("local_response_norm", "n c! *d -> n c *d", never_empty=True)


@rule("normalize")
def normalize(x: Operand, p: float = 2.0, dim: Named = 1, eps: float = 1e-12, **kwargs: Any) -> Factors | None:
    """By its parts, a norm and a quotient, where the dim is cut."""
    if not isinstance(dim, int) or kwargs or x.layout.is_cut(dim_from_front(dim, x.ndim)):
        return None
    return whole_along(x, (dim_from_front(dim, x.ndim),), True)


@program("_weight_norm")
def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    others = [d for d in range(v.ndim) if dim == -1 or d != dim]
    return v * (g / torch.linalg.vector_norm(v, 2, others, keepdim=dim != -1))
