"""Sharders: modules sharded by code of the user's own."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn


class Sharder(ABC):
    """Shards a whole module; a plan names the module by its path, and puts what `shard` returns in its place."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The sharded version of the module."""
