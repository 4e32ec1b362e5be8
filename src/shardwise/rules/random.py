"""Random ops. Numbers depend on an element's place in the global tensor, so each rank draws its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.random import distributions as draws
from shardwise.random import values
from shardwise.random.draw import drawn, fill
from shardwise.random.generator import TORCH, stream
from shardwise.strategy import Algorithm, Operand, Tensor
from shardwise.strategy.memory import contiguous, copied_stride, stored
from shardwise.strategy.program import constant, reduced
from shardwise.strategy.registry import gathered, program, rule
from shardwise.torch_private.tensors import schema_of


# -- in place --------------------------------------------------------------------------------------------------------
def filled(x: Operand, what: draws.Distribution) -> Algorithm:
    what.check(x.dtype)
    return Algorithm(lambda x, *args, generator=None, **kwargs: fill(x, what, generator), writes=True)


def fill_rule(name: str, distribution: Callable[..., draws.Distribution]) -> None:
    """x.normal_() and the like."""

    @rule(name)
    def fills(x: Operand, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Algorithm:
        named = {{"from": "low", "to": "high"}.get(key, key): value for key, value in kwargs.items()}
        return filled(x, distribution(*args, **named))


for _name in ("uniform", "normal", "log_normal", "exponential", "cauchy", "geometric"):
    fill_rule(_name + "_", getattr(draws, _name))


@rule("random_")
def random_(x: Operand, *bounds: Any, generator: torch.Generator | None = None, **named: Any) -> Algorithm:
    if "from" in named:
        bounds = (named["from"], named.get("to"))
    elif "to" in named:
        bounds = (*bounds, named["to"])
    return filled(x, draws.integer(x.dtype, *bounds))


@rule("bernoulli_")
def bernoulli_(x: Operand, p: Any = 0.5, generator: torch.Generator | None = None) -> Algorithm:
    if not isinstance(p, Operand):
        return filled(x, draws.bernoulli(p))

    def run(x: Tensor, p: object, generator: torch.Generator | None = None) -> Tensor:
        if stream() == TORCH:
            return x.copy_(values.drawn_whole(torch.Tensor.bernoulli_, x.detach().clone(), p, generator=generator))
        return x.copy_(constant(values.bernoulli_of(p, generator, x), [p]))

    return Algorithm(run, writes=True)


# -- new tensors -----------------------------------------------------------------------------------------------------
def like_rule(name: str, distribution: Callable[..., draws.Distribution]) -> None:
    """rand_like and friends: a new tensor laid out as its model."""

    @rule(name, numbers=(1, "high"))
    def new(x: Operand, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Algorithm:
        bounds = [*args, *(kwargs[key] for key in ("low", "high") if key in kwargs)]
        dtype = dtype or x.dtype
        what = distribution(dtype, *bounds)
        what.check(dtype)
        return Algorithm(lambda x, *args, **kwargs: draw_like(x, what, **kwargs))


def draw_like(
    x: Tensor, what: draws.Distribution, dtype: Any = None, device: Any = None, requires_grad: bool = False,
    memory_format: Any = None, generator: torch.Generator | None = None, **rest: object,
) -> Tensor:  # fmt: skip
    stride = copied_stride(x.shape, x._layout.stride, memory_format)
    device = x.device if device is None else torch.device(device)
    result = drawn(x._layout.replace(dtype=dtype or x.dtype, device=device, stride=stride), what, generator)
    return result.requires_grad_() if requires_grad else result


like_rule("rand_like", lambda dtype: draws.uniform())
like_rule("randn_like", lambda dtype: draws.normal())
like_rule("randint_like", lambda dtype, *bounds: draws.integer(dtype, *bounds))


# -- by value --------------------------------------------------------------------------------------------------------
def value_rule(name: str, run: Callable[..., Any] | None = None) -> None:
    """An op whose numbers depend on values: its program; without one, or in torch's stream, the values are gathered."""
    packet = getattr(torch.ops.aten, name)  # every overload, those too that torch's own function does not take

    @program(name)
    def draw(*args: object, **kwargs: object) -> Tensor:
        if run is None or stream() == TORCH:
            return values.drawn_whole(_overload_of(packet, args), *args, **kwargs)
        found = run(*args, **kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        return constant(found, tensors) if found.dtype.is_floating_point else found


def _overload_of(packet: Any, args: Sequence[object]) -> Any:
    """The overload that takes tensors where there are tensors. Torch takes one of a single number for a number, too."""
    are_tensors = [isinstance(arg, torch.Tensor) for arg in args]
    for name in packet.overloads():
        arguments = schema_of(getattr(packet, name)).arguments
        takes = [str(argument.type) == "Tensor" for argument in arguments[: len(args)]]
        if takes == are_tensors and not any(argument.is_out for argument in arguments):
            return getattr(packet, name)
    return packet


def draw_bernoulli(x: Tensor, p: Any = None, *, generator: torch.Generator | None = None) -> Tensor:
    if isinstance(p, torch.Tensor):  # of x, the shape and the dtype
        return values.bernoulli_of(p, generator, reduced(x.detach()))
    return values.bernoulli_of(x, generator) if p is None else drawn(x._layout, draws.bernoulli(p), generator)


value_rule("bernoulli", draw_bernoulli)
value_rule("normal", values.normal_of)
stored("normal _standard_gamma _sample_dirichlet")(contiguous)
value_rule("multinomial", values.multinomial_of)
for _name in ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet"):
    value_rule(_name)


# -- dropout ---------------------------------------------------------------------------------------------------------
@rule("dropout")
def dropout(x: Operand, p: float = 0.5, training: bool = True, inplace: bool = False, **aten: object) -> Algorithm:
    return Algorithm(run_dropout, writes=inplace)


def run_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **aten: object) -> Tensor:
    if not aten.get("train", training) or p == 0.0 or not x.numel():
        return x
    if p == 1:
        noise = x.detach().new_zeros(())  # of its dtype, also an integer
    elif inplace and x.is_cuda and stream() == TORCH:  # torch has a kernel for the other form alone
        noise = drawn(x._layout, draws.bernoulli(1 - p)).div_(1 - p)
    else:
        noise = drawn(x._layout, draws.dropout(p))
    return x.mul_(noise) if inplace else x * noise


@program("native_dropout")
def native_dropout(x: Tensor, p: float, train: bool | None = None) -> Tensor:
    if stream() == TORCH:
        return values.drawn_whole(torch.native_dropout, x, p, train)
    if not 0 <= p <= 1:
        raise RuntimeError(f"native_dropout: p must be between 0 and 1, got {p}")
    kept = drawn(x._layout.replace(dtype=torch.bool), draws.bernoulli(1 - p if train is not False else 1.0))
    return x * kept * (1 / (1 - p) if train is not False and p < 1 else 1.0), kept


stored("rrelu")(contiguous)


@program("rrelu")
def rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: object, **kw: object
) -> Tensor:
    """Slopes are drawn for the negative elements; without training there is one slope."""
    if not training:
        return F.leaky_relu(x, (lower + upper) / 2)
    if stream() == TORCH:
        return values.drawn_whole(F.rrelu, x, lower, upper, True)
    return values.rrelu_of(x, lower, upper)


gathered("rrelu_with_noise", "gather, since slopes are drawn for the negative elements in turn")
