"""Parallel modules: styles, plans, losses and data parallelism; names as in torch.distributed.tensor.parallel."""

from shardwise.parallel.data import data_parallel
from shardwise.parallel.loss import loss_parallel
from shardwise.parallel.plan import PlanError, parallelize_module
from shardwise.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from shardwise.parallel.reshard import input_reshard
from shardwise.parallel.styles import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PlanError",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "data_parallel",
    "input_reshard",
    "loss_parallel",
    "parallelize_module",
]
