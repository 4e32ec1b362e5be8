"""Do all ranks issue the same collectives, in the same order, with sizes that match?

The moves of a program are known for every rank from layouts alone, so one process can check them for all. Whether every
rank has written down the same program, the ranks tell each other: a number for each program.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.captures.program import Move, Program
from shardwise.comm.capturing import unwritten
from shardwise.comm.group_calls import group_call
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.comm.record import Note, of_thread
from shardwise.errors import RanksDifferError
from shardwise.move.exchange import RoutedStep
from shardwise.move.schedule import Pieces
from shardwise.move.steps import MeshStep, Step
from shardwise.protocols import Item


def lines_of(program: Program) -> list[str]:
    """The collectives of a program in order, in words that are the same on all ranks."""
    found = []
    for move in program.moves():
        steps = "; ".join(f"{step} of {step.describe()}" for step in move.steps if step.kind != "local")
        found.append(f"{move.note.op}{' (backward)' if move.note.backward else ''}: {steps}, {move.note.source}")
    return found


def fingerprint(programs: Sequence[Program]) -> str:
    """A number for the collectives of programs: equal on ranks that communicate alike."""
    text = "\n".join(line for program in programs for line in ("program", *lines_of(program)))
    return f"{zlib.crc32(text.encode()):08x}"


def check_sizes(program: Program) -> int:
    """Check that what every rank sends is what its peers wait for.

    Returns:
        How many collectives were looked at.

    Raises:
        RanksDifferError: For the first one whose sizes do not match; it names the ranks and the line.
    """
    count = 0
    for move in program.moves():
        for step in move.steps:
            if step.kind != "local":
                count += 1
                _check_step(step, move)
    return count


def _check_step(step: Step, move: Move) -> None:
    if not isinstance(step, MeshStep):
        return
    mesh = step.layout.mesh
    everyone = [mesh.coords(rank) for rank in mesh.ranks]
    if isinstance(step, RoutedStep):
        routes = {coords: step.routes(coords) for coords in everyone}
        for sender, mine in routes.items():
            for peer, pieces in mine.sends.items():
                sent = _elements(pieces)
                taken = sum(_elements(r.pieces) for r in routes[peer].takes if sender in r.sources)
                if sent != taken:
                    _raise(step, move, sender, sent, peer, taken)
        return
    sizes = {coords: step.layout.local_shape_at(coords) for coords in everyone}
    for coords in everyone:
        for other in step.others(coords):
            if sizes[other] != sizes[coords]:
                _raise(step, move, coords, sizes[coords], other, sizes[other])


def _elements(pieces: Pieces) -> int:
    return sum(map(math.prod, pieces.shapes))


def _raise(step: Step, move: Move, one: Item, has: object, other: Item, wants: object) -> None:
    raise RanksDifferError(
        f"{move.note.op}: {step} at {move.note.source}: the rank at {one} sends {has} elements, the rank at {other} "
        f"waits for {wants}"
    )


REFUSED, NOT_YET, DONE = range(3)  # how the capture of a call ended
_NO_LINE = 1 << 40


def agree(comms: Iterable[Any], ended: int, line: int = 0) -> tuple[int, int]:
    """How the capture of a call ended on the rank where it went worst: ranks replay together or not at all, since
    passes may leave out moves that an eager run makes. And the first line at which a rank could not write it down.

    Args:
        comms: The backends over which the call moved anything; all ranks have the same, in the same order.
        ended: How it ended here.
        line: The line of the function that was in the way; 0 if none was.
    """
    for comm in comms:
        axes = [axis for axis, size in enumerate(comm.shape) if size > 1]
        if isinstance(comm, ProcessGroupComm) and axes:
            of_thread.note = Note("capture", "do all ranks replay?")
            try:
                flag = torch.tensor([ended, line or _NO_LINE], dtype=torch.int64, device=comm.device_type)
                ended, line = comm.all_reduce(flag, axes, "min").tolist()
                line = 0 if line == _NO_LINE else line
            finally:
                of_thread.note = None
    return ended, line


def compare_ranks(programs: Sequence[Program]) -> None:
    """Have all ranks compare the programs that they wrote down.

    Raises:
        RanksDifferError: Where they differ, on all ranks: it names a rank and the first line that is another there.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = [line for program in programs for line in ("program", *lines_of(program))]
    everyone: list[Any] = [None] * dist.get_world_size()
    with unwritten(), group_call(None, "capture", "all_gather"):
        dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            pairs = zip([*everyone[0], "nothing more"], [*theirs, "nothing more"], strict=False)
            at, (first, other) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
            raise RanksDifferError(
                f"capture: ranks 0 and {rank} wrote down different programs; collective {at} is {first!r} on rank 0 "
                f"and {other!r} on rank {rank}"
            )
