"""All kinds of faults: programs of a few ranks, one of which (the *faulty* one) does something else than the others.

Every program checks its values against plain torch, so a rank that goes on after a fault goes on right or says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shardwise.testing.faults.differences import (
    DIFFERENCES,
    THE_END,
    differs,
    other_axis,
    other_seed,
    other_seed_later,
    waits_in_other_order,
)
from shardwise.testing.faults.others import (
    caught_and_gone_on,
    forked,
    group_destroyed,
    groups_made_anew,
    index_out_of_range,
    slow_rank,
    thread_raises,
    two_threads,
)
from shardwise.testing.faults.places import PLACES
from shardwise.testing.faults.scene import (
    HAPPENS,
    Scene,
    is_stopped,
)


@dataclass(frozen=True)
class Kind:
    """One kind of fault, and how it must end."""

    name: str
    run: Callable[[Scene], None]
    sizes: tuple[int, ...] = (2, 3, 4)
    goes_on: bool = False  # whether all ranks must get to the end
    alike: bool = False  # whether all ranks must raise the same error
    stops: bool = False  # whether the faulty rank is stopped for good


def kinds() -> list[Kind]:
    """All of them."""
    found = [
        Kind(f"a rank {what} in {where}", partial(run, happens=happens), stops=happens is is_stopped)
        for where, run in PLACES.items()
        for what, happens in HAPPENS.items()
    ]
    found += [Kind(f"ranks differ: {what}", partial(differs, what=what)) for what in DIFFERENCES]
    found += [
        Kind(f"checked ranks differ: {what}", partial(differs, what=what, checked=True), alike=what != THE_END)
        for what in DIFFERENCES
    ]
    return [
        *found,
        Kind("ranks differ: another mesh axis", other_axis, (4,)),
        Kind("ranks differ: another seed", other_seed),
        Kind("ranks differ: another seed, later", other_seed_later),
        Kind("waits in another order", waits_in_other_order, goes_on=True),
        Kind("an index that one rank finds out of range", index_out_of_range),
        Kind("an error that all ranks catch", caught_and_gone_on, goes_on=True),
        Kind("a slow rank", slow_rank, goes_on=True),
        Kind("two threads, a group each", two_threads, goes_on=True),
        Kind("a thread of a rank raises", thread_raises),
        Kind("a rank forks off a process that communicates", forked, goes_on=True),
        Kind("a rank leaves its groups with a move under way", group_destroyed),
        Kind("groups made anew after a fault", groups_made_anew, goes_on=True),
    ]  # fmt: skip
