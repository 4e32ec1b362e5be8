"""Rules that are nothing but a line of the notation."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.strategy.notation import parse
from shardwise.strategy.reading import factors, rearranged
from shardwise.strategy.registry import R, rule
from shardwise.strategy.spec import Algorithm, Factors, Operand, operands_in


def line(names: str, text: str, linear: str = "none", **more: Any) -> None:
    """Register a rule that is nothing but its line; arguments as of `line_rule`."""
    rule(names)(line_rule(text, linear, **more))


def line_rule(
    text: str, linear: str = "none", takes: str | inspect.Signature = "", **more: Any
) -> Callable[..., Factors | None]:
    """The rule a line stands for.

    Args:
        text: The line.
        linear: As in `Factors`.
        takes: The arguments of the op, as ``"x dim=-1 keepdim=False"``: those named `dim` and `keepdim` are what the
            line means by them. Without it, tensors are taken in the order of the call, by position.
        more: As of `factors`.

    Returns:
        A rule that answers None for a call whose tensors do not fit the line.
    """
    parsed, signature = parse(text), _signature(takes) if isinstance(takes, str) else takes

    def from_line(*args: Any, **kwargs: Any) -> Factors | None:
        if not kwargs and not parsed.names_dims:  # the common case: no need to know which argument is which
            operands = list(operands_in(args))
            return factors(text, operands, linear, **more) if parsed.fits(operands) else None
        arguments = _bound(signature, args, kwargs)
        operands = list(operands_in(arguments.values()))
        if any(isinstance(value, Operand) for value in arguments.get("named", {}).values()):
            return None  # tensors by name may come in any order: below, torch gives them by position
        if not parsed.fits(operands):
            return None
        if not parsed.names_dims:
            return factors(text, operands, linear, **more)
        dim, keepdim = arguments["dim"], arguments.get("keepdim", False)
        if isinstance(dim, (bool, str, torch.dtype)):
            return None  # another form of the call, with something else in this place
        every = isinstance(dim, (list, tuple)) and not dim  # as torch has it
        return factors(text, operands, linear, dim=None if every else dim, keepdim=keepdim, **more)

    return _described(from_line, text, signature)


def rearrangement(names: str, text: str, takes: str) -> None:
    """Register ops that move the elements of one tensor to other places and do nothing else.

    Args:
        names: The ops.
        text: A line with the same factors on both sides, as ``"n (g c) *s -> n (c g) *s"``.
        takes: The arguments of the ops, as ``"x g"``: numbers are the sizes of the factors of their name.
    """
    parsed, signature = parse(text), _signature(takes)

    def from_line(*args: Any, **kwargs: Any) -> Algorithm:
        arguments = _bound(signature, args, kwargs)
        sizes = {name: value for name, value in arguments.items() if isinstance(value, int)}
        return rearranged(parsed, next(operands_in(arguments.values())), sizes)

    rule(names)(_described(from_line, text, signature))


def _bound(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _described(function: R, text: str, signature: inspect.Signature) -> R:
    """The function with what people and the engine read off a rule: its line, and the arguments it takes."""
    function.__doc__ = text
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _signature(takes: str) -> inspect.Signature:
    """
    >>> _signature("x dim=-1")
    <Signature (x, dim=-1, *rest, **named)>
    """
    found = []
    for word in takes.split():
        name, _, default = word.partition("=")
        value = ast.literal_eval(default) if default else inspect.Parameter.empty
        found.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value))
    rest = inspect.Parameter("rest", inspect.Parameter.VAR_POSITIONAL)
    return inspect.Signature([*found, rest, inspect.Parameter("named", inspect.Parameter.VAR_KEYWORD)])
