"""Checkpoints: `save` and `load` of states in any layout; and distributed tensors in torch.distributed.checkpoint."""

from shardwise.checkpoint.api import load, plan_load, save
from shardwise.checkpoint.background import SaveHandle
from shardwise.checkpoint.manager import Manager
from shardwise.checkpoint.map_lines import drop, join, rename, split, stack, transpose
from shardwise.checkpoint.mapping import Map
from shardwise.checkpoint.plan import LoadPlan
from shardwise.checkpoint.presets import preset
from shardwise.checkpoint.read import Loaded
from shardwise.checkpoint_protocol import chunk_list, tensor_shard, write_items
from shardwise.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "LoadPlan",
    "Loaded",
    "Manager",
    "Map",
    "SaveHandle",
    "chunk_list",
    "drop",
    "join",
    "load",
    "plan_load",
    "preset",
    "rename",
    "save",
    "split",
    "stack",
    "tensor_shard",
    "transpose",
    "write_items",
]
