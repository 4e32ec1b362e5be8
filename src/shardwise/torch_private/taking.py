"""How a private name of torch is taken, and the list of all that are."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import torch

USED_FOR: dict[str, str] = {}
"""Private name of torch -> the feature that needs it."""


def take(path: str, feature: str) -> Any:
    """What torch has at `path`, or a class that raises when it is called and is nobody's type."""
    USED_FOR[path] = feature
    try:
        return resolve_name(path)
    except AttributeError:

        def refuse(cls: type, *args: object, **kwargs: object) -> Any:
            raise NotImplementedError(
                f"{feature} needs {path}, which torch {torch.__version__} does not have. "
                "Use a torch version in the supported range (see pyproject.toml)"
            )

        return type("Missing", (), {"__new__": refuse})
