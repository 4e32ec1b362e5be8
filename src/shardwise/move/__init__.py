"""Moves: changes of layout, as steps with known bytes and known gradients."""

from shardwise.move.across import move_across
from shardwise.move.limit import memory_cap
from shardwise.move.plan import MovePlan, plan_move
from shardwise.move.planner import plan_steps
from shardwise.move.run import move, run_move, start_move

__all__ = [
    "MovePlan",
    "memory_cap",
    "move",
    "move_across",
    "plan_move",
    "plan_steps",
    "run_move",
    "start_move",
]
