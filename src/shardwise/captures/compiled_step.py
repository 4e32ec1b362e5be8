"""Steps of optimizers for a compiler: the same Python, which torch.compile knows how to take apart, on local tensors.

A learning rate that is a number becomes a tensor for the time of a step, so that another one is no other program: where
the optimizer says that its rate may be a tensor. A step that torch.compile cannot take as a whole runs as Python.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch

from shardwise.captures.program import OptimizerStep
from shardwise.comm.capturing import steppers
from shardwise.torch_private.autograd import body_of_step
from shardwise.torch_private.tensors import has_no_compiler, is_of_compiler, with_fixed_floats

_FEW = 3  # times that other options than the rate may change: each time is a compilation


class CompileFunction(Protocol):
    """torch.compile, with the options that the program gave."""

    def __call__(self, model: Callable[..., Any], *, fullgraph: bool = False) -> Callable[..., Any]: ...


class CompiledStep(OptimizerStep):
    """A step of an optimizer by code that a compiler made; by Python where hooks or odd options are in the way."""

    def __init__(self, optimizer: torch.optim.Optimizer, compile: CompileFunction) -> None:
        super().__init__(optimizer)
        self._compile = compile
        self._compiled: tuple[torch.optim.Optimizer, Callable[[torch.optim.Optimizer], None]] | None = None
        self._cannot = False  # whether the compiler has refused it
        self._rates: list[torch.Tensor] = []
        self._has_rate = rate_may_be_tensor(type(optimizer))
        self._known: list[dict[str, Any]] = []
        self._changes = 0

    def __call__(self) -> None:
        if not self._is_for_compiler() or not any(step(self.optimizer, self._run) for step in steppers):
            super().__call__()

    def _is_for_compiler(self) -> bool:
        groups = self.optimizer.param_groups
        if self._cannot or any(g.get("fused") or g.get("differentiable") for g in groups):
            return False
        fixed = ("params", "lr") if self._has_rate else ("params",)
        options = [{k: v for k, v in group.items() if k not in fixed} for group in groups]
        if any(isinstance(value, torch.Tensor) for group in options for value in group.values()):
            return False
        if options != self._known:
            self._known, self._changes = options, self._changes + 1
        return self._changes <= _FEW

    def _run(self, stand_in: torch.optim.Optimizer) -> None:
        body = body_of_step(stand_in)
        if self._compiled is None or self._compiled[0] is not stand_in:
            self._compiled = stand_in, self._compile(body, fullgraph=True)
        groups = stand_in.param_groups
        while len(self._rates) < len(groups):
            self._rates.append(torch.zeros((), dtype=torch.float64))
        given = [group["lr"] for group in groups]
        if self._has_rate:
            for group, rate in zip(groups, self._rates, strict=False):
                if isinstance(group["lr"], (int, float)):
                    group["lr"] = rate.fill_(group["lr"])
        try:
            with torch.no_grad(), with_fixed_floats():
                self._compiled[1](stand_in)
        except Exception as error:
            if not is_of_compiler(error) or has_no_compiler(error):
                raise
            self._cannot = True
        finally:
            for group, rate in zip(groups, given, strict=True):
                group["lr"] = rate
        if self._cannot:
            with torch.no_grad():
                body(stand_in)


def rate_may_be_tensor(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a class of optimizers says that its learning rate may be a tensor."""
    rate = inspect.signature(kind.__init__).parameters.get("lr")
    return rate is not None and "Tensor" in str(rate.annotation)
