"""torch.compile leaves this package's frames alone.

Traced by Dynamo, the engine would bake caches and layouts into a graph. Skipped, every op on a DTensor is a graph break
that runs as it does in eager mode: the same answer, no speed-up. Dynamo is slow to import and most programs never do,
so its list of skipped packages is told of us at the moment it is imported.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

_RULES = "torch._dynamo.trace_rules"


class _OnImport(MetaPathFinder):
    """Adds this package to Dynamo's skipped ones when Dynamo's rules are loaded, then is gone."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _RULES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_add(module: Any) -> None:
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
