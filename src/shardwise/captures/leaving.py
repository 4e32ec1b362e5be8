"""What of a call goes on outside of it: tensors that somebody keeps, and backward passes that leave by an argument."""

from __future__ import annotations

from collections.abc import Sequence
from gc import collect as collect_garbage
from typing import Any

from shardwise.captures.entry import plain_of
from shardwise.captures.program import Program
from shardwise.captures.tape import Tape

_LEAVES = "a backward pass inside leaves the function by an argument"


def kept_beyond(tape: Tape, program: Program) -> str:
    """Why a program cannot be repeated whose tensors somebody keeps: they would stay those of the first call."""
    if tape.kept(program):
        collect_garbage()
    kept = tape.kept(program)
    if not kept:
        return ""
    tensor, statement = kept[0]
    return (
        f"a tensor of shape {tuple(tensor.shape)} that {statement.label} made is kept beyond the call "
        f"({statement.source}); return it instead"
    )


def enter(tape: Tape, own: Sequence[Any]) -> list[Any]:
    """Give a tape its inputs. Where one comes from a graph outside, a hook tells that a backward pass goes on there."""
    hooks = []
    for leaf in own:
        for value in plain_of(leaf):
            tape.add_input(value)
            if value.requires_grad and not value.is_leaf:
                hooks.append(value.register_hook(lambda grad: tape.refuse(_LEAVES)))
    return hooks
