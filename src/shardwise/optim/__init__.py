"""Optimizers on distributed parameters: torch's own at local speed, and those that need whole matrices."""

from shardwise.optim.local import local
from shardwise.optim.muon import Muon

__all__ = ["Muon", "local"]
