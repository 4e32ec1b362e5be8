"""A program run as `__main__`, in this process and in those that it starts.

Processes that multiprocessing spawns import the program's main module again. They are told to import `child.py` of this
folder, which adopts first.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from io import open_code
from types import CodeType, ModuleType

_PROGRAM = "SHARDWISE_RUN"  # the environment variable by which child processes are told
_CHILD = "shardwise.cli.child"


class Program:
    """A Python file, a folder with a `__main__.py`, or a module.

    Args:
        program: The path or the name of the module.
        is_module: Whether it is a module.
    """

    def __init__(self, program: str, is_module: bool) -> None:
        self.program, self.is_module = program, is_module
        self.package: str | None = None
        if is_module:
            self.folder, self.file = os.getcwd(), ""
            self.code, self.file, self.package = _module(program)
            return
        self.folder = os.path.realpath(program)
        self.file = program if os.path.isfile(program) else os.path.join(program, "__main__.py")
        if os.path.isfile(program):
            self.folder = os.path.dirname(self.folder)
        with open_code(os.path.abspath(self.file)) as file:
            self.code = compile(file.read(), self.file, "exec")

    @staticmethod
    def of_parent() -> Program:
        """The one that the parent process runs."""
        kind, _, program = os.environ[_PROGRAM].partition(":")
        return Program(program, kind == "module")

    def run(self) -> None:
        """Run it as `__main__`. The module stays, as that of Python does: exit handlers and threads use it."""
        where = self.program if self.is_module else os.path.abspath(self.program)
        os.environ[_PROGRAM] = f"{'module' if self.is_module else 'path'}:{where}"
        main = ModuleType("__main__")
        main.__file__, main.__package__ = self.file, self.package
        main.__spec__ = importlib.util.find_spec(_CHILD)
        sys.modules["__main__"] = main
        exec(self.code, vars(main))


def _module(name: str) -> tuple[CodeType, str, str | None]:
    """The code of a module, its file and its package."""
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError:
        spec = None
    finally:
        sys.path.pop(0)
    code = spec.loader.get_code(spec.name) if spec is not None and spec.loader is not None else None  # type: ignore[attr-defined]
    if spec is None or code is None:
        raise SystemExit(f"shardwise run: no module named {name!r} that can be run")
    return code, spec.origin or name, spec.parent
