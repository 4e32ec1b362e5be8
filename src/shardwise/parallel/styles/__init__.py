"""Styles of tensor parallelism: how one module is parallelized.

`layers` cuts the parameters of a layer, `sequence` cuts the positions that a layer works on; `axis` is the mesh axis
that a style works on, with what brings tensors there and back.
"""

from shardwise.parallel.styles.base import ParallelStyle
from shardwise.parallel.styles.layers import ColwiseParallel, RowwiseParallel
from shardwise.parallel.styles.sequence import SequenceParallel

__all__ = ["ColwiseParallel", "ParallelStyle", "RowwiseParallel", "SequenceParallel"]
