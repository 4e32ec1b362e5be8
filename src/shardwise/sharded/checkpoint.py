"""The names of torch.distributed._shard.checkpoint, which are those of torch.distributed.checkpoint: it saves and loads
ShardedTensors by the protocol of tile_items.py. They are looked up when asked for: importing them takes long."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("torch.distributed.checkpoint"), name)
