"""Give the parameters of a module built on the meta device their values, each rank its own part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise.errors import LayoutError
from shardwise.modules import unchanged_on_error
from shardwise.tensor import DTensor
from shardwise.wrapper import wrap

Init = Callable[[nn.Module], object]
# The methods that set a module's own parameters, and all parameters inside of it (torch.nn.Transformer).
_RESETS = ("reset_parameters", "_reset_parameters")


def materialize(module: nn.Module, init: Init | None = None) -> nn.Module:
    """Allocate and initialise every parameter and buffer of a module that is on the meta device and laid out; in place.

    No rank ever holds more than its part. Submodules are initialised innermost first, in the order they were
    registered. A parameter that several of them share keeps the values that the first gave it. Parameters become new
    objects, so make the optimizer afterwards.

    Args:
        module: its meta parameters and buffers must be DTensors.
        init: called with every submodule that has some of its own. Default: its own `reset_parameters()`.

    Returns:
        The module itself.

    Raises:
        LayoutError: a meta tensor is not laid out, or there is no way to give it values.

    Example:
        >>> from shardwise import distribute_module, simulate
        >>> with torch.device("meta"):
        ...     model = nn.Linear(4, 4)
        >>> model = materialize(distribute_module(model, simulate(2)))
        >>> model.weight.device.type
        'cpu'
    """
    if not isinstance(module, nn.Module):
        raise LayoutError(f"materialize: module must be a torch.nn.Module, got {type(module).__name__}")
    waiting = [(name, owner) for name, owner in _innermost_first(module, "", set()) if _is_waiting(owner)]
    for name, owner in waiting:
        _check(name, owner, init)
    with unchanged_on_error(module, "materialize"):
        _fill([owner for _, owner in waiting], init)
    return module


def _fill(waiting: list[nn.Module], init: Init | None) -> None:
    made: dict[int, DTensor] = {}  # by id of the meta tensor
    for owner in waiting:
        shared = [made[id(old)] for _, _, old in _missing(owner) if id(old) in made]
        for table, key, old in list(_missing(owner)):
            if id(old) not in made:
                made[id(old)] = with_memory(old)
            table[key] = made[id(old)]
        kept = [(tensor, tensor.detach().clone()) for tensor in shared]
        if init is not None:
            init(owner)
        else:
            next(getattr(owner, reset) for reset in _RESETS if hasattr(owner, reset))()
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


def _innermost_first(owner: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if owner not in seen:
        seen.add(owner)
        for key, child in owner.named_children():
            yield from _innermost_first(child, f"{name}.{key}" if name else key, seen)
        yield name, owner


def _is_waiting(owner: nn.Module) -> bool:
    return any(any(_missing(part)) for part in (owner.modules() if hasattr(owner, _RESETS[1]) else [owner]))


def _missing(owner: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The tensors of a module itself that have no values: where they are kept, and under which name."""
    for table in (owner._parameters, owner._buffers):
        for key, tensor in table.items():
            if tensor is not None and tensor.device.type == "meta":
                yield table, key, tensor


def _check(name: str, owner: nn.Module, init: Init | None) -> None:
    for _, key, tensor in _missing(owner):
        path = f"{name}.{key}" if name else key
        if not isinstance(tensor, DTensor):
            raise LayoutError(
                f"materialize: {path} is a plain meta tensor; lay the module out first: distribute_module(module, mesh)"
            )
        if init is None and not any(hasattr(owner, reset) for reset in _RESETS):
            raise LayoutError(
                f"materialize: {path} has no values and {type(owner).__name__} no reset_parameters(); "
                f"give init=, a function of a submodule that sets them"
            )


def with_memory(old: DTensor) -> DTensor:
    """A tensor like this one of the meta device, on the device of its mesh; its values are not set."""
    layout = old._layout.replace(device=old._layout.mesh.device)
    comm = layout.mesh.comm
    split = [axis for axis, p in enumerate(layout.placements) if not p.is_replicate()]  # replicas share a tensor
    new = wrap(comm.bind(lambda local: torch.empty_like(local, device=layout.device), split)(old._local), layout)
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new  # type: ignore[return-value]
