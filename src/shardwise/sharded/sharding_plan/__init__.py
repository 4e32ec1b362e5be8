"""The names of torch.distributed._shard.sharding_plan."""

from shardwise.sharded.plan import ShardingPlan, ShardingPlanner
from shardwise.sharded.sharding_plan import api

__all__ = ["api", "ShardingPlan", "ShardingPlanner"]
