"""torch.compile leaves this package's frames alone.

If Dynamo traced the engine, caches and layouts would become constants of a graph. It skips this package instead, so
that every op on a DTensor is a graph break and runs as in eager mode: the same answer, no speed-up. Dynamo is slow to
import and most programs never need it, so this package is added to its list when the program imports Dynamo.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_RULES = "torch._dynamo.trace_rules"


class _OnImport(MetaPathFinder):
    """Adds this package to those that Dynamo skips when Dynamo's rules are imported, and removes itself."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != _RULES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_add(module: ModuleType) -> None:
                load(module)
                module.add("shardwise")

            spec.loader.exec_module = load_and_add  # type: ignore[method-assign]
        return spec


def keep_out() -> None:
    """Have Dynamo skip this package, now or once it is imported."""
    if _RULES in sys.modules:
        sys.modules[_RULES].add("shardwise")
    else:
        sys.meta_path.insert(0, _OnImport())
