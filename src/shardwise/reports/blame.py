"""Who hung, died or did something else: the records of all ranks side by side.

Ranks of one program come to the same collectives of a group in the same order. So the n-th of a group must be the same
on all its ranks, and all of them must come to it. What is found first, in this order, is the cause:

1. a rank whose program raised an error of its own;
2. ranks that came to different things, or to different lines, at the same place in the order of a group;
3. a rank that is gone, was stopped, ended early or never started, while others wait for it;
4. a rank that others wait for and that is in no collective itself;
5. what ranks said of each other when they gave up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.drawing import rank_names
from shardwise.reports.read import Event, Rank, Run


@dataclass
class Verdict:
    """What went wrong in a run.

    Attributes:
        ranks: The ranks that it began with; empty if nothing is wrong.
        text: What they did, with the line of the program.
        waits: What each of the others waits for.
    """

    ranks: tuple[int, ...]
    text: str
    waits: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([self.text, *(f"  {wait}" for wait in self.waits)])


def blame(run: Run, lines: bool = True) -> Verdict:
    """Find out what went wrong first in a run.

    Args:
        run: What `read_run` gave.
        lines: Whether ranks must be at the same line of the program, too.
    """
    found = _raised(run) or _differ(run, lines) or _gone(run) or _still(run) or _noticed(run)
    if found is None:
        over = all(rank.end is not None for rank in run.ranks.values()) and not run.missing
        return Verdict((), "nothing went wrong: all ranks did the same" + ("" if over else ", as far as they came"))
    found.waits = _waits([rank for rank in run.ranks.values() if rank.rank not in found.ranks])
    return found


# -- errors ------------------------------------------------------------------------------------------------
def _raised(run: Run) -> Verdict | None:
    own = [rank for rank in run.ranks.values() if rank.end and rank.end["end"] == "raised" and not _is_of_others(rank)]
    if not own:
        return None
    first = min(own, key=lambda rank: _number(rank.end, "at"))
    with_it = [rank for rank in own if _said(rank, "text") == _said(first, "text")]
    if len(with_it) == len(run.ranks) and not run.missing:
        text = f"all ranks raised {_said(first, 'text')} at {_said(first, 'line')}"
        return Verdict(tuple(r.rank for r in with_it), text)
    text = f"rank {first.rank} raised {_said(first, 'text')} at {_said(first, 'line')}{_after(first)}"
    return Verdict((first.rank,), text)


def _is_of_others(rank: Rank) -> bool:
    """Whether its error is about what others did."""
    return bool((rank.end or {}).get("because_of_others"))


def _said(rank: Rank, what: str) -> str:
    return str((rank.end or {}).get(what, ""))


def _number(facts: dict[str, object] | None, what: str) -> float:
    value = (facts or {}).get(what, 0.0)
    return float(value) if isinstance(value, (int, float)) else 0.0


# -- other programs ----------------------------------------------------------------------------------------
Place = tuple[str, int]  # a group, and how many collectives it had


def _differ(run: Run, lines: bool) -> Verdict | None:
    """The first place in the order of a group at which its ranks are not at the same."""
    came: dict[Place, dict[int, Event]] = defaultdict(dict)
    for rank in run.ranks.values():
        for event in rank.collectives:
            if event.clock and not event.wait:
                came[event.clock, event.count].setdefault(rank.rank, event)
    places = sorted(came.items(), key=lambda item: min(event.entered for event in item[1].values()))
    for _, events in places:
        kinds = {rank: _signature(event, lines) for rank, event in events.items()}
        if len(set(kinds.values())) > 1:
            return _difference(events, kinds)
    return None


def _signature(event: Event, lines: bool) -> tuple[object, ...]:
    return event.op, event.kind, event.backward, event.layouts, event.source if lines else ""


def _difference(events: dict[int, Event], kinds: dict[int, tuple[object, ...]]) -> Verdict:
    (most, count), *rest = Counter(kinds.values()).most_common()
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank in sorted(kinds):
        alike[kinds[rank]].append(rank)
    usual = alike[most]
    if rest and rest[0][1] == count:  # as many on the one side as on the other: neither is the usual one
        text = "; ".join(f"{rank_names(ranks)} came to {events[ranks[0]]}" for ranks in alike.values())
        return Verdict(tuple(sorted(kinds)), f"the ranks did different things: {text}")
    del alike[most]
    text = "; ".join(f"{rank_names(ranks)} came to {events[ranks[0]]}" for ranks in alike.values())
    others = tuple(sorted(rank for ranks in alike.values() for rank in ranks))
    return Verdict(others, f"the ranks did different things: {text}; {rank_names(usual)} to {events[usual[0]]}")


# -- ranks that do not come --------------------------------------------------------------------------------
def _gone(run: Run) -> Verdict | None:
    if run.missing:
        return Verdict(tuple(run.missing), f"{rank_names(run.missing)} never started: it left no record")
    gone = [rank for rank in run.ranks.values() if _is_gone(rank)]
    if not gone:
        return _early(run)
    first = min(gone, key=lambda rank: rank.events[-1].entered if rank.events else rank.started)
    how = "was stopped by a signal" if first.state == "stopped" else "ended without an error of its own (killed?)"
    with_it = [rank.rank for rank in gone if not rank.events or rank.events[-1].left is not None] or [first.rank]
    if len(with_it) > 1 and first.rank in with_it:
        said = "; ".join(f"rank {r}{_after(run.ranks[r])}" for r in with_it[:4])
        return Verdict(tuple(with_it), f"{rank_names(with_it)} {how}: {said}")
    chosen = run.ranks[with_it[0]]
    return Verdict((chosen.rank,), f"rank {chosen.rank} {how}{_after(chosen)}")


def _is_gone(rank: Rank) -> bool:
    return rank.end is None and rank.state in ("gone", "stopped")


def _early(run: Run) -> Verdict | None:
    """Ranks that came to the end of the record while others wait for them."""
    waiting = [rank for rank in run.ranks.values() if _unfinished(rank) or _is_failed(rank)]
    left = [rank for rank in run.ranks.values() if rank not in waiting and rank.end is not None]
    if not waiting or not left:
        return None
    who = tuple(rank.rank for rank in left)
    how = _said(left[0], "text") or "came to the end of its program"
    text = f"{rank_names(who)}: {how} while others still wait{_after(left[0])}"
    return Verdict(who, text)


def _still(run: Run) -> Verdict | None:
    """A rank that others wait for, and that is in no collective itself."""
    waiting = {rank.rank for rank in run.ranks.values() if _unfinished(rank)}
    awaited = {peer for rank in waiting for event in _unfinished(run.ranks[rank]) for peer in event.ranks}
    idle = sorted(awaited - waiting)
    if not idle:
        return None
    said = "; ".join(f"rank {rank}{_after(run.ranks[rank])}" for rank in idle[:4] if rank in run.ranks)
    return Verdict(tuple(idle), f"others wait for {rank_names(idle)}, which is not in a collective: {said}")


def _noticed(run: Run) -> Verdict | None:
    """The error of a rank that is about others, where the records show no more: they have it from the ranks."""
    ended = [rank for rank in run.ranks.values() if rank.end and rank.end["end"] == "raised"]
    if not ended:
        return None
    first = min(ended, key=lambda rank: _number(rank.end, "at"))
    who = tuple(rank.rank for rank in ended)
    said = f"rank {first.rank}: {_said(first, 'text')} at {_said(first, 'line')}"
    return Verdict(who, f"{rank_names(who)} gave up; {said}")


# -- words -------------------------------------------------------------------------------------------------
def _unfinished(rank: Rank) -> list[Event]:
    return [event for event in rank.collectives if event.left is None]


def _is_failed(rank: Rank) -> bool:
    return bool(rank.collectives) and rank.collectives[-1].failed


def _after(rank: Rank) -> str:
    """Where a rank was last."""
    inside = _unfinished(rank)
    if inside:
        return f", in {inside[-1]}"
    modules = [event for event in rank.events if event.is_module and event.left is None]
    within = f" in the forward of module {modules[-1].op}," if modules else ""
    done = rank.collectives
    if done:
        return f",{within} after {done[-1]} (its collective number {len(done) + rank.lost})"
    return f",{within} before its first collective"


def waiting(run: Run) -> list[int]:
    """The ranks that are in a collective."""
    return [rank.rank for rank in run.ranks.values() if _unfinished(rank)]


def _waits(ranks: Sequence[Rank]) -> list[str]:
    """A line for those that wait for the same."""
    alike: dict[tuple[bool, str], list[int]] = defaultdict(list)
    for rank in ranks:
        inside = _unfinished(rank) or [event for event in rank.collectives[-1:] if event.failed]
        if inside:
            last = inside[-1]
            where = f"{'for' if last.wait else 'in'} {str(last).removeprefix('the wait for ')}"
            alike[last.left is None, where].append(rank.rank)
    said = []
    for (now, where), who in alike.items():
        how = ("waits" if len(who) == 1 else "wait") if now else "waited"
        said.append(f"{rank_names(who)} {how} {where}")
    return said
