"""Proofs that ops give plain torch's answer on every layout."""

from shardwise.testing.check import check_rule, in_double
from shardwise.testing.spread import spread_out

__all__ = ["check_rule", "in_double", "spread_out"]
