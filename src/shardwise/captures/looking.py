"""Where a program is, and what an optimizer is set to."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

import torch


def line_in(code: CodeType | None) -> int:
    """The line at which a function that runs in this thread is; 0 if it does not."""
    line, frame = 0, sys._getframe() if code is not None else None
    while frame is not None:
        if frame.f_code is code:
            line = frame.f_lineno
        frame = frame.f_back
    return line


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The numbers and flags of an optimizer."""
    plain = (int, float, bool, str, tuple, type(None))
    return [{k: v for k, v in group.items() if isinstance(v, plain)} for group in optimizer.param_groups]
