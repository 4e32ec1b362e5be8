"""Modules of torch replaced by ours for whoever imports them, and put back.

Each replaced module is a `Facade`: it has the names that our module has. torch's own modules stay in memory: torch's
compiler, its FSDP and other internals that work on torch's class of tensors only are still given torch's own names, and
so is `shardwise.interop`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NamedTuple

import torch

from shardwise.imports import when_imported
from shardwise.torch_private.distributed import mesh_of_one
from shardwise.torch_private.tensors import ignore_torch_function, make_wrapper

INTERNALS = (
    *("torch._dynamo", "torch._functorch", "torch._higher_order_ops", "torch._inductor", "torch._prims", "torch.fx"),
    *("torch.distributed._local_tensor", "torch.distributed._ops", "torch.distributed._composable.replicate_with_fsdp"),
    *("torch.distributed.fsdp._fully_shard", "torch.utils._debug_mode", "torch._C", "shardwise.interop"),
)
"""Modules that are given torch's own names: they work inside of torch's class."""


class Holder(NamedTuple):
    """A name in a module that was bound to something else, and what it was."""

    module: ModuleType
    name: str
    before: object
    now: object


class Facade(ModuleType):
    """A module of torch that has our names. Names that only torch has are given to torch's own modules only."""

    def __init__(self, path: str, ours: ModuleType | None, adoption: Adoption) -> None:
        super().__init__(path, f"{path}, adopted: the names are those of {ours.__name__ if ours else 'no module'}.")
        self.__dict__.update(_ours=ours, _adoption=adoption, __path__=[])
        self.__file__ = getattr(ours, "__file__", None) or __file__  # Python shows it where a name cannot be imported

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        adoption: Adoption = self.__dict__["_adoption"]
        caller, is_top = _caller()
        if not caller.startswith(INTERNALS) and adoption.root_of(caller) is None:
            found = getattr(self.__dict__["_ours"], name, None)
            if found is not None:
                if is_top and caller.startswith("torch."):
                    adoption.given.append((caller, self.__name__, name, found))
                return found
        if caller.startswith((*INTERNALS, "torch.")):
            return getattr(adoption.original(self.__name__), name)
        raise AttributeError(
            f"module {self.__name__!r} is shardwise's (shardwise.adopt()), which has no {name!r}; see docs/migrating.md"
        )

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *dir(self.__dict__["_ours"])})


class Adoption(MetaPathFinder, Loader):
    """torch's modules below some roots, replaced; and functions in other modules of torch, replaced.

    Args:
        roots: Path in torch -> path of ours, each with everything below.
        names: Path of another module of torch -> a function that gives its new names, called once it is imported.
        elsewhere: The loader of a path of ours that is another name of a module of torch's, or None.
    """

    def __init__(
        self,
        roots: Mapping[str, str],
        names: Mapping[str, Callable[[], Mapping[str, object]]],
        elsewhere: Callable[[str], Loader | None],
    ) -> None:
        self.roots, self.names, self.elsewhere = roots, names, elsewhere
        self.kept: dict[str, ModuleType] = {}  # torch's own modules
        self.holders: list[Holder] = []
        self.given: list[tuple[str, str, str, object]] = []  # module of torch, path, name, what it was given of ours
        self.lock = threading.RLock()
        self.is_suspended = self.is_ready = False
        self.hooks: list[Callable[[], None]] = []

    def root_of(self, path: str) -> str | None:
        return next((root for root in self.roots if path == root or path.startswith(f"{root}.")), None)

    # -- on and off -----------------------------------------------------------------------------------------
    def install(self) -> None:
        for root in self.roots:
            importlib.import_module(root)
        _let_cpp_look()
        sys.meta_path.insert(0, self)
        self._replace()
        self.hooks = [when_imported(path, self._rename) for path in self.names]
        self._rebind()

    def remove(self) -> None:
        """Put everything back. Modules of torch that were imported meanwhile get torch's names."""
        with self.lock:
            sys.meta_path.remove(self)
            for forget in self.hooks:
                forget()
            self._put_back()
            for holder in reversed(self.holders):
                if vars(holder.module).get(holder.name) is holder.now:
                    setattr(holder.module, holder.name, holder.before)
            self._put_names_back()
            for caller, path, name, ours in self.given:
                module = sys.modules.get(caller)
                for key in [k for k, v in vars(module).items() if v is ours] if module else ():
                    setattr(module, key, getattr(importlib.import_module(path), name))

    def _put_names_back(self) -> None:
        """Give torch's names to modules of torch that were imported meanwhile, and took ours from renamed ones."""
        renamed = {id(new): (old, new) for old, new in self._renamed()}
        for path, module in _modules():
            for name, value in [*vars(module).items()] if path.startswith("torch.") else ():
                if id(value) in renamed:
                    setattr(module, name, renamed[id(value)][0])

    def _replace(self) -> None:
        """Take torch's modules out and put facades in."""
        for path in [path for path in sys.modules if self._replaces(path)]:
            module = sys.modules.pop(path)
            if not isinstance(module, Facade):
                self.kept[path] = module
        for path in sorted(self.kept):
            importlib.import_module(path)  # which makes the facade an attribute of its parent, too
        for root in self.roots:
            parent, _, name = root.rpartition(".")
            if root not in self.kept and hasattr(sys.modules[parent], name):
                delattr(sys.modules[parent], name)

    def _put_back(self) -> None:
        for path in [path for path in sys.modules if self._replaces(path)]:
            del sys.modules[path]
        sys.modules.update(self.kept)
        for root in self.roots:
            parent, _, name = root.rpartition(".")
            if root in self.kept:
                setattr(sys.modules[parent], name, self.kept[root])
            elif isinstance(vars(sys.modules[parent]).get(name), Facade):
                delattr(sys.modules[parent], name)

    # -- torch's own ----------------------------------------------------------------------------------------
    def original(self, path: str) -> ModuleType:
        """The module that torch has at `path`, imported as if nothing were adopted."""
        with self.lock:
            if path not in self.kept:
                with self._suspended():
                    importlib.import_module(path)
            return self.kept[path]

    def ready(self) -> None:
        with self.lock:
            if not self.is_ready:
                with self._suspended():
                    theirs = importlib.import_module("torch.distributed.tensor")
                    one = theirs.DTensor.from_local(torch.ones(1), mesh_of_one(), [theirs.Replicate()], run_check=False)
                    torch.neg(one)
                self.is_ready = True

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        facades = {path: module for path, module in sys.modules.items() if isinstance(module, Facade)}
        self._put_back()
        self.is_suspended = True
        try:
            yield
        finally:
            self.is_suspended = False
            for path in [path for path in sys.modules if self._replaces(path)]:
                self.kept[path] = sys.modules.pop(path)
            sys.modules.update(facades)
            for path in (*facades, *self.kept):
                module = importlib.import_module(path)
                parent, _, name = path.rpartition(".")
                setattr(sys.modules[parent], name, module)
            self._rebind()

    # -- imports --------------------------------------------------------------------------------------------
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        root = self.root_of(fullname)
        if self.is_suspended or root is None:
            return None
        if self._replaces(fullname):
            return ModuleSpec(fullname, self, origin="shardwise.adopt()", is_package=True)
        elsewhere = self.elsewhere(self.roots[root] + fullname.removeprefix(root))
        return None if elsewhere is None else ModuleSpec(fullname, elsewhere)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Facade(spec.name, self._ours(spec.name), self)

    def exec_module(self, module: ModuleType) -> None:
        pass  # a facade is complete when it is made

    def _ours(self, path: str) -> ModuleType | None:
        root = self.root_of(path)
        assert root is not None  # it is asked for paths below a root
        ours = self.roots[root] + path.removeprefix(root)
        try:
            found = importlib.util.find_spec(ours)
        except ModuleNotFoundError:  # its parent is not there
            return None
        is_private = found is not None and found.origin != "torch_paths" and not self._torch_has(path)
        return None if found is None or is_private else importlib.import_module(ours)

    def _replaces(self, path: str) -> bool:
        """Whether a facade stands for this module. None does for one that was reached through another name of a package
        that is elsewhere, as torch.distributed._shard.checkpoint is torch.distributed.checkpoint."""
        return self.root_of(path) is not None and (self._torch_has(path) or self._ours(path) is not None)

    def _torch_has(self, path: str) -> bool:
        """Whether torch has a file for this path, below any root that is ours as well."""
        root = self.root_of(path)
        alike = [other for other, ours in self.roots.items() if root and ours == self.roots[root]]
        at = Path(torch.__file__).parents[1]
        places = [at.joinpath(*(other + path.removeprefix(root or "")).split(".")) for other in alike]
        return any(place.with_suffix(".py").exists() or (place / "__init__.py").exists() for place in places)

    # -- other modules of torch -----------------------------------------------------------------------------
    def _rename(self, module: ModuleType) -> None:
        """Put ours in place of torch's; what stands there already stays."""
        for name, new in self.names[module.__name__]().items():
            if hasattr(module, name) and not any(h.module is module and h.name == name for h in self.holders):
                self._bind(module, name, new)

    def complete(self, module: ModuleType) -> None:
        """For a module of ours that imports torch's of the same names: torch's was loaded before ours was complete."""
        self._rename(module)

    def _renamed(self) -> list[tuple[object, object]]:
        """What was replaced in those modules: torch's and ours."""
        return [(holder.before, holder.now) for holder in self.holders if holder.module.__name__ in self.names]

    def _bind(self, module: ModuleType, name: str, new: object) -> None:
        before = getattr(module, name)
        if before is new:  # imported from a module of torch that had ours by then
            before = next((holder.before for holder in self.holders if holder.now is new), before)
        self.holders.append(Holder(module, name, before, new))
        setattr(module, name, new)

    def _rebind(self) -> None:
        """Give modules of torch that hold torch's own names ours instead."""
        pairs = self._pairs()
        for path, module in _modules():
            if path.startswith("torch.") and not path.startswith(INTERNALS) and self.root_of(path) is None:
                for name, value in [*vars(module).items()]:
                    if id(value) in pairs and not isinstance(value, ModuleType):
                        self._bind(module, name, pairs[id(value)][1])

    def left_out(self) -> list[str]:
        """What holds torch's own names, though it is no module of torch: `module.name`, as imported before."""
        pairs = self._pairs()
        return sorted(
            f"{path}.{name}"
            for path, module in _modules()
            if not path.startswith(("torch.", "shardwise.")) and path not in ("torch", "shardwise")
            for name, value in [*vars(module).items()]
            if id(value) in pairs
        )

    def _pairs(self) -> dict[int, tuple[object, object]]:
        """By the identity of a class, function or module of torch: that, and what it is here."""
        pairs = {id(old): (old, new) for old, new in self._renamed()}
        for path, module in self.kept.items():
            ours = self._ours(path)
            pairs[id(module)] = module, sys.modules[path]
            for name, value in [*vars(module).items()] if ours else ():
                if not isinstance(value, (type, FunctionType)) or self.root_of(value.__module__ or "") is None:
                    continue
                mine = getattr(ours, name, None)
                if mine is not None and mine is not value and isinstance(mine, type) == isinstance(value, type):
                    pairs[id(value)] = value, mine
        return pairs


class _Probe(torch.Tensor):
    """A tensor of no values, whose class C++ has to ask about."""

    __torch_function__ = ignore_torch_function

    @classmethod
    def __torch_dispatch__(cls, *_args: object, **_kwargs: object) -> torch.Tensor:
        return torch.empty(0)


def _let_cpp_look() -> None:
    """Have torch's C++ code look up torch's class of distributed tensors, by its path. It does so once, at the first op
    on a tensor class of Python's, and would run ops of whatever class it finds by torch's own rules."""
    torch.neg(make_wrapper(_Probe, (0,)))


def _modules() -> list[tuple[str, ModuleType]]:
    """Every module, by its path: the first of several."""
    found = {id(m): (path, m) for path, m in reversed([*sys.modules.items()]) if isinstance(m, ModuleType)}
    return [(path, module) for path, module in found.values() if not isinstance(module, Facade)]


def _caller() -> tuple[str, bool]:
    """The module that asks for a name, and whether its own code does: not a function in it."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib."):
        frame = frame.f_back
    return frame.f_globals.get("__name__", ""), frame.f_code.co_name == "<module>"


# -- the one adoption of this process ------------------------------------------------------------------------
_active: list[Adoption] = []


def active() -> Adoption | None:
    """The adoption of this process; None where there is none."""
    return _active[0] if _active else None


def start(adoption: Adoption) -> None:
    adoption.install()
    _active.append(adoption)


def stop() -> None:
    """Undo the adoption, if there is one."""
    if _active:
        _active.pop().remove()


def original(path: str) -> ModuleType:
    """The module that torch itself has at `path`, adopted or not."""
    return _active[0].original(path) if _active else importlib.import_module(path)


def ready_originals() -> None:
    """Have torch's C++ code look up what it needs for ops on torch's own tensors, before such a tensor is made."""
    if _active:
        _active[0].ready()


def loaded_original(path: str) -> ModuleType | None:
    """The same, if it has been imported; else None."""
    return (_active[0].kept if _active else sys.modules).get(path)
