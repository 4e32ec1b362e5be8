"""shardwise: tensors that live on many devices and behave as if they lived on one."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from shardwise.imports import without_collection

with without_collection():
    from shardwise import (  # noqa: F401  (random: an attribute)
        compiling,
        custom_function,
        dynamo,
        flex,
        optim,
        random,
        recomputation,
        sharded,
        tensor_functions,
        torch_paths,
    )
    from shardwise.api import distribute_module, distribute_tensor
    from shardwise.autograd import nodes
    from shardwise.caches import cache_info, clear_caches
    from shardwise.calibration import calibrate
    from shardwise.comm.rank_tensor import RankTensor
    from shardwise.context import implicit_replication, strict
    from shardwise.engine import transforms
    from shardwise.errors import (
        AutogradError,
        AxisError,
        CaptureError,
        CommError,
        DimError,
        LayoutError,
        MeshError,
        MoveError,
        OutlineError,
        RuleError,
        ShardwiseError,
        StrictError,
    )
    from shardwise.factories import empty, full, linspace, logspace, ones, rand, randint, randn, randperm, zeros
    from shardwise.interop import guards
    from shardwise.layout import Layout, Partial, Placement, Replicate, Shard
    from shardwise.layout import StridedShard as _StridedShard  # noqa: F401  (torch's private names: for its own modules)
    from shardwise.materialize import materialize
    from shardwise.mesh import DeviceMesh, init_device_mesh, outline, simulate
    from shardwise.move import memory_cap, plan_move
    from shardwise.random import manual_seed
    from shardwise.spec import Spec as _DTensorSpec  # noqa: F401
    from shardwise.spec import TensorMeta as _TensorMeta  # noqa: F401
    from shardwise.state import move_state_dict
    from shardwise.tensor import DTensor
    from shardwise.torch_paths.adopting import adopt, release

if TYPE_CHECKING:
    from shardwise import checkpoint as checkpoint
    from shardwise import debug, experimental, forecast, parallel
    from shardwise.captures.captured import capture
    from shardwise.experimental.local_map import local_map
    from shardwise.experimental.register_sharding import register_sharding
    from shardwise.forecast.playing import estimate
    from shardwise.parallel.context import context_parallel

__version__ = "0.1.0"

tensor_functions.take_functions()
flex.take_flex_attention()
dynamo.keep_out()
compiling.take_compile()
guards.guard()
custom_function.take_functions()
nodes.take_graph_nodes()
recomputation.take_checkpoints()
transforms.take_tensors()
torch_paths.install()

device_mesh: ModuleType
placement_types: ModuleType

# fmt: off
__all__ = [
    # tensors, how they are laid out, and where
    "DTensor", "Layout", "Partial", "Placement", "RankTensor", "Replicate", "Shard", "distribute_module",
    "distribute_tensor", "empty", "full", "linspace", "logspace", "materialize", "ones", "rand", "randint", "randn",
    "randperm", "zeros",
    "DeviceMesh", "device_mesh", "init_device_mesh", "outline", "placement_types", "simulate",
    # what is done with them
    "adopt", "cache_info", "calibrate", "capture", "clear_caches", "context_parallel", "estimate",
    "implicit_replication", "local_map", "manual_seed", "memory_cap", "move_state_dict", "plan_move",
    "register_sharding", "release", "strict",
    # errors
    "AutogradError", "AxisError", "CaptureError", "CommError", "DimError", "LayoutError", "MeshError", "MoveError",
    "OutlineError", "RuleError", "ShardwiseError", "StrictError",
    # packages; `shardwise.random` is not listed, so that `from shardwise import *` leaves Python's own `random` alone
    "debug", "experimental", "forecast", "optim", "parallel", "sharded",
]
# fmt: on

_LATER = {name: name for name in ("checkpoint", "debug", "experimental", "forecast", "parallel")}
_LATER |= dict.fromkeys(("context_parallel", "local_map", "register_sharding"), "experimental")
_LATER |= {"capture": "captures", "estimate": "forecast"}


def __getattr__(name: str) -> object:
    """Packages that many programs never use are imported when they are asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = import_module(f"{__name__}.{_LATER[name]}")
    found = globals()[name] = package if _LATER[name] == name else getattr(package, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
