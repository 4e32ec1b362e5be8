"""The proof of one operator: every sample, every form of the call, many layouts, one record of what came out."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.argument_types import MeshArgument
from shardwise.mesh import simulate
from shardwise.testing.chances import Trial, cheapest_known, is_plain, missed_chance, pattern
from shardwise.testing.spread import Combination, combinations
from shardwise.testing.subjects import FORMS, subjects
from shardwise.testing.trial import RAISED, RIGHT, Outcome, Reference, Sample, attempt, reference

KEPT = 4  # failures and missed chances written down per op; all are counted


@dataclass(frozen=True)
class Effort:
    """How much is tried: samples per op, and layouts per sample and mesh."""

    samples: int
    other_samples: int  # in forms other than a plain call of the function
    layouts: dict[tuple[int, ...], int]
    other_layouts: dict[tuple[int, ...], int]
    forms: tuple[str, ...] = tuple(FORMS)
    seconds: int = 90  # an op that takes longer is stopped, and its record says so
    in_turn: bool = False  # each sample is tried on one of the meshes, the next sample on the next

    def meshes_for(self, form: str, n: int) -> dict[tuple[int, ...], int]:
        """The shapes of meshes on which the n-th sample is tried in this form of the call, with how many layouts."""
        meshes = self.layouts if form == "function" else self.other_layouts
        return dict([list(meshes.items())[n % len(meshes)]]) if self.in_turn else meshes


QUICK = Effort(2, 1, {(3,): 1, (2, 2): 1}, {(3,): 1}, ("function", "in-place", "ties", "transposed"), 60, True)
FULL = Effort(24, 4, {(4,): 16, (2, 2): 8}, {(3,): 4, (2, 2): 3})


@dataclass
class Record:
    """The results of one operator."""

    name: str
    trials: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    forms: dict[str, int] = field(default_factory=dict)  # trials of each form
    failures: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)  # ops that were gathered, with their reasons
    missed: dict[str, int] = field(default_factory=dict)  # layouts -> times
    dearer: list[str] = field(default_factory=list)  # layouts for which the trials know a cheaper plan
    splits: dict[str, list[Any]] = field(default_factory=dict)  # layouts -> results' layouts, bytes, of all operands
    shapes: str = ""  # of the sample that `splits` speaks of
    bytes: int = 0  # moved forward, and what the cheapest known plans would have moved
    cheapest: int = 0
    seconds: float = 0.0
    cut_off: bool = False

    @property
    def right(self) -> bool:
        return self.trials > 0 and set(self.verdicts) == {RIGHT}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"right": self.right}


class _OutOfTime(BaseException):
    """An operator took longer than its effort allows."""


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def prove(name: str, effort: Effort = FULL, device: str = "cpu", seed: int = 0) -> Record:
    """Try one operator of PyTorch's database."""
    record, started = Record(name), time.perf_counter()
    try:
        with _at_most(effort.seconds):
            for form in effort.forms:
                most = effort.samples if form == "function" else effort.other_samples
                for n, sample in enumerate(subjects()[name].samples(form, most, device)):
                    _prove_sample(record, form, n, sample, effort.meshes_for(form, n), f"{seed} {name}")
    except _OutOfTime:
        record.cut_off = True
    except Exception as error:  # of the database or of the device: the other operators are tried all the same
        record.trials += 1
        record.verdicts[RAISED] = record.verdicts.get(RAISED, 0) + 1
        record.failures.append(f"the proof ended with {type(error).__name__}: {str(error)[:300]}")
    record.seconds = round(time.perf_counter() - started, 2)
    return record


def _prove_sample(
    record: Record, form: str, n: int, sample: Sample, layouts: dict[tuple[int, ...], int], seed: str
) -> None:
    expected = reference(sample)
    if expected is None:
        return
    on_cpu = sample.tensors[0].device.type == "cpu"  # elsewhere an index out of range ends the process
    for shape, limit in layouts.items():
        weighs = form == "function" and len(shape) == 1 and limit >= 12  # fewer trials say little about chances
        mesh = simulate(shape, device=sample.tensors[0].device.type)
        tried: list[Trial] = []
        for i, combination in enumerate(combinations(sample.tensors, shape, limit, f"{seed} {form} {n}")):
            outcome = attempt(expected, mesh, combination, i)
            _note(record, form, n, shape, sample, combination, outcome)
            if outcome.verdict == RIGHT:
                tried.append((combination, outcome))
                if weighs and outcome.bytes and is_plain(combination) and on_cpu:
                    chance = missed_chance(expected, mesh, combination, i)
                    if chance:
                        record.missed[chance] = record.missed.get(chance, 0) + 1
        if weighs and n < 3:
            _weigh(record, expected, mesh, tried)


def _note(
    record: Record, form: str, n: int, shape: tuple[int, ...], sample: Sample, layouts: Combination, outcome: Outcome
) -> None:
    record.trials += 1
    record.verdicts[outcome.verdict] = record.verdicts.get(outcome.verdict, 0) + 1
    record.forms[form] = record.forms.get(form, 0) + 1
    if outcome.verdict != RIGHT and len(record.failures) < KEPT:
        shapes = " ".join(str(tuple(t.shape)).replace(" ", "") for t in sample.tensors)
        where = f"{form} sample {n} shapes {shapes} mesh {shape}: {pattern(layouts)}"
        record.failures.append(f"{outcome.verdict} {where}: {outcome.message[:300]}")
    record.fallbacks = sorted({*record.fallbacks, *outcome.fallbacks})


def _weigh(record: Record, expected: Reference, mesh: MeshArgument, tried: list[Trial]) -> None:
    """Record what the plans cost next to the cheapest that the trials show, and how the op is split."""
    operand_bytes = sum(t.numel() * t.itemsize for t in expected.sample.tensors)
    splits: dict[str, list[Any]] = {}
    for layouts, outcome in tried:
        least, there = cheapest_known(expected, mesh, layouts, outcome, tried)
        record.bytes += outcome.bytes
        record.cheapest += least
        if least < outcome.bytes and len(record.dearer) < KEPT:
            record.dearer.append(f"{pattern(layouts)}: {outcome.bytes} bytes, {least} by way of {pattern(there)}")
        if is_plain(layouts):
            kinds = Counter(e.kind for e in outcome.entries)
            out = " ".join("·".join(map(str, p)) for p in outcome.placements)
            splits.setdefault(pattern(layouts), [out, outcome.bytes, operand_bytes, dict(kinds)])
    if len(splits) > len(record.splits):
        record.splits = splits
        record.shapes = " ".join("x".join(map(str, t.shape)) or "()" for t in expected.sample.tensors)
