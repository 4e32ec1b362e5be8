"""What torch.distributed.pipelining asks of a stage that is fully sharded, once its micro-batches are done.

A pipeline lets gradients wait in every backward pass, and then has them reduced once. It does so by names inside of
what `fully_shard.state(module)` gives.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.errors import LayoutError
from shardwise.parallel.data.passes import DataParallel
from shardwise.parallel.fsdp.module import state_of


class PipelineState:
    """The state of a stage by the names that pipelines use. Its units are reduced together, so it lists none."""

    all_states: Sequence[object] = ()

    def __init__(self, passes: DataParallel) -> None:
        self._passes = passes
        self._state_ctx = self

    def _root_post_backward_final_callback(self) -> None:
        self._passes.reduce_waiting()


def pipeline_state(module: nn.Module) -> PipelineState:
    """What a pipeline asks of a module that is fully sharded.

    Raises:
        LayoutError: it is not.
    """
    state = state_of(module)
    if state is None:
        raise LayoutError(f"fully_shard.state: {type(module).__name__} is not fully sharded")
    return PipelineState(state.passes)
