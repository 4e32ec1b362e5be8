"""torch.utils.checkpoint(use_reentrant=False) on distributed tensors. It computes again from its inputs, so

- those must be what they were: torch asks C++ whether they were written since, which sees no writes to local tensors;
- a checkpoint inside of another keeps no inputs: the outer one computes them again. What is saved, and comes back with
  its gradient, are local tensors: C++ knows of no gradient of a distributed one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from shardwise.comm.rank_tensor import RankTensor
from shardwise.engine.saved import Check
from shardwise.layout import Layout
from shardwise.torch_private.autograd import CheckpointFrame, checkpoint_saver
from shardwise.wrapper import Wrapper, wrap


class _Frame(Protocol):
    of_shardwise: _Inputs


class _Parts(NamedTuple):
    """How an input of a checkpoint is made again from the plain values that were saved in its place."""

    size: int  # how many values
    ranks: list[int] | None = None  # of a value of simulated ranks: which of the values each has
    layout: Layout | None = None  # of a distributed tensor
    input: weakref.ref[torch.Tensor] | None = None

    def together(self, values: Sequence[object]) -> object:
        """The input itself, if it is still there and these are its own values."""
        local = values[0] if self.ranks is None else RankTensor([values[i] for i in self.ranks])  # type: ignore[misc]
        given = None if self.input is None else self.input()
        if given is not None and list(map(id, _values(given))) == list(map(id, values)):
            return given
        return local if self.layout is None else wrap(local, self.layout)  # type: ignore[arg-type]


class _Inputs:
    """How the inputs of a checkpoint come back from the plain values that were saved in their place."""

    def __init__(self, given: Sequence[object]) -> None:
        self._check = Check("checkpoint", [arg for arg in given if isinstance(arg, Wrapper)])
        self._parts = [_parts(arg) for arg in given]

    def again(self, saved: Iterable[object]) -> list[object]:
        """The inputs. Raises if one of them was written since."""
        self._check(None)
        values = iter(saved)
        return [part.together([next(values) for _ in range(part.size)]) for part in self._parts]


def take_checkpoints() -> None:
    """Have torch's checkpoints save local tensors in place of distributed ones, and raise if one that they took was
    written before the backward pass."""
    saver = checkpoint_saver()
    if saver is None:
        _take_frame()
    else:
        _take_saver(saver)


def _take_frame() -> None:
    """Since torch 2.12 or 2.13, the record of a checkpoint keeps its inputs."""
    save, get = CheckpointFrame.save_inputs, CheckpointFrame.get_inputs

    def save_inputs(self: _Frame, *args: object) -> None:
        save(self, *_all_values(args))
        self.of_shardwise = _Inputs(args)

    def get_inputs(self: _Frame) -> list[object]:
        return self.of_shardwise.again(get(self))

    CheckpointFrame.save_inputs, CheckpointFrame.get_inputs = save_inputs, get_inputs


def _take_saver(saver: type[Any]) -> None:
    """Before, the node of an autograd Function did: its first argument is a tensor that makes autograd record it."""
    apply = saver.apply

    def save_inputs(recorded: torch.Tensor, *args: object) -> torch.Tensor:
        made = apply(recorded, *_all_values(args))
        node = made.grad_fn
        if node is not None:  # else nothing is recorded, and nothing computed again
            get, inputs = node.get_args, _Inputs(args)
            node.get_args = lambda tensors: inputs.again(get(tensors))
        return made

    saver.apply = staticmethod(save_inputs)


def _all_values(args: Sequence[object]) -> list[object]:
    return [value for arg in args for value in _values(arg)]


def _values(arg: object) -> list[object]:
    """The plain values of an input, each one once."""
    local = arg._local if isinstance(arg, Wrapper) else arg
    return list({id(v): v for v in local.ranks}.values()) if isinstance(local, RankTensor) else [local]


def _parts(arg: object) -> _Parts:
    local = arg._local if isinstance(arg, Wrapper) else arg
    if not isinstance(local, RankTensor) and local is arg:
        return _Parts(1)
    values, ranks = _values(arg), None
    if isinstance(local, RankTensor):
        place = {id(value): i for i, value in enumerate(values)}
        ranks = [place[id(value)] for value in local.ranks]
    assert isinstance(arg, torch.Tensor)  # all that is not itself its local value is
    return _Parts(len(values), ranks, arg._layout if isinstance(arg, Wrapper) else None, weakref.ref(arg))
