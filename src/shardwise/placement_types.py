"""The placements, under the module name that programs import them from."""

from shardwise.layout import Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]
