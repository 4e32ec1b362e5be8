"""What a captured function may read of torch's objects: tensors, modules, optimizers, and whatever has attributes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from shardwise.captures.foreign import is_foreign
from shardwise.captures.readings import Values
from shardwise.captures.values import Walk
from shardwise.comm.capturing import settings
from shardwise.torch_private.autograd import children_of, hook_tables
from shardwise.wrapper import notes_of

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_RATES = frozenset({"get_last_lr", "last_epoch", "get_lr", "_last_lr"})
_PARAMETERS = itemgetter("params")
_PLAIN = (bool, int, float, str)
# of optimizers and schedulers: `step` is Python that every run makes, and the rest is compared in its own way
_APART = frozenset({"step", "state", "param_groups"})


def of_tensor(walk: Walk, tensor: torch.Tensor, name: str) -> None:
    walk.tensors.append(tensor)
    own = sorted(walk.known & notes_of(tensor).keys())
    if own:
        walk.watch(name, lambda: [vars(tensor).get(key) for key in own], own)
        for key in own:
            walk.visit(vars(tensor)[key], f"{name}.{key}")


def of_module(walk: Walk, module: torch.nn.Module, name: str) -> None:
    table = vars(module)
    walk.modules.append(module)
    walk.tables.add(type(module).__name__, table)
    for own in (module._parameters, module._buffers, children_of(module)):
        if own:
            walk.tables.add(type(module).__name__, own)
        elif own is children_of(module) or not is_foreign(type(module)):
            walk.empty.append(own)
    for hooks in hook_tables(module):
        if hooks:
            walk.tables.add(f"a hook of {type(module).__name__}", hooks)
        else:
            walk.empty.append(hooks)
    for tell in settings:
        if tell(module) is not None:
            walk.watch(f"how {type(module).__name__} is set to run", functools.partial(_told, tell, module))
    walk.kind(type(module))
    own_values = [value for key, value in table.items() if key not in _OF_EVERY_MODULE]
    inside = [*module._parameters.values(), *module._buffers.values(), *children_of(module).values()]
    for value in (*own_values, *inside):
        walk.visit(value, f"an attribute of {type(module).__name__}")


def _told(tell: Callable[[torch.nn.Module], Hashable], module: torch.nn.Module) -> Values:
    return (tell(module),)


def of_optimizer(walk: Walk, optimizer: torch.optim.Optimizer, name: str) -> None:
    groups = optimizer.param_groups
    walk.watch(f"the parameters of {name}", lambda: [*chain.from_iterable(map(_PARAMETERS, groups))])
    if "param_groups" in walk.known:
        walk.watch(f"the options of {name}", lambda: [v for g in groups for k, v in g.items() if k != "params"])
    if "state" in walk.known:
        walk.watch(f"the state of {name}", lambda: [*chain.from_iterable(_entries_of(optimizer.state))])
    _apart(walk, optimizer, name)


def _entries_of(state: dict[Any, dict[str, Any]]) -> Iterable[Iterable[object]]:
    for parameter, entries in state.items():
        yield parameter, *entries, *entries.values()


def of_scheduler(walk: Walk, scheduler: LRScheduler, name: str) -> None:
    if walk.known & _RATES:
        walk.watch(f"the rates of {name}", lambda: (scheduler.last_epoch, *scheduler.get_last_lr()))
    _apart(walk, scheduler, name)


def _apart(walk: Walk, item: object, name: str) -> None:
    """The attributes of something that takes steps, and of its classes where they are the program's."""
    known, table = walk.known - _APART, vars(item)
    if "step" in walk.known:
        walk.tables.add_entries(name, table, ["step"])
    walk.entries(table, name, known & {*table, *dir(type(item))})
    for base in type(item).__mro__:
        if not is_foreign(base):
            walk.entries(vars(base), base.__qualname__, known & vars(base).keys())


def of_object(walk: Walk, item: object, name: str) -> None:
    """Of any other object of torch's: numbers and flags, tensors, and the attributes that the code names."""
    table = getattr(item, "__dict__", {})
    kinds = _PLAIN if isinstance(item, torch.amp.GradScaler) else (*_PLAIN, torch.Tensor)
    walk.entries(table, name, {k for k, value in table.items() if k in walk.known or isinstance(value, kinds)})
