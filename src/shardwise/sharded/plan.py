"""Plans: which parameters of a module are sharded how, and what happens to its outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn

from shardwise.sharded.sharder import Sharder
from shardwise.sharded.spec import ShardingSpec


@dataclass
class ShardingPlan:
    """`plan` maps paths of parameters (or buffers) to specs and paths of modules to sharders. `output_plan` maps paths
    of modules to the specs their outputs are resharded to; modules in `return_local_tensor` give their local tensor.
    The root module's path is ""."""

    plan: dict[str, ShardingSpec | Sharder]
    output_plan: dict[str, ShardingSpec] | None = None
    return_local_tensor: list[str] | None = None


class ShardingPlanner(ABC):
    """Makes plans for modules."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """How this module is to be sharded."""
