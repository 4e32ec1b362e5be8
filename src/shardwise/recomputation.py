"""torch.utils.checkpoint(use_reentrant=False) on distributed tensors: it computes again from its inputs, so those must
be what they were. torch asks C++ whether they were written since, which sees no writes to local tensors."""

from __future__ import annotations

from typing import Protocol

from shardwise.engine.saved import Check
from shardwise.torch_private import CheckpointFrame
from shardwise.wrapper import Wrapper


class _Frame(Protocol):
    of_shardwise: Check


def take_checkpoints() -> None:
    """Have torch's checkpoints raise if distributed tensors that they took were written before the backward pass."""
    if not hasattr(CheckpointFrame, "save_inputs"):  # other versions of torch keep them with a Function, which knows
        return
    save, get = CheckpointFrame.save_inputs, CheckpointFrame.get_inputs

    def save_inputs(self: _Frame, *args: object) -> None:
        save(self, *args)
        self.of_shardwise = Check("checkpoint", [arg for arg in args if isinstance(arg, Wrapper)])

    def get_inputs(self: _Frame) -> list[object]:
        self.of_shardwise(None)
        return get(self)  # type: ignore[no-any-return]

    CheckpointFrame.save_inputs, CheckpointFrame.get_inputs = save_inputs, get_inputs
