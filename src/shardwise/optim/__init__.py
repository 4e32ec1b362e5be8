"""Optimizers on distributed parameters: torch's own at local speed, and those that need whole matrices."""

from shardwise.optim.local import local

__all__ = ["local"]
