"""Steps of optimizers for a compiler: the same Python, which torch.compile knows how to take apart, on local tensors.

A learning rate that is a number becomes a tensor for the time of a step, so that another one is no other program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.captures.program import OptimizerStep
from shardwise.comm.capturing import steppers
from shardwise.torch_private.autograd import body_of_step

_KINDS = (torch.optim.Adam, torch.optim.AdamW)  # whose rates may be tensors
_FEW = 3  # times that other options than the rate may change: each time is a compilation

CompileFunction = Callable[[Callable[[], None]], Callable[[], None]]


class CompiledStep(OptimizerStep):
    """A step of an optimizer by code that a compiler made; by Python where hooks or odd options are in the way."""

    def __init__(self, optimizer: torch.optim.Optimizer, compile: CompileFunction) -> None:
        super().__init__(optimizer)
        self._compile = compile
        self._compiled: tuple[torch.optim.Optimizer, Callable[[], None]] | None = None
        self._rates: list[torch.Tensor] = []
        self._known: list[dict[str, Any]] = []
        self._changes = 0

    def __call__(self) -> None:
        if not self._is_for_compiler() or not any(step(self.optimizer, self._run) for step in steppers):
            super().__call__()

    def _is_for_compiler(self) -> bool:
        groups = self.optimizer.param_groups
        if type(self.optimizer) not in _KINDS or any(g.get("fused") or g.get("differentiable") for g in groups):
            return False
        options = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in groups]
        if any(isinstance(value, torch.Tensor) for group in options for value in group.values()):
            return False
        if options != self._known:
            self._known, self._changes = options, self._changes + 1
        return self._changes <= _FEW

    def _run(self, stand_in: torch.optim.Optimizer) -> None:
        if self._compiled is None or self._compiled[0] is not stand_in:
            body = body_of_step(stand_in)
            self._compiled = stand_in, self._compile(lambda: body(stand_in))
        groups = stand_in.param_groups
        while len(self._rates) < len(groups):
            self._rates.append(torch.zeros((), dtype=torch.float64))
        given = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates, strict=False):
            if isinstance(group["lr"], (int, float)):
                group["lr"] = rate.fill_(group["lr"])
        try:
            self._compiled[1]()
        finally:
            for group, rate in zip(groups, given, strict=True):
                group["lr"] = rate
