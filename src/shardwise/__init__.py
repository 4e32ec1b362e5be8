"""shardwise: tensors that live on many devices and behave as if they lived on one."""

from types import ModuleType

from shardwise import (  # noqa: F401  (checkpoint: so that it is an attribute)
    checkpoint,
    custom_function,
    debug,
    dynamo,
    experimental,
    optim,
    parallel,
    random,
    sharded,
    torch_paths,
)
from shardwise.api import distribute_module, distribute_tensor
from shardwise.caches import cache_info, clear_caches
from shardwise.calibration import calibrate
from shardwise.comm.rank_tensor import RankTensor
from shardwise.context import strict
from shardwise.engine import transforms
from shardwise.errors import (
    AutogradError,
    AxisError,
    CommError,
    DimError,
    LayoutError,
    MeshError,
    MoveError,
    RuleError,
    ShardwiseError,
    StrictError,
)
from shardwise.experimental import context_parallel, implicit_replication, local_map, register_sharding
from shardwise.factories import empty, full, ones, rand, randint, randn, randperm, zeros
from shardwise.layout import Layout, Partial, Placement, Replicate, Shard
from shardwise.materialize import materialize
from shardwise.mesh import DeviceMesh, init_device_mesh, simulate
from shardwise.move import memory_cap, plan_move
from shardwise.random import manual_seed
from shardwise.state import move_state_dict
from shardwise.tensor import DTensor

__version__ = "0.1.0"

dynamo.keep_out()
custom_function.take_functions()
transforms.take_tensors()
torch_paths.install()

device_mesh: ModuleType
placement_types: ModuleType

# fmt: off
__all__ = [
    # tensors, how they are laid out, and where
    "DTensor", "Layout", "Partial", "Placement", "RankTensor", "Replicate", "Shard", "distribute_module",
    "distribute_tensor", "empty", "full", "materialize", "ones", "rand", "randint", "randn", "randperm", "zeros",
    "DeviceMesh", "device_mesh", "init_device_mesh", "placement_types", "simulate",
    # what is done with them
    "cache_info", "calibrate", "clear_caches", "context_parallel", "implicit_replication", "local_map", "manual_seed",
    "memory_cap", "move_state_dict", "plan_move", "register_sharding", "strict",
    # errors
    "AutogradError", "AxisError", "CommError", "DimError", "LayoutError", "MeshError", "MoveError", "RuleError",
    "ShardwiseError", "StrictError",
    # packages; `shardwise.random` is not listed, so that `from shardwise import *` leaves Python's own `random` alone
    "debug", "experimental", "optim", "parallel", "sharded",
]
