"""Sharded tensors that are plain attributes of modules: in state dicts, and among named parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import nn

from shardwise.errors import check_type
from shardwise.sharded.tensor import ShardedTensor


def _attributes(module: nn.Module, recurse: bool = True) -> list[tuple[str, nn.Module, str, Any]]:
    """Return (path, owner, name, value) of every plain attribute of a module and of those below it."""
    check_type(module, nn.Module, "module", "give the module whose tensors these are")
    return [
        (f"{path}.{name}" if path else name, owner, name, value)
        for path, owner in (module.named_modules() if recurse else [("", module)])
        for name, value in owner.__dict__.items()
    ]


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """Add the sharded tensors of a module to its state dict: ``module._register_state_dict_hook(state_dict_hook)``.

    Args:
        module: The module.
        destination: The state dict.
        prefix: What the names of the module's tensors start with.
        local_metadata: Not used.
    """
    check_type(destination, MutableMapping, "state_dict_hook: destination")
    check_type(prefix, str, "state_dict_hook: prefix")
    for path, _, _, value in _attributes(module):
        if isinstance(value, ShardedTensor):
            destination[prefix + path] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Take sharded tensors out of a state dict and set them as attributes:
    ``module._register_load_state_dict_pre_hook(pre_load_state_dict_hook, True)``.

    Args:
        module: The module.
        state_dict: The state dict; what is taken is removed from it.
        prefix: What the names of the module's tensors start with. The other arguments are not used.
    """
    check_type(state_dict, MutableMapping, "pre_load_state_dict_hook: state_dict")
    check_type(prefix, str, "pre_load_state_dict_hook: prefix")
    for path, owner, name, _ in _attributes(module):
        if isinstance(state_dict.get(prefix + path), ShardedTensor):
            setattr(owner, name, state_dict.pop(prefix + path))


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a module with their names, each tensor once.

    Sharded tensors that are plain attributes of modules are among them.

    Args:
        module: The module.
        prefix: What the names start with.
        recurse: Whether those of submodules are among them.
    """
    start = f"{prefix}." if prefix else ""
    sharded = [(start + path, v) for path, _, _, v in _attributes(module, recurse) if isinstance(v, ShardedTensor)]
    seen: set[int] = set()
    for name, param in itertools.chain(sharded, module.named_parameters(prefix, recurse)):
        if id(param) not in seen:
            seen.add(id(param))
            yield name, param
