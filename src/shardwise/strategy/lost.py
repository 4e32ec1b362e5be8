"""Arguments that torch loses. A few of its Python functions do not hand all that they were called with over to a tensor
class. What is missing is still in their frame: a call looks for it there, and is made with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class Lost(NamedTuple):
    """An argument that a function loses, and what makes the call with it: `again(argument, *args, **kwargs)`."""

    name: str
    again: Callable[..., Any]


LOST: dict[object, Lost] = {}  # by torch's function


def loses(func: Callable[..., Any], name: str) -> Callable[[Function], Function]:
    """Register the function below as what makes a call of `func` with the argument that torch loses."""

    def register(again: Function) -> Function:
        LOST[func] = Lost(name, again)
        return again

    return register


def lost_argument(func: Callable[..., Any], name: str) -> object:
    """What the call of `func` that is under way was given; None if none is under way."""
    frame = sys._getframe(1)
    code = func.__code__
    while frame.f_code is not code:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame.f_locals[name]
