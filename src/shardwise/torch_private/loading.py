"""Modules and optimizers that load state dicts in ways of their own: by hooks, or by methods of their class."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

_OF_MODULES = "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"
_OF_OPTIMIZERS = "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"


def loads_itself(thing: nn.Module | Optimizer) -> bool:
    """Whether its `load_state_dict` may do more than put tensors in their places."""
    if isinstance(thing, Optimizer):
        own = type(thing).load_state_dict is not Optimizer.load_state_dict
        return own or _has_hooks(thing, _OF_OPTIMIZERS)
    return any(_has_own_way(module) or _has_hooks(module, _OF_MODULES) for module in thing.modules())


def _has_own_way(module: nn.Module) -> bool:
    """Torch's own modules and ours look at names and versions only."""
    ways = type(module).load_state_dict, type(module)._load_from_state_dict
    return any(way.__module__.partition(".")[0] not in ("torch", "shardwise") for way in ways)


def _has_hooks(thing: object, names: tuple[str, str]) -> bool:
    return any(getattr(thing, name, None) for name in names)
