"""Parallel training of modules."""

from shardwise.parallel.data import data_parallel

__all__ = ["data_parallel"]
