"""Sharding what modules hold: one parameter, or a whole module by a plan; and sharded tensors that are plain attributes
of modules, in state dicts and among named parameters."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import check_type
from shardwise.sharded.groups import Group, all_gather_objects, as_group, ranks_of
from shardwise.sharded.spec import ChunkShardingSpec, ShardingSpec
from shardwise.sharded.tensor import ShardedTensor


class Sharder(ABC):
    """Shards a whole module by code of your own: a plan names the module by its path, and the module that `shard`
    returns takes its place."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Return the sharded version of a module.

        Args:
            module: The module at the path that the plan names.
        """


@dataclass
class ShardingPlan:
    """What `shard_module` does to a module. The path of the module itself is "".

    Args:
        plan: From paths of parameters or buffers to specs, and from paths of modules to sharders.
        output_plan: From paths of modules to the specs that their outputs are resharded to.
        return_local_tensor: Paths of modules that return their local tensor instead of a ShardedTensor.
    """

    plan: dict[str, ShardingSpec | Sharder]
    output_plan: dict[str, ShardingSpec] | None = None
    return_local_tensor: list[str] | None = None


class ShardingPlanner(ABC):
    """Makes plans for modules."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return the plan by which a module is to be sharded.

        Args:
            module: The module.
        """


def _shard_tensor(
    tensor: torch.Tensor, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: Group | None = None
) -> ShardedTensor:
    """Cut the tensor of one rank into tiles that are sent to their owners.

    Args:
        tensor: The values on `src_rank`; the other ranks pass a tensor of the same size and dtype.
        sharding_spec: The tiles; the same on every rank.
        src_rank: The rank of the group whose values are taken.
        process_group: The default is the default process group. Every rank of it calls this.

    Returns:
        The sharded tensor.

    Raises:
        ValueError: If ranks pass different arguments, or the tensor is not contiguous.
        TypeError: If `tensor` is not a tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor: expected a torch.Tensor, got {type(tensor).__name__}")
    if not tensor.is_contiguous():
        raise ValueError("input tensor is not a contiguous Tensor")
    group = as_group(process_group)
    _check_alike(group, src_rank=src_rank, sharding_spec=sharding_spec, size=tuple(tensor.size()), dtype=tensor.dtype)
    if not isinstance(sharding_spec, ShardingSpec):
        raise ValueError(f"Expecting ShardingSpec but got: {type(sharding_spec)}")
    return sharding_spec.shard(tensor, src_rank=src_rank, process_group=process_group)


def _check_alike(group: Group, **arguments: object) -> None:
    """Raise ValueError where ranks were called with different arguments, and say which."""
    for rank, others in zip(ranks_of(group), all_gather_objects(arguments, group, "shard_parameter")):
        for name, value in arguments.items():
            if others[name] != value:
                me, other = dist.get_rank(), others[name]
                raise ValueError(f"{name}={value} on rank: {me} does not match with {name}={other} on rank: {rank}")


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: Group | None = None,
) -> None:
    """Replace a parameter, buffer or other tensor of a module by a ShardedTensor, in place.

    Args:
        module: The module that has the tensor.
        param_name: The name of the tensor in the module.
        sharding_spec: The tiles; the same on every rank.
        src_rank: The rank of the group whose values are taken.
        process_group: The default is the default process group. Every rank of it calls this.

    Raises:
        AttributeError: If the module has no such attribute.
        ValueError: If it is not a tensor, not contiguous, or sharded already; or if ranks pass different arguments.
    """
    _shard_named(module, param_name, sharding_spec, src_rank, process_group, {})


def _shard_named(
    module: nn.Module, name: str, spec: ShardingSpec, src_rank: int, process_group: Group | None, made: dict[int, Any]
) -> None:
    """Shard one tensor. `made` has those that are sharded already, by the id of what they were: tied ones stay tied."""
    check_type(module, nn.Module, "shard_parameter: module")
    check_type(name, str, "shard_parameter: param_name")
    if not hasattr(module, name):
        raise AttributeError(f"{type(module).__name__} has no attribute `{name}`")
    tensor = getattr(module, name)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"Expected {type(module).__name__}.{name} to be a Tensor, but found {type(tensor).__name__}")
    if isinstance(tensor, ShardedTensor):
        raise ValueError(f"{type(module).__name__}.{name} is a ShardedTensor already; use its reshard")
    if not tensor.is_contiguous():
        raise ValueError(f"param: {name} is not a contiguous Tensor")
    if id(tensor) not in made:
        sharded = _shard_tensor(tensor.detach(), spec, src_rank, process_group)
        if isinstance(tensor, nn.Parameter):
            sharded = nn.Parameter(sharded, requires_grad=tensor.requires_grad)  # type: ignore[assignment]
        elif tensor.requires_grad:
            sharded.requires_grad_()
        made[id(tensor)] = (tensor, sharded)
    _replace(module, name, made[id(tensor)][1])


def _replace(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute; parameters and buffers without what `nn.Module` asks of them."""
    for table in (module._parameters, module._buffers):
        if name in table:
            table[name] = value
            return
    setattr(module, name, value)


def shard_module(module: nn.Module, plan: ShardingPlan, src_rank: int = 0, process_group: Group | None = None) -> None:
    """Shard a module as a plan says, in place.

    The plan is checked first: after an error the module is as it was. A parameter that several names share is sharded
    once and stays shared, under names outside of the plan too.

    Args:
        module: The module.
        plan: Which tensors are sharded how, which modules are replaced, and what happens to outputs.
        src_rank: The rank of the group whose values are taken.
        process_group: The default is the default process group. Every rank of it calls this.

    Raises:
        AttributeError: If a path of the plan is not there.
        TypeError: If an entry of the plan has the wrong type.
        KeyError: If a Sharder has no path.
        RuntimeError: If the plan has entries below a module that a Sharder makes.
    """
    _check_plan(module, plan)
    made: dict[int, Any] = {}
    for path, spec in plan.plan.items():
        owner_path, _, name = path.rpartition(".")
        if isinstance(spec, ShardingSpec):
            owner = module.get_submodule(owner_path)
            if not isinstance(getattr(owner, name), ShardedTensor):
                _shard_named(owner, name, spec, src_rank, process_group, made)
        else:
            parent = module.get_submodule(owner_path)
            sharded = spec.shard(getattr(parent, name))
            if not isinstance(sharded, nn.Module):
                raise TypeError(f"the Sharder for '{path}' must return a torch.nn.Module, got {type(sharded).__name__}")
            setattr(parent, name, sharded)
    _retie(module, made)
    for path, spec in (plan.output_plan or {}).items():
        _reshard_output(module.get_submodule(path), spec)
    for path in plan.return_local_tensor or []:
        _collect_local_shard(module.get_submodule(path))


def _retie(module: nn.Module, made: dict[int, Any]) -> None:
    """Set the sharded tensor under every other name of the tensor it was."""
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, value in table.items():
                if id(value) in made:
                    table[name] = made[id(value)][1]


def _check_plan(module: nn.Module, plan: ShardingPlan) -> None:
    check_type(module, nn.Module, "shard_module: module")
    check_type(plan, ShardingPlan, "shard_module: plan", "give a ShardingPlan")
    for path, spec in plan.plan.items():
        if not isinstance(spec, (ShardingSpec, Sharder)):
            raise TypeError(
                f"Only `ShardingSpec` and `Sharder` are supported to shard '{path}', got {type(spec).__name__}"
            )
        _check_entry(path, spec, module)
    _check_no_overlap(plan.plan)
    for path, spec in (plan.output_plan or {}).items():
        if not isinstance(spec, ShardingSpec):
            raise TypeError(f"Only `ShardingSpec` is supported as output_plan for '{path}', got {type(spec).__name__}")
    for path in (*(plan.output_plan or ()), *(plan.return_local_tensor or ())):
        _check_kind(path, _find(module, path), nn.Module)


def _check_entry(path: str, spec: ShardingSpec | Sharder, module: nn.Module) -> None:
    if isinstance(spec, ShardingSpec):
        if not path:
            raise AttributeError(f"{type(module).__name__} has no attribute ``: '' is the module itself, not a tensor")
        _check_kind(path, _find(module, path), torch.Tensor)
        return
    if not path:
        raise KeyError("Module path must not be empty for custom sharder!")
    found = _find(module, path)
    if not isinstance(found, nn.Module):
        raise AttributeError(f"`{path}` is not an nn.Module, but a {type(found).__name__}; a Sharder takes modules")


def _check_no_overlap(plan: dict[str, Any]) -> None:
    """Raise where the plan has entries below a module that a Sharder makes."""
    taken = [path for path, spec in plan.items() if isinstance(spec, Sharder)]
    for path, above in itertools.product(plan, taken):
        if path.startswith(above + "."):
            raise RuntimeError(
                f"ShardingPlan is in-valid, trying to shard '{path}', but there's already a Sharder entry for "
                f"module '{above}', which makes all that is below it; leave one of them out"
            )


def _check_kind(path: str, found: object, kind: type) -> None:
    if not isinstance(found, kind):
        raise ValueError(f"Expected '{path}' to be a {kind.__name__}, but found {type(found).__name__}")


def _find(module: nn.Module, path: str) -> Any:
    here: Any = module
    for name in path.split(".") if path else ():
        if not hasattr(here, name):
            raise AttributeError(f"{type(here).__name__} has no attribute `{name}` (in the path '{path}')")
        here = getattr(here, name)
    return here


def _reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Add a hook to a module that reshards its output where that is a ShardedTensor.

    Args:
        module: The module.
        resharding_spec: The new spec of the output.

    Returns:
        The module.
    """

    check_type(module, nn.Module, "_reshard_output: module")
    check_type(resharding_spec, ShardingSpec, "_reshard_output: resharding_spec")

    def hook(_: nn.Module, inputs: object, output: object) -> Any:
        return output.reshard(resharding_spec) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(hook)
    return module


def _collect_local_shard(module: nn.Module) -> nn.Module:
    """Add a hook to a module that returns the local tensor of a ShardedTensor output.

    A dim that is cut into single rows is dropped: a [4, 16] tensor on 4 ranks is a [16] tensor on each.

    Args:
        module: The module.

    Returns:
        The module.
    """

    check_type(module, nn.Module, "_collect_local_shard: module")

    def hook(_: nn.Module, inputs: object, output: object) -> Any:
        if not isinstance(output, ShardedTensor):
            return output
        local = output.local_tensor()
        spec = output.sharding_spec()
        if isinstance(spec, ChunkShardingSpec) and local.size(int(spec.dim)) == 1:
            local = local.squeeze(int(spec.dim))
        return local

    module.register_forward_hook(hook)
    return module


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
        prefix: What the names of the module's tensors start with.
        local_metadata, strict, missing_keys, unexpected_keys, error_msgs: Not used.
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
