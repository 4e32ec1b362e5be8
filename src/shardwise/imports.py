"""Imports: what is to be done with a module as soon as somebody imports it, so that slow ones are not imported for it;
modules that are imported once they are used; and many imports at once."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Then = Callable[[ModuleType], object]


class _OnImport(MetaPathFinder):
    """Calls a function with a module when it is imported."""

    def __init__(self, path: str, then: Then) -> None:
        self.path, self.then, self.is_looking = path, then, False

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if fullname != self.path or self.is_looking:
            return None
        self.is_looking = True  # so that the others find it
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.is_looking = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_call(module: ModuleType) -> None:
                load(module)
                self.then(module)

            spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec

    def cancel(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def when_imported(path: str, then: Then) -> Callable[[], None]:
    """Call `then` with a module: now if it has been imported, and whenever it is.

    Args:
        path: The path of the module.
        then: What to do with it.

    Returns:
        A function that forgets it.
    """
    if path in sys.modules:
        then(sys.modules[path])
    finder = _OnImport(path, then)
    sys.meta_path.insert(0, finder)
    return finder.cancel


class _Later(ModuleType):
    """A module that is imported when one of its names is asked for."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and self.__name__ not in sys.modules:  # Python's own questions, as inspect asks them
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def later(path: str) -> ModuleType:
    """Stand in for a module that takes long to import, or that is not installed everywhere, until it is used.

    Type checkers do not see behind it, so tell them::

        if TYPE_CHECKING:
            import torch.distributed.checkpoint as dcp
        else:
            dcp = later("torch.distributed.checkpoint")

    Args:
        path: The path of the module.

    Returns:
        An object with its names.
    """
    return _Later(path)


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage is collected inside: modules make much, drop little, and each collection would walk all of torch."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
