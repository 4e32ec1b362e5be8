"""Hooks that put sharded tensors which are plain attributes of modules into state dicts, and take them out again."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.sharded.tensor import ShardedTensor


def _attributes(module: torch.nn.Module, prefix: str) -> list[tuple[str, torch.nn.Module, str, ShardedTensor]]:
    """Return (key, owner, name, tensor) of every sharded tensor that is an attribute but not a parameter or buffer."""
    found = []
    for path, owner in module.named_modules():
        for name, value in owner.__dict__.items():
            if isinstance(value, ShardedTensor):
                found.append((prefix + (f"{path}." if path else "") + name, owner, name, value))
    return found


def state_dict_hook(module: torch.nn.Module, destination: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """Add the sharded tensors of a module to its state dict: ``module._register_state_dict_hook(state_dict_hook)``.

    Args:
        module: The module.
        destination: The state dict.
        prefix: What the names of the module's tensors start with.
        local_metadata: Not used.
    """
    for key, _, _, tensor in _attributes(module, prefix):
        destination[key] = tensor


def pre_load_state_dict_hook(
    module: torch.nn.Module,
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
        prefix: What the names of the module's tensors start with.
        local_metadata: Not used, like the arguments after it.
        strict: Not used.
        missing_keys: Not used.
        unexpected_keys: Not used.
        error_msgs: Not used.
    """
    for path, owner in module.named_modules():
        for name in list(owner.__dict__):
            key = prefix + (f"{path}." if path else "") + name
            if key in state_dict and isinstance(state_dict[key], ShardedTensor):
                setattr(owner, name, state_dict.pop(key))
