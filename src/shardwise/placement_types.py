"""The placements under the name that torch.distributed.tensor gives their module."""

from shardwise.layout import Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]
