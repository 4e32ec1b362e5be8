"""What a captured function may read of torch's objects: tensors, modules, optimizers, schedulers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable
from itertools import chain

import torch
from torch.optim.lr_scheduler import LRScheduler

from shardwise.captures.foreign import is_foreign
from shardwise.captures.readings import Values
from shardwise.captures.walk import Walk
from shardwise.captures.walk_objects import read_by_class
from shardwise.comm.capturing import settings
from shardwise.torch_private.autograd import children_of, hook_tables
from shardwise.wrapper import Wrapper

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_OF_TENSORS = frozenset(Wrapper.__annotations__)  # what the library keeps on a tensor
_RATES = frozenset({"get_last_lr", "last_epoch", "get_lr", "_last_lr"})
_PARAMETERS = operator.itemgetter("params")


def of_tensor(walk: Walk, tensor: torch.Tensor, name: str) -> None:
    walk.tensors.append(tensor)
    if own := walk.known & vars(tensor).keys() - _OF_TENSORS:
        walk.watch(name, lambda: [vars(tensor).get(key) for key in sorted(own)], sorted(own))
        for key in sorted(own):
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
    read_by_class(walk, type(module))
    own_values = [value for key, value in table.items() if key not in _OF_EVERY_MODULE]
    inside = [*module._parameters.values(), *module._buffers.values(), *children_of(module).values()]
    for value in (*own_values, *inside):
        walk.visit(value, f"an attribute of {type(module).__name__}")


def of_optimizer(walk: Walk, optimizer: torch.optim.Optimizer, name: str) -> None:
    groups = optimizer.param_groups
    walk.watch(f"the parameters of {name}", lambda: [*chain.from_iterable(map(_PARAMETERS, groups))])
    if "param_groups" in walk.known:
        walk.watch(f"the options of {name}", lambda: [v for g in groups for k, v in g.items() if k != "params"])


def of_scheduler(walk: Walk, scheduler: LRScheduler, name: str) -> None:
    if walk.known & _RATES:
        walk.watch(f"the rates of {name}", lambda: (scheduler.last_epoch, *scheduler.get_last_lr()))


def _told(tell: Callable[[torch.nn.Module], Hashable], module: torch.nn.Module) -> Values:
    return (tell(module),)
