"""Plans: which parameters of a module are sharded how, and what happens to its outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn

from shardwise.sharded.spec import ShardingSpec


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
        """Return the plan by which this module is to be sharded."""
