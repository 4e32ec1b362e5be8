"""A run as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

from typing import TypedDict

from shardwise.reports.read import Event, Run
from shardwise.reports.summary import first_time


class Trace(TypedDict):
    """What the viewers read."""

    traceEvents: list[dict[str, object]]
    displayTimeUnit: str


def chrome_trace(run: Run) -> Trace:
    """The trace: a process for each rank; modules, ops and collectives on threads of their own."""
    start = first_time(run)
    out: list[dict[str, object]] = []
    for number, rank in sorted(run.ranks.items()):
        out.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": f"rank {number}"}})
        for event in rank.all_events:
            out.append(_event(event, number, start))
        out += _in_flight(rank.events, number, start)
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def _event(event: Event, rank: int, start: float) -> dict[str, object]:
    left = event.left if event.left is not None else event.entered
    lane = f"{'modules' if event.is_module else 'ops' if event.kind == 'op' else 'collectives'} {event.thread}"
    args = {
        "source": event.source, "layouts": event.layouts, "axis": event.axis, "bytes": event.bytes,
        "module": event.module, "backward": event.backward, "memory": event.memory, "ended": event.left is not None,
    }  # fmt: skip
    name = event.op if event.is_module or event.kind == "op" else f"{event.op}: {event.kind}"
    times = {"ts": (event.entered - start) * 1e6, "dur": (left - event.entered) * 1e6}
    return {"ph": "X", "pid": rank, "tid": lane, "name": name, "args": args, **times}


def _in_flight(events: list[Event], rank: int, start: float) -> list[dict[str, object]]:
    """Asynchronous collectives, from their beginning to the end of the wait: what computation may hide."""
    begun = {(event.clock, event.count): event for event in events if event.clock and not event.wait}
    out: list[dict[str, object]] = []
    for event in events:
        first = begun.get((event.clock, event.count)) if event.wait else None
        if first is not None and event.left is not None:
            times = {"ts": (first.entered - start) * 1e6, "dur": (event.left - first.entered) * 1e6}
            out.append({"ph": "X", "pid": rank, "tid": "in flight", "name": f"{first.op}: {first.kind}", **times})
    return out
