"""Moves: changes of layout, as steps with known bytes and known gradients."""

from shardwise.move.execute import move, run_move
from shardwise.move.planner import MovePlan, plan_move, plan_steps

__all__ = ["MovePlan", "move", "plan_move", "plan_steps", "run_move"]
