"""Data parallelism by layout: DDP and ZeRO 1, 2 and 3, on top of any layout the parameters have over other axes.

The parameters become DTensors over the data axis: Replicate (DDP) or cut (ZeRO), so optimizers, clipping and state
dicts see ordinary distributed tensors. Inside the forward, *leaves* that are whole along the data axis stand in for
them and collect each rank's own part of the gradient; buckets of gradients are summed while the backward pass goes on.
"""

from shardwise.parallel.data.setup import SHARDS, data_parallel

__all__ = ["SHARDS", "data_parallel"]
