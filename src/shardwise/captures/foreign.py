"""What is not the program's own code: torch, the package, numpy, Python's library; and what a program may set or
replace in it. Such code is not read, but a function of it that a program has replaced is the program's."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Iterable

import torch
import torch.nn.functional

from shardwise.captures.names import names_in
from shardwise.captures.readings import Tables
from shardwise.protocols import Item

_FOREIGN = frozenset({"torch", "shardwise", "numpy", "builtins"} | set(sys.stdlib_module_names)) - {"__main__"}
_METHODS = frozenset(dir(torch.Tensor))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)


def is_foreign(item: Item) -> bool:
    """Whether a function or a class is not of the program."""
    if isinstance(item, types.FunctionType):  # one that `exec` made is of the module that it reads
        return is_foreign_name(item.__module__ or str(item.__globals__.get("__name__") or ""))
    return is_foreign_name(getattr(item, "__module__", None) or "builtins")


def is_foreign_name(module: str) -> bool:
    """Whether a module of this name is not of the program."""
    return module.partition(".")[0] in _FOREIGN


def setting(owner: object, name: str) -> object:
    """What a module, or an object that holds settings, has under a name."""
    if isinstance(owner, types.ModuleType) and not hasattr(type(owner), name):
        return vars(owner).get(name)  # and nothing that would be imported only now
    try:
        return getattr(owner, name, None)
    except (RuntimeError, AssertionError):  # it asks a device that is not there
        return None


def modules_among(items: Iterable[object], names: Iterable[str]) -> list[types.ModuleType]:
    """The modules among some objects, and those in them that code names, as `path` in `os.path.exists`."""
    found: dict[int, types.ModuleType] = {}
    waiting = [item for item in items if isinstance(item, types.ModuleType)]
    while waiting:
        module = waiting.pop()
        if found.setdefault(id(module), module) is module:
            inside = map(vars(module).get, names)
            waiting += [item for item in inside if isinstance(item, types.ModuleType) and id(item) not in found]
    return list(found.values())


def functions_of(tables: Tables, module: types.ModuleType, names: Iterable[str]) -> None:
    """Have the functions and classes of a module compared that code names."""
    table = vars(module)
    tables.add_entries(module.__name__, table, [n for n in sorted(names) if isinstance(table.get(n), _FUNCTIONS)])


def builtins_of(tables: Tables, names: Iterable[str]) -> None:
    """Have the functions compared that Python has under names which no variable has."""
    tables.add_entries("builtins", vars(builtins), sorted(names))


def methods_of_tensors(tables: Tables, names: Iterable[str]) -> None:
    """Have the methods of tensors compared that code names. One that torch inherits from C++ is not in this table
    before it is replaced."""
    tables.add_entries("torch.Tensor", vars(torch.Tensor), sorted(_METHODS.intersection(names)))


def code_of_modules(tables: Tables, classes: Iterable[type[torch.nn.Module]]) -> None:
    """Have compared how modules are called, what torch's own compute, and the functions of torch by which they do."""
    kinds = [*classes]
    for base in {base for cls in kinds for base in cls.__mro__ if issubclass(base, torch.nn.Module)}:
        tables.add_entries(base.__qualname__, vars(base), ("__call__", "forward"))
    names = frozenset[str]().union(*(_functions_named(cls) for cls in kinds))
    for module in (torch, torch.nn.functional) if kinds else ():
        functions_of(tables, module, names)


def _functions_named(cls: type[torch.nn.Module]) -> frozenset[str]:
    """The names that the code of one of torch's modules uses, but for what all modules have."""
    bases = [base for base in cls.__mro__ if is_foreign(base) and base not in torch.nn.Module.__mro__]
    methods = [item for base in bases for item in vars(base).values() if isinstance(item, types.FunctionType)]
    return frozenset[str]().union(*(names_in(method.__code__).attributes for method in methods))
