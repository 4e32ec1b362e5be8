"""Styles of tensor parallelism: how one module is parallelized. `layers` has them; `axis` is the mesh axis that a style
works on, with what brings tensors there and back."""

from shardwise.parallel.styles.base import ParallelStyle
from shardwise.parallel.styles.layers import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = ["ColwiseParallel", "ParallelStyle", "RowwiseParallel", "SequenceParallel"]
