"""Modules that exist only so that programs written for torch import them: `torch.distributed.tensor.X` is
`shardwise.X`, `torch.distributed._shard.X` is `shardwise.sharded.X`.

None of them is a file. `table.py` says which names each one has and where the code behind each name is; the modules are
made from it here, empty until a name is asked for: importing all of them imports nothing. The other files hold the
functions that torch has and that nothing else in the library calls.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from shardwise.imports import when_imported
from shardwise.torch_paths import placements
from shardwise.torch_paths.table import TABLE

__all__ = ["TABLE", "install"]

_ROOT = __name__.partition(".")[0]


class TorchPathFinder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        root, _, relative = fullname.partition(".")
        if root != _ROOT:
            return None
        if relative in TABLE:
            is_package = bool(_children(relative)) or "*" in TABLE[relative]
            return ModuleSpec(fullname, self, origin="torch_paths", is_package=is_package)
        loader = elsewhere(fullname)
        return None if loader is None else ModuleSpec(fullname, loader)

    def exec_module(self, module: ModuleType) -> None:
        _fill(module, module.__name__.partition(".")[2])


class Elsewhere(Loader):
    """Gives whoever imports another name of a module that module itself."""

    def __init__(self, path: str) -> None:
        self.path = path

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self.path)  # the import returns what stands here


def elsewhere(path: str) -> Elsewhere | None:
    """The loader of a module inside of a package that is wholly another one, as `shardwise.sharded.checkpoint.planner`
    is `torch.distributed.checkpoint.planner`; None for other paths."""
    relative = path.removeprefix(f"{_ROOT}.")
    for package in TABLE:
        if "*" in TABLE[package] and relative.startswith(package + "."):
            found = TABLE[package]["*"][0] + relative.removeprefix(package)
            return Elsewhere(found) if importlib.util.find_spec(found) is not None else None
    return None


def _children(path: str) -> list[str]:
    """The modules of the table directly inside of this one."""
    inside = (other.removeprefix(path + ".") for other in TABLE if other.startswith(path + "."))
    return [name for name in inside if "." not in name]


def _fill(module: ModuleType, path: str) -> None:
    """Give a module its `__all__`, `__dir__` and `__getattr__`, which looks names up in the table."""
    homes, everything_of = TABLE[path], TABLE[path].get("*", ("", ""))[0]

    def find(name: str) -> Any:
        home, real = homes.get(name, (everything_of, name))
        if not home or (name not in homes and name.startswith("__")):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(home if home.startswith("torch.") else f"{_ROOT}.{home}"), real)
        if name in homes:
            setattr(module, name, found)
        return found

    listed = sorted({*homes, *_children(path)} - {"*"})
    module.__doc__ = f"The names that torch has in {_torch_path(path)}."
    module.__dict__.update(__getattr__=find, __dir__=lambda: sorted({*vars(module), *listed}))
    if not everything_of:
        module.__dict__["__all__"] = listed


def _torch_path(path: str) -> str:
    first, _, rest = path.partition(".")
    return f"torch.distributed._shard.{rest}" if first == "sharded" else f"torch.distributed.tensor.{path}"


def install() -> None:
    """Make every module of the table importable, and an attribute of its package, as soon as that is imported."""
    if not any(isinstance(finder, TorchPathFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchPathFinder())  # before folders of the same name that an older version left
    folders: dict[str, list[str]] = {}
    for path in TABLE:
        folders.setdefault(path.partition(".")[0] if "." in path else "", []).append(f"{_ROOT}.{path}")
    for path in folders.pop(""):
        importlib.import_module(path)
    placements.attach()
    for folder, paths in folders.items():
        when_imported(f"{_ROOT}.{folder}", functools.partial(_import_all, paths))


def _import_all(paths: Sequence[str], package: ModuleType) -> None:
    own = dict(vars(package))
    for path in paths:
        importlib.import_module(path)
        name = path.rpartition(".")[2]
        if f"{package.__name__}.{name}" == path and name in own:  # a function of ours: `input_reshard`
            setattr(package, name, own[name])
