"""Time of a step: what was recorded, played on two queues, one for kernels and one for communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.comm.outline import Passage
from shardwise.forecast.hardware import BASES, Hardware


@dataclass
class Kernel:
    """One op of the rank that is played."""

    name: str
    flops: int
    nbytes: int
    dtype: str
    kind: str  # "matmul", "attention" or "memory"
    line: str
    module: str
    phase: str  # "forward", "backward", "recomputed" or "optimizer"
    key: str = ""  # how a table of measured times names it


@dataclass(frozen=True)
class Began:
    """A communication begins."""

    passage: Passage
    line: str


@dataclass(frozen=True)
class Waited:
    """The program needs what a communication brings."""

    passage: Passage


Event = Kernel | Began | Waited


@dataclass
class Span:
    """Something that takes time on one of the queues."""

    queue: str  # "compute" or "communication"
    name: str
    start: float
    seconds: float
    line: str


@dataclass
class Time:
    """Seconds of a step.

    Attributes:
        total: From its beginning to its end.
        compute, communication: How long each queue works.
        exposed: How long kernels wait for communication.
        host: How long the host takes to start all ops.
        flops: Floating-point operations of matrix products and attention, without the `recomputed` ones.
        bases: Seconds of kernels and of communication by the basis of the figures behind them.
    """

    total: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    host: float = 0.0
    flops: int = 0
    recomputed: int = 0
    spans: list[Span] = field(default_factory=list)
    lines: Counter[str] = field(default_factory=Counter)
    bases: Counter[str] = field(default_factory=Counter)

    @property
    def basis(self) -> str:
        """The least certain figure behind it."""
        return max((b for b in self.bases if self.bases[b]), key=BASES.index, default="exact")


def play(events: Sequence[Event], hardware: Hardware) -> Time:
    """The time of a recorded step. The host starts one op after another; a kernel begins when the one before it is
    done, a communication when those before it are done and the kernels before it too.

    Args:
        events: In the order of the program.
        hardware: What it runs on.
    """
    time, host, compute, network = Time(), 0.0, 0.0, 0.0
    ends: dict[int, float] = {}
    for event in events:
        if isinstance(event, Kernel):
            seconds, basis = hardware.op_seconds(event.flops, event.nbytes, event.dtype, event.kind, event.key)
            host += hardware.host.value
            start = max(compute, host)
            compute = start + seconds
            time.compute += seconds
            time.lines[event.line] += seconds  # type: ignore[assignment]
            time.bases[basis] += seconds  # type: ignore[assignment]
            time.spans.append(Span("compute", event.name, start, seconds, event.line))
            if event.phase == "recomputed":
                time.recomputed += event.flops
            else:
                time.flops += event.flops
        elif isinstance(event, Began):
            passage = event.passage
            seconds, basis = hardware.exchange_seconds(passage.sizes, passage.strides, passage.received)
            host += hardware.host.value
            start = max(network, compute, host)
            network = ends[id(passage)] = start + seconds
            time.communication += seconds
            time.bases[basis] += seconds  # type: ignore[assignment]
            time.spans.append(
                Span("communication", f"{passage.kind} {'+'.join(passage.axes)}", start, seconds, event.line)
            )
        else:
            arrived = ends.get(id(event.passage), 0.0)
            time.exposed += max(0.0, arrived - max(compute, host))
            compute = max(compute, arrived)
    time.host = host
    time.total = max(host, compute, network)
    return time
