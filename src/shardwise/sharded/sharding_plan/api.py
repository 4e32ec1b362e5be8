"""The names of torch.distributed._shard.sharding_plan.api."""

from shardwise.sharded.plan import ShardingPlan, ShardingPlanner
from shardwise.sharded.sharder import Sharder
from shardwise.sharded.spec import ShardingSpec

__all__ = ["Sharder", "ShardingPlan", "ShardingPlanner", "ShardingSpec"]
