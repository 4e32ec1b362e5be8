"""Time of a step: what was recorded, played on two queues, one for kernels and one for communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.comm.outline import Passage
from shardwise.forecast.hardware import BASES, Hardware
from shardwise.forecast.kernels import Kernel


@dataclass(frozen=True)
class Began:
    """A communication begins."""

    passage: Passage
    line: str


@dataclass(frozen=True)
class Waited:
    """The program needs what a communication brings."""

    passage: Passage


@dataclass(frozen=True)
class Looked:
    """The program looks at a value: the host waits until everything is done."""


Event = Kernel | Began | Waited | Looked


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
        events: What was played, in the order of the program.
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
    events: Sequence[Event] = field(default=(), repr=False)

    @property
    def basis(self) -> str:
        """The least certain figure behind it."""
        return max((b for b in self.bases if self.bases[b]), key=BASES.index, default="exact")


def play(events: Sequence[Event], hardware: Hardware) -> Time:
    """The time of a recorded step among steps like it. The host starts one op after another and runs ahead of the
    device; a kernel begins when it was started and the one before it is done, a communication when it was started and
    those before it are done, and the kernels before it too. A step begins for the host where the one before it ended.

    Args:
        events: In the order of the program.
        hardware: What it runs on.
    """
    queues = _Queues(hardware)
    queues.play(events)
    first, queues.time = queues.now(), Time()
    began = queues.host
    queues.play(events)
    time = queues.time
    time.host = queues.host - began
    time.total = queues.now() - first
    time.events = events
    for span in time.spans:
        span.start -= first
    return time


class _Queues:
    """The moment until which the host, the kernels and the communications are busy."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware, self.time = hardware, Time()
        self.host = self.compute = self.network = 0.0

    def now(self) -> float:
        return max(self.host, self.compute, self.network)

    def play(self, events: Sequence[Event]) -> None:
        ends: dict[int, float] = {}
        for event in events:
            if isinstance(event, Kernel):
                self._kernel(event)
            elif isinstance(event, Began):
                ends[id(event.passage)] = self._exchange(event)
            elif isinstance(event, Waited):
                arrived = ends.get(id(event.passage), 0.0)
                self.time.exposed += max(0.0, arrived - max(self.compute, self.host))
                self.compute = max(self.compute, arrived)
            else:
                self.host = max(self.host, self.compute)

    def _kernel(self, kernel: Kernel) -> None:
        time = self.time
        seconds, basis = self.hardware.op_seconds(
            kernel.flops, kernel.nbytes, kernel.dtype, kernel.kind, kernel.key, kernel.grids, kernel.sizes
        )
        self.host += self._started(kernel)
        start = max(self.compute, self.host)
        self.compute = start + seconds
        time.compute += seconds
        time.lines[kernel.line] += seconds  # type: ignore[assignment]
        time.bases[basis] += seconds  # type: ignore[assignment]
        time.spans.append(Span("compute", kernel.name, start, seconds, kernel.line))
        if kernel.phase == "recomputed":
            time.recomputed += kernel.flops
        else:
            time.flops += kernel.flops

    def _started(self, kernel: Kernel) -> float:
        """How long the host takes to start it."""
        more = {"tensor": kernel.tensors, "distributed": kernel.distributed, "library": kernel.of_library}
        if kernel.phase != "backward":  # there, views count with the ops
            more |= {"view": kernel.views, "module": kernel.modules, "checkpoint": kernel.begins_again}
        phase = "forward" if kernel.phase == "recomputed" else kernel.phase
        return self.hardware.host_seconds(phase, **more)

    def _exchange(self, event: Began) -> float:
        passage = event.passage
        seconds, basis = self.hardware.exchange_seconds(passage.sizes, passage.strides, passage.received)
        self.host += self.hardware.host_seconds("exchange")
        start = max(self.network, self.compute, self.host)
        self.network = start + seconds
        self.time.communication += seconds
        self.time.bases[basis] += seconds  # type: ignore[assignment]
        said = f"{passage.kind} {'+'.join(passage.axes)}"
        self.time.spans.append(Span("communication", said, start, seconds, event.line))
        return self.network
