"""torch.distributed.checkpoint.state_dict for models and optimizers of DTensors: the same functions and options.

torch's own functions know which entry belongs to which parameter, and do so here. What they do with the tensors (make
them whole, bring them to the CPU, cut whole ones up, hand round what rank 0 has) they do for torch's class of
distributed tensors only, so that is done here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from shardwise.api import distribute_tensor
from shardwise.comm.group_calls import group_call
from shardwise.errors import LayoutError
from shardwise.interop import adoption
from shardwise.materialize import with_memory
from shardwise.tensor import DTensor

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
_STATE = "state"
torchs = SimpleNamespace(**vars(state_dict))  # torch's functions as they are now: adopt() puts ours in their place
_init_optim_state = torchs._init_optim_state


# -- out ---------------------------------------------------------------------------------------------------
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # the module inside of torch.compile's and checkpointing's


def _name_in_state_dict(model: nn.Module, path: str) -> str:
    """The name by which a state dict of torch's functions knows a tensor of a model: without modules that only wrap."""
    module: object = model
    kept = []
    for part in path.split("."):
        if part not in _WRAPPED and not (part == "module" and isinstance(module, nn.parallel.DistributedDataParallel)):
            kept.append(part)
        module = getattr(module, part, None)
    return ".".join(kept)


def get_model_state_dict(model: nn.Module, *, submodules: Any = None, options: Any = None) -> dict[str, Any]:
    """The state dict of a model. With `full_state_dict` its tensors are whole and plain; with `cpu_offload` too, only
    rank 0 gets them."""
    return _given(torchs.get_model_state_dict(model, submodules=submodules, options=_names_only(options)), options)


def get_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: Any = None, options: Any = None
) -> dict[str, Any]:
    """The state dict of one optimizer or several, by names of parameters."""
    found = torchs.get_optimizer_state_dict(model, optimizers, submodules=submodules, options=_names_only(options))
    return _given(found, options)


def get_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: Any = None, options: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of a model and of its optimizers."""
    named = _names_only(options)
    of_model, of_optimizers = torchs.get_state_dict(model, optimizers, submodules=submodules, options=named)
    return _given(of_model, options), _given(of_optimizers, options)


def _names_only(options: StateDictOptions | None) -> StateDictOptions:
    """What torch's functions are asked to do: everything but what concerns tensors."""
    asked = StateDictOptions() if options is None else options
    if asked.broadcast_from_rank0 and not asked.full_state_dict:
        raise LayoutError(
            "options: full_state_dict must be True when broadcast_from_rank0 is True: rank 0 has the whole tensors then"
        )
    return replace(asked, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)


def _given(found: Any, options: StateDictOptions | None) -> Any:
    if options is None:
        return found
    if options.full_state_dict:
        found = tree_map_only(DTensor, lambda x: x.full_tensor().detach(), found)  # every rank takes part
        if options.cpu_offload and _rank() != 0:
            return {}
    return tree_map_only(torch.Tensor, lambda x: x.cpu(), found) if options.cpu_offload else found


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# -- in ----------------------------------------------------------------------------------------------------
def set_model_state_dict(model: nn.Module, model_state_dict: dict[str, Any], *, options: Any = None) -> Any:
    """Load a state dict into a model. With `full_state_dict` its tensors are whole, and every rank takes its part; with
    `broadcast_from_rank0` only rank 0 need have them. Parameters on the meta device get memory if there are values for
    them."""
    named = _names_only(options)
    taken = _taken(model, model_state_dict, options)
    _give_memory(model, taken)
    return torchs.set_model_state_dict(model, taken, options=named)


def set_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, optim_state_dict: dict[str, Any], *, options: Any = None
) -> None:
    """The same for the state of one optimizer or several."""
    named = _names_only(options)
    torchs.set_optimizer_state_dict(model, optimizers, _taken(model, optim_state_dict, options), options=named)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
    options: Any = None,
) -> Any:
    """Those of a model and of its optimizers."""
    missing = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return missing


def _taken(model: nn.Module, given: dict[str, Any], options: StateDictOptions | None) -> dict[str, Any]:
    """A state dict of whole tensors, laid out as the model's parameters are."""
    if options is None or not options.full_state_dict:
        return given
    if options.broadcast_from_rank0 and dist.is_initialized():
        given = _from_rank0(given, _device_of(model))
    laid = {name: tensor for name, tensor in torchs.get_model_state_dict(model).items() if isinstance(tensor, DTensor)}
    return _laid_out(given, laid)


def _give_memory(model: nn.Module, taken: Mapping[str, Any]) -> None:
    """Parameters and buffers that have no values, and are to be loaded, are made anew on the device of the values."""
    made: dict[int, torch.Tensor] = {}  # by id of the meta tensor: modules may share one
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for key, old in table.items():
                if old is not None and old.is_meta and id(old) not in made:
                    value = taken.get(_name_in_state_dict(model, f"{path}.{key}" if path else key))
                    if isinstance(value, torch.Tensor) and not value.is_meta:
                        made[id(old)] = _on_device_of(value, old)
                if id(old) in made:
                    table[key] = made[id(old)]  # type: ignore[assignment]


def _on_device_of(value: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    if isinstance(old, DTensor):
        return with_memory(old)
    new = torch.empty_like(old, device=value.device)
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


def _laid_out(given: Mapping[str, Any], laid: Mapping[str, DTensor]) -> dict[str, Any]:
    """Tensors under the name of a DTensor, and its states (in "state", or flat as "state.NAME.KEY"), cut as it is."""
    out: dict[str, Any] = {}
    for name, value in given.items():
        if name in laid:
            out[name] = _cut(value, laid[name])
        elif name == _STATE and isinstance(value, Mapping):
            out[name] = {of: _states(states, laid.get(of)) for of, states in value.items()}
        elif name.startswith(f"{_STATE}."):
            out[name] = _states(value, laid.get(name.removeprefix(f"{_STATE}.").rpartition(".")[0]))
        else:
            out[name] = value
    return out


def _states(states: Any, like: DTensor | None) -> Any:
    """The states of one parameter; those that are numbers (of steps) are no part of it."""
    return tree_map(lambda x: _cut(x, like) if isinstance(x, torch.Tensor) and x.dim() else x, states)


def _cut(value: Any, like: DTensor | None) -> Any:
    """This rank's part of a whole tensor that is laid out as `like` is."""
    if like is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.shape != like.shape:
        return value
    on_mesh = value.detach().to(_home(like))
    return distribute_tensor(on_mesh, like.device_mesh, like.placements, src_data_rank=None)


# -- from rank 0 -------------------------------------------------------------------------------------------
def _from_rank0(given: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """What rank 0 was given, everywhere: first what it is like, with tensors on "meta", then tensor by tensor."""
    said = [tree_map_only(torch.Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), given)]
    with group_call(None, "set_state_dict", "broadcast"):
        dist.broadcast_object_list(said, src=0)
    leaves, shape = tree_flatten(said[0])
    mine = tree_leaves(given) if _rank() == 0 else leaves
    return tree_unflatten([_sent(leaf, says, device) for leaf, says in zip(mine, leaves, strict=True)], shape)


def _sent(leaf: Any, says: Any, device: torch.device) -> Any:
    if not isinstance(says, torch.Tensor):
        return says
    tensor = leaf.detach().to(device).contiguous() if _rank() == 0 else torch.empty_like(says, device=device)
    with group_call(None, "set_state_dict", "broadcast", tensor.device.type):
        dist.broadcast(tensor, src=0)
    return tensor


def _device_of(model: nn.Module) -> torch.device:
    """Where the ranks can send to each other: where the model is."""
    some = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if some is None else _home(some)


def _home(tensor: torch.Tensor) -> torch.device:
    """Where its values are; of a tensor on the meta device: where they will be."""
    if not tensor.is_meta:
        return tensor.device
    return tensor._layout.mesh.device if isinstance(tensor, DTensor) else torch.device("cpu")


if (_adoption := adoption.active()) is not None:
    _adoption.complete(state_dict)
