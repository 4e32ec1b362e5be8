"""The tables of a report: what was communicated by line, axis and module, who is slow, memory and layouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TypedDict

from shardwise.reports.blame import blame
from shardwise.reports.read import Event, Run

_MOST_ROWS = 200
_MOST_SAMPLES = 400  # of memory, for each rank


class Cost(TypedDict):
    """What one line, axis or module communicated, all ranks together."""

    name: str
    count: int
    bytes: int
    seconds: float


class Slow(TypedDict):
    """How late a rank comes to collectives."""

    rank: int
    collectives: int
    last: int
    mean_ms: float
    most_ms: float
    others_waited_s: float


class ByCategory(TypedDict):
    """What the memory of the rank that used most was used for; `rows` are seconds and bytes of each category."""

    rank: int
    categories: list[str]
    rows: list[list[float]]


class Summary(TypedDict):
    """All tables."""

    folder: str
    ranks: list[int]
    world: int
    seconds: float
    verdict: str
    events: int
    lost: int
    by_line: list[Cost]
    by_axis: list[Cost]
    by_module: list[Cost]
    slow: list[Slow]
    parameters: list[list[object]]
    memory: dict[str, list[list[float]]]
    memory_by_category: ByCategory
    ops: list[Cost]


def summary(run: Run) -> Summary:
    """The tables of a run."""
    events = [event for rank in run.ranks.values() for event in rank.collectives]
    start, stop = first_time(run), last_time(run)
    some = next(iter(run.ranks.values()))
    return {
        "folder": str(run.folder),
        "ranks": sorted(run.ranks),
        "world": run.world,
        "seconds": stop - start,
        "verdict": str(blame(run)),
        "events": sum(len(rank.events) + len(rank.ops) for rank in run.ranks.values()),
        "lost": sum(rank.lost for rank in run.ranks.values()),
        "by_line": _costs(events, lambda e: f"{e.source}  {e.op or e.kind}{' (backward)' if e.backward else ''}"),
        "by_axis": _costs(events, lambda e: f"{e.axis}  {e.kind}"),
        "by_module": _costs(events, lambda e: e.module or "(outside of modules, backward)"),
        "slow": _slow(run),
        "parameters": some.parameters[:_MOST_ROWS],
        "memory": _memory(run, start),
        "memory_by_category": _by_category(run, start),
        "ops": _costs([op for rank in run.ranks.values() for op in rank.ops], lambda e: f"{e.source}  {e.op}"),
    }


def first_time(run: Run) -> float:
    """When the first rank did the first thing."""
    return min((event.entered for rank in run.ranks.values() for event in (*rank.events, *rank.ops)), default=0.0)


def last_time(run: Run) -> float:
    """When the last rank was done with the last thing."""
    times = (event.left or event.entered for rank in run.ranks.values() for event in (*rank.events, *rank.ops))
    return max(times, default=0.0)


def _costs(events: list[Event], name: Callable[[Event], str]) -> list[Cost]:
    found: dict[str, Cost] = {}
    for event in events:
        key = name(event)
        cost = found.setdefault(key, {"name": key, "count": 0, "bytes": 0, "seconds": 0.0})
        cost["count"] += not event.wait
        cost["bytes"] += event.bytes
        cost["seconds"] += (event.left or event.entered) - event.entered
    return sorted(found.values(), key=lambda cost: -cost["seconds"])[:_MOST_ROWS]


def _slow(run: Run) -> list[Slow]:
    """Who comes last to collectives, by how much, and how long the others waited for it."""
    came: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for rank in run.ranks.values():
        for event in rank.collectives:
            if event.clock and not event.wait:
                came[event.clock, event.count][rank.rank] = event.entered
    late: dict[int, list[float]] = defaultdict(list)
    last: dict[int, int] = defaultdict(int)
    waited: dict[int, float] = defaultdict(float)
    for times in came.values():
        if len(times) < 2:
            continue
        first, slowest = min(times.values()), max(times, key=times.__getitem__)
        last[slowest] += 1
        waited[slowest] += sum(times[slowest] - at for at in times.values())
        for number, at in times.items():
            late[number].append(at - first)
    rows: list[Slow] = [
        {
            "rank": number,
            "collectives": len(found),
            "last": last[number],
            "mean_ms": sum(found) / len(found) * 1e3,
            "most_ms": max(found) * 1e3,
            "others_waited_s": waited[number],
        }
        for number, found in late.items()
    ]
    return sorted(rows, key=lambda row: -row["others_waited_s"])


def _memory(run: Run, start: float) -> dict[str, list[list[float]]]:
    """For each rank, bytes in use over time."""
    out: dict[str, list[list[float]]] = {}
    for number, rank in sorted(run.ranks.items()):
        every = max(1, len(rank.events) // _MOST_SAMPLES)
        out[f"rank {number}"] = [[round(e.entered - start, 4), e.memory] for e in rank.events[::every]]
    return out


def _by_category(run: Run, start: float) -> ByCategory:
    """Bytes by category; the last one is what the others leave of the memory in use."""
    known = ["parameters", "gradients", "optimizer"]
    most = max(run.ranks.values(), key=lambda rank: max((at["in use"] for at in rank.memory), default=0.0))
    every = -(-len(most.memory) // _MOST_SAMPLES) | 1  # odd: four looks are one step
    rows = []
    for at in most.memory[::every]:
        held = [at.get(category, 0) for category in known]
        rows.append([round(at["at"] - start, 4), *held, max(0, at["in use"] - sum(held))])
    return {"rank": most.rank, "categories": [*known, "the rest"], "rows": rows}
