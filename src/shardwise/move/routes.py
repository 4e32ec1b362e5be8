"""What one rank has to do with an exchange: which pieces of its tensors go where, and where what comes belongs.

Routes are found in two ways: from two layouts on one mesh (exchange.py), in time that does not grow with the mesh, and
from any two sets of tiles (tiles.py), by a sweep. Everything after that is the same: one schedule, one packing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardwise.layout import Region

Member = Any  # who takes part: coordinates on a mesh, or a global rank
Shape = tuple[int, ...]


class Piece(NamedTuple):
    """A region of one of the tensors that a rank holds."""

    slot: int
    region: Region


class Route(NamedTuple):
    """A piece of what a rank will hold, and who has it: one, or everyone who has a part of the sum, in order."""

    sources: tuple[Member, ...]
    piece: Piece


class Routes(NamedTuple):
    """One rank's part of an exchange.

    What one rank sends another is one message: the pieces in `sends`, one after the other. The receiver finds as many
    routes with that sender among its sources, in the same order. What a rank keeps is what it sends itself.
    """

    sends: Mapping[Member, Sequence[Piece]]
    takes: Sequence[Route]
    held: Sequence[Shape]  # the shapes of the tensors the rank has
    needed: Sequence[Shape]  # and of those it will have
    stays: Mapping[int, int] = {}  # tensors that stay what they are: their slots after and before


def joined(parts: Sequence[Routes]) -> Routes:
    """Several exchanges of one rank as one: their tensors one after the other, their messages too."""
    sends: dict[Member, list[Piece]] = {}
    takes: list[Route] = []
    held: list[Shape] = []
    needed: list[Shape] = []
    for part in parts:
        for peer, pieces in part.sends.items():
            sends.setdefault(peer, []).extend(Piece(len(held) + slot, region) for slot, region in pieces)
        takes += (Route(sources, Piece(len(needed) + slot, region)) for sources, (slot, region) in part.takes)
        held += part.held
        needed += part.needed
    return Routes(sends, takes, held, needed)
