"""The Python that a captured call runs: modules that it calls, variables that it hands on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from shardwise.captures.split import can_be_handed_on
from shardwise.captures.surroundings import Surroundings
from shardwise.torch_private.autograd import global_hook_tables, module_hooks


class Called:
    """The Python that a call runs: what it was before, and the modules that were called, of which the walk from the
    function may have missed some. Hooks on all modules keep a call from being repeated."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._around = [surroundings]
        self.modules: list[torch.nn.Module] = []

    def __enter__(self) -> None:
        self._handle = register_module_forward_pre_hook(self._is_called)

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _is_called(self, module: torch.nn.Module, args: object) -> None:
        self.modules.append(module)
        if not any(around.knows(module) for around in self._around):
            self._around.append(Surroundings([module]))

    def knows(self, item: object) -> bool:
        return any(around.knows(item) for around in self._around)

    def changed(self) -> str:
        """What is another than it was; empty if nothing is."""
        if any(global_hook_tables):
            return "a hook on all modules may do more than compute"
        return next((reason for around in self._around if (reason := around.changed())), "")

    def written(self) -> str:
        """Why a call cannot be repeated that changes variables of Python; empty if it does not."""
        reason = self.changed() or next((reason for around in self._around if (reason := around.swapped())), "")
        return reason and f"the call changes what no op shows: {reason}"

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the call may have read."""
        return [tensor for around in self._around for tensor in around.tensors]


def cannot_be_handed_on(box: list[Any], names: Sequence[str], called: Called) -> str:
    """The first variable of a part's result that must not pass to the next part; empty if all may."""
    done, *values = box[0]
    if done:
        return ""
    pairs = zip(names, values, strict=True)
    return next((name for name, value in pairs if not can_be_handed_on(value, called.knows)), "")


def managed(modules: Iterable[torch.nn.Module]) -> str:
    """The name of a module that `data_parallel` manages; empty if there is none."""
    for module in modules:
        for hook in module_hooks(module):
            target = getattr(hook, "func", hook)
            if (getattr(target, "__module__", None) or "").startswith("shardwise.parallel.data"):
                return type(module).__name__
    return ""


class without_autocast_cache:
    """Inside, autocast keeps no cast weights: they would be taken for something that was there before."""

    def __enter__(self) -> None:
        torch.clear_autocast_cache()
        self._before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch.set_autocast_cache_enabled(self._before)
