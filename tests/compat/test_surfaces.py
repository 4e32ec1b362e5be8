"""What torch's packages offer by public names is here under our paths, and takes what torch's takes."""

import importlib
import inspect
import types

import pytest

PACKAGES = {
    "torch.distributed.tensor": "shardwise",
    "torch.distributed.tensor.debug": "shardwise.debug",
    "torch.distributed.tensor.device_mesh": "shardwise.device_mesh",
    "torch.distributed.tensor.experimental": "shardwise.experimental",
    "torch.distributed.tensor.parallel": "shardwise.parallel",
    "torch.distributed.tensor.placement_types": "shardwise.placement_types",
    "torch.distributed.fsdp": "shardwise.parallel",
    "torch.distributed._shard.api": "shardwise.sharded.api",
    "torch.distributed._shard.metadata": "shardwise.sharded.metadata",
    "torch.distributed._shard.sharded_optim": "shardwise.sharded.sharded_optim",
    "torch.distributed._shard.sharded_tensor": "shardwise.sharded.sharded_tensor",
    "torch.distributed._shard.sharder": "shardwise.sharded.sharder",
    "torch.distributed._shard.sharding_plan": "shardwise.sharded.sharding_plan",
    "torch.distributed._shard.sharding_spec": "shardwise.sharded.sharding_spec",
}
REST = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
HOMES = ("torch.distributed.tensor", "torch.distributed._shard")
FOREIGN = {  # not for users: from a base class of torch's, or imported by torch for its own use
    "CommDebugMode.ignore_compile_internals",
    "CommDebugMode.is_infra_mode",
    "CommDebugMode.supports_higher_order_operators",
    "DTensor.__init__",
    "torch.distributed.tensor.experimental.DTensor",
    "torch.distributed.tensor.placement_types.MaskBuffer",
}
FSDP2 = {
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
}  # the others of torch.distributed.fsdp are of the wrapper class before it
CALLED_BY_TYPES = {"constant_", "kaiming_uniform_", "normal_", "uniform_", "allclose", "equal"}  # a tensor comes first
OUTPUTS = {"use_local_output"}  # None: as torch's True, but a DTensor that came in goes out as one


def public(module):
    """The names that a package of torch's offers: those it lists, and its own."""
    listed = getattr(module, "__all__", ())
    for name, value in vars(module).items():
        own = str(getattr(value, "__module__", "")).startswith(HOMES)
        if name.startswith("_") or isinstance(value, types.ModuleType) or not (own or name in listed):
            continue
        if module.__name__ == "torch.distributed.fsdp" and name not in FSDP2:
            continue
        yield name, value


def missing(where, theirs, ours):
    """What torch's callable takes and ours does not."""
    try:
        theirs, ours = inspect.signature(theirs).parameters, inspect.signature(ours).parameters
    except (TypeError, ValueError):
        return
    kinds = inspect.Parameter
    rest = any(p.kind in REST for p in theirs.values())
    takes_rest = any(p.kind is kinds.VAR_KEYWORD for p in ours.values())
    ordered = [name for name, p in ours.items() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    for at, (name, p) in enumerate(theirs.items()):
        if p.kind in REST:
            continue
        if name not in ours:
            if not takes_rest:
                yield f"{where}: no argument {name}"
        elif p.kind is kinds.POSITIONAL_OR_KEYWORD and (at >= len(ordered) or ordered[at] != name):
            yield f"{where}: argument {name} is not at place {at}"
        elif p.default is not kinds.empty and name not in OUTPUTS and not _same(p.default, ours[name].default):
            yield f"{where}: {name}={ours[name].default!r}, not {p.default!r}"
    for name, p in ours.items():
        if name not in theirs and not rest and p.default is kinds.empty and p.kind not in REST:
            yield f"{where}: {name} must be given"


def _same(theirs, ours):
    return theirs == ours or repr(theirs) == repr(ours)


def members(theirs):
    """Methods and attributes that a class of torch's does not have from torch.Tensor."""
    own = {name for base in theirs.__mro__ if base.__module__.startswith("torch.distributed") for name in vars(base)}
    return sorted(name for name in own if name == "__init__" or not name.startswith("_"))


def of_class(name, theirs, ours):
    for member in members(theirs):
        where = f"{name}.{member}"
        if where in FOREIGN:
            continue
        if not hasattr(ours, member):
            yield f"{where} is not here"
        elif callable(getattr(theirs, member)):
            yield from missing(where, getattr(theirs, member), getattr(ours, member))


@pytest.mark.parametrize("path", PACKAGES)
def test_public_names(path):
    theirs, ours = importlib.import_module(path), importlib.import_module(PACKAGES[path])
    found, seen = [], 0
    for name, value in public(theirs):
        if f"{path}.{name}" in FOREIGN or name in CALLED_BY_TYPES:
            continue
        seen += 1
        if not hasattr(ours, name):
            found.append(f"{path}.{name} is not here")
        elif inspect.isclass(value):
            found += of_class(name, value, getattr(ours, name))
        elif callable(value):
            found += missing(name, value, getattr(ours, name))
    assert found == [] and seen
