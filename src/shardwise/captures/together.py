"""Ranks meet once per replay: what all of them are about to do is the same program, so no collective in it asks again.

An eager collective of gloo waits until the rank before is at the same one, since backends do not look. In a replay the
ranks compare the fingerprint of the program instead, in one such meeting per group.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from shardwise.captures.program import Program
from shardwise.captures.sequence import fingerprint
from shardwise.comm.flight import flights
from shardwise.comm.guard import compare
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.comm.record import Note, of_thread
from shardwise.move.steps import AllReduce, GatherParts

Run = Callable[..., tuple[torch.Tensor, ...]]


def together(program: Program, run: Run) -> Run:
    """The function that runs a program, with one meeting before it where that saves some inside."""
    places = _places(program)
    if not places:
        return run
    note = Note("replay", "do all ranks replay the same program?")
    digest = zlib.crc32(fingerprint([program]).encode())

    def met(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if flights or compare or of_thread.has_met:  # which look at every collective
            return run(*tensors)
        for comm, axes in places:
            guard = comm.guard("replay", axes, note)
            guard.digest = digest
            with guard:
                guard.meet()
        of_thread.has_met = True
        try:
            return run(*tensors)
        finally:
            of_thread.has_met = False

    return met


def _places(program: Program) -> Sequence[tuple[ProcessGroupComm, tuple[int, ...]]]:
    """Backends and axes over which several collectives go that would meet."""
    counts: dict[tuple[int, tuple[int, ...]], list[ProcessGroupComm]] = {}
    for move in program.moves():
        for step in move.steps:
            if isinstance(step, (AllReduce, GatherParts)) and isinstance(move.comm, ProcessGroupComm):
                along = move.comm.along(step.axes)
                if along.backend == "gloo" and along.group is not None and len(along.ranks) > 2:
                    counts.setdefault((id(move.comm), tuple(step.axes)), []).append(move.comm)
    return [(comms[0], axes) for (_, axes), comms in counts.items() if len(comms) > 1]
