"""Ways to run a model on a mesh, made of layouts: styles and plans with the names of torch.distributed.tensor.parallel,
losses, data, context and expert parallelism."""

from shardwise.attention.sequence import sequence_exchange
from shardwise.parallel.context import (
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    set_rotate_method,
    zigzag,
)
from shardwise.parallel.data import data_parallel
from shardwise.parallel.expert.dispatch import Routed, combine, dispatch
from shardwise.parallel.expert.layer import MixtureOfExperts, balance_loss, grouped_linear, top_k
from shardwise.parallel.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardwise.parallel.loss import loss_parallel
from shardwise.parallel.plan import PlanError, parallelize_module
from shardwise.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from shardwise.parallel.reshard import input_reshard
from shardwise.parallel.styles.base import ParallelStyle
from shardwise.parallel.styles.layers import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "MixtureOfExperts",
    "OffloadPolicy",
    "ParallelStyle",
    "PlanError",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Routed",
    "RowwiseParallel",
    "SequenceParallel",
    "UnshardHandle",
    "balance_loss",
    "combine",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "data_parallel",
    "dispatch",
    "fully_shard",
    "grouped_linear",
    "input_reshard",
    "loss_parallel",
    "parallelize_module",
    "register_fsdp_forward_method",
    "sequence_exchange",
    "set_rotate_method",
    "share_comm_ctx",
    "top_k",
    "zigzag",
]
