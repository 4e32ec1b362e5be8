"""Put faults into programs of real processes, and see how those end.

Every fault is a small world of its own: its ranks are forked off from this process, which has loaded everything. It
ends right if, within the limit, every other rank either goes on with the right values or raises an error that names the
faulty rank; none may hang, crash, or leave a checkpoint that looks whole.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shardwise.testing.faults.kinds import Kind
from shardwise.testing.faults.scene import TIMEOUT_SECONDS, Scene, WrongValueError

TIMEOUTS = 4  # that a fault may take: joining a world and finding out who is lost take some too
FORK = multiprocessing.get_context("fork")


@dataclass
class Trial:
    """One fault that is, or was, put into a program."""

    kind: Kind
    size: int
    faulty: int
    seed: int
    folder: Path
    timeout: float = TIMEOUT_SECONDS  # of the groups
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    ranks: list[BaseProcess] = field(default_factory=list)
    wrong: str = ""  # why it did not end right

    def start(self, port: int) -> None:
        """Fork off its ranks, which join in the store at that port."""
        self.folder.mkdir()
        for rank in range(self.size):
            scene = Scene(rank, self.size, self.faulty, self.folder, self.seed, port, self.timeout)
            self.ranks.append(FORK.Process(target=_play, args=(scene, self.kind), daemon=True))
        for process in self.ranks:
            process.start()

    def is_over(self) -> bool:
        """Whether its ranks have ended, or all time is used up; the faulty one may be stopped for good."""
        self.seconds = time.monotonic() - self.started
        hanging = [rank for rank, process in enumerate(self.ranks) if process.is_alive() and not self._may_stay(rank)]
        if hanging and self.seconds < TIMEOUTS * self.timeout:
            return False
        for process in self.ranks:
            process.kill()
            process.join()
        self.wrong = f"ranks {hanging} hang" if hanging else self._judge()
        return True

    def _may_stay(self, rank: int) -> bool:
        """Whether it is for us to end a rank."""
        return rank == self.faulty and self.kind.stops

    def _judge(self) -> str:
        """Why it did not end right; empty if it did."""
        ends = [self._end_of(rank) for rank in range(self.size)]
        texts = {text for how, text in ends if how != "done"}
        for rank, (how, text) in enumerate(ends):
            crashed = how == "died" and (rank != self.faulty or text in ("-6", "-11"))
            if crashed or how == WrongValueError.__name__:
                return f"rank {rank}: {how} {text}"
            if how != "done" and self.kind.goes_on:
                return f"rank {rank} does not go on: {text}"
            if how != "done" and rank != self.faulty and not _names(self.faulty, text):
                return f"rank {rank} does not name rank {self.faulty}: {text}"
        if self.kind.alike and (len(texts) != 1 or any(how == "done" for how, _ in ends)):
            return f"the ranks do not raise the same: {ends}"
        return ""

    def _end_of(self, rank: int) -> tuple[str, str]:
        said = self.folder / f"end-{rank}"
        return tuple(json.loads(said.read_text())) if said.exists() else ("died", str(self.ranks[rank].exitcode))


def _names(rank: int, text: str) -> bool:
    """Whether a text is about that rank."""
    some = re.findall(r"ranks? \d+(?:(?:, | and )\d+)*|ranks:dict_keys\(\[[^)]*\)", text)  # the other is a checkpoint's
    return any(re.search(rf"\b{rank}\b", names) for names in some)


def warm_up() -> None:
    """Load what ranks would each load for themselves: the first step of an optimizer loads much of torch."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()


def _play(scene: Scene, kind: Kind) -> None:
    """The life of one rank."""
    noise = os.open(scene.folder / f"noise-{scene.rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(noise, 1)
    os.dup2(noise, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    end = ("done", "")
    try:
        kind.run(scene)
    except SystemExit:
        raise
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as where a program is run by itself
        end = (type(error).__name__, " ".join([str(error), *getattr(error, "__notes__", ())]))
    Path(scene.folder, f"end-{scene.rank}.new").write_text(json.dumps(end))
    os.rename(scene.folder / f"end-{scene.rank}.new", scene.folder / f"end-{scene.rank}")


def trials(wanted: Sequence[Kind], count: int, seed: int, folder: Path, timeout: float) -> Iterator[Trial]:
    """So many faults, of all kinds in turn, with numbers of ranks and places drawn from a seed."""
    chance = random.Random(seed)
    for i in range(count):
        kind = wanted[i % len(wanted)]
        size = chance.choice(kind.sizes)
        yield Trial(kind, size, chance.randrange(size), chance.randrange(1000), folder / str(i), timeout)


@contextmanager
def store() -> Iterator[int]:
    """The port of a store in a process of its own, which no fault can reach."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    yield ours.recv()
    process.kill()
    process.join()


def _serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while True:
        time.sleep(60)


def inject(
    wanted: Sequence[Kind],
    count: int,
    seed: int = 0,
    jobs: int = 2,
    show: bool = False,
    timeout: float = TIMEOUT_SECONDS,
) -> list[Trial]:
    """Put so many faults into programs, `jobs` at a time, and return them when all have ended. Groups wait for
    `timeout` seconds: few, so that stopped ranks are noticed soon, or many where the machine is busy."""
    warm_up()
    done: list[Trial] = []
    running: list[Trial] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with store() as port, tempfile.TemporaryDirectory() as folder, Progress(*columns, disable=not show) as progress:
        bar = progress.add_task("faults", total=count)
        waiting = trials(wanted, count, seed, Path(folder), timeout)
        upcoming = next(waiting, None)
        while running or upcoming is not None:
            while upcoming is not None and len(running) < jobs:
                upcoming.started = time.monotonic()
                upcoming.start(port)
                running.append(upcoming)
                upcoming = next(waiting, None)
            wait([p.sentinel for trial in running for p in trial.ranks if p.is_alive()], 0.1)
            over = [trial for trial in running if trial.is_over()]
            running = [trial for trial in running if trial not in over]
            done += over
            progress.update(bar, advance=len(over), description=over[-1].kind.name if over else None)
    return done


def table(found: Sequence[Trial]) -> Table:
    """How the kinds of faults ended."""
    out = Table("kind", "count", "ended right", "seconds, longest", "what was wrong")
    for name in dict.fromkeys(trial.kind.name for trial in found):
        mine = [trial for trial in found if trial.kind.name == name]
        wrong = [trial.wrong for trial in mine if trial.wrong]
        longest = max(trial.seconds for trial in mine)
        said = escape(wrong[0]) if wrong else ""
        out.add_row(name, str(len(mine)), str(len(mine) - len(wrong)), f"{longest:.1f}", said)
    return out
