"""Many programs: spread over workers that simulate meshes, or run in step by the processes of a group."""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.testing.fuzz.compose import compose
from shardwise.testing.fuzz.judge import INEXACT, OUT_OF_STEP, RIGHT, TORCHS, Verdict, judge
from shardwise.testing.fuzz.program import Program
from shardwise.testing.fuzz.shrink import shrink
from shardwise.testing.pool import pool_of

HANG = "hang"
_NO_END = "the ranks came to no end"
_PATIENCE = 60  # seconds for one program on processes
_START = 240  # and for their start: on few cores, to import torch in each takes longer than most programs


@dataclass(frozen=True)
class Found:
    """How one program ended; the text of one that failed, made short."""

    seed: int
    kind: str
    message: str = ""
    text: str = ""
    refused: bool = False  # whether plain torch raises

    @property
    def right(self) -> bool:
        return self.kind in (RIGHT, INEXACT, TORCHS)


# -- simulated meshes ------------------------------------------------------------------------------------------------
def simulated(
    seed: int, programs: int | None, deadline: float | None, jobs: int, strides: bool = True
) -> Iterator[Found]:
    """Run programs on simulated meshes.

    Args:
        seed: The first program's; the next ones count up.
        programs: How many, None for no limit.
        deadline: When to stop, by `time.monotonic`; None for never.
        jobs: How many worker processes.
        strides: Whether to compare strides.

    Yields:
        How each ended, in the order they end.
    """
    seeds = itertools.count(seed) if programs is None else iter(range(seed, seed + programs))
    more = lambda: deadline is None or time.monotonic() < deadline  # noqa: E731
    while more():
        left: list[int] = []
        yield from _until_one_dies(seeds, more, jobs, strides, left)
        if not left:
            return
        for s in left:  # each in a process of its own, to see whose program it was
            yield _found_alone(s, strides)


def _found_alone(seed: int, strides: bool) -> Found:
    """How the program of a seed ends that may have ended a process."""
    text = ""
    for shorter in (True, False):  # what it was made into may be what ended the process, and not what was composed
        try:
            with pool_of(1) as pool:
                text = pool.submit(_text_of, seed).result()
                return pool.submit(try_seed, seed, strides, shorter).result()
        except BrokenProcessPool:
            continue
    # without a text, it was plain torch that died of what is composed on it
    return Found(seed, HANG, "the process died", text) if text else Found(seed, RIGHT)


def _until_one_dies(
    seeds: Iterator[int], more: Callable[[], bool], jobs: int, strides: bool, left: list[int]
) -> Iterator[Found]:
    """Run programs until there are no more. If a process dies, all do; the seeds under way are then in `left`."""
    with pool_of(jobs) as pool:
        running = {pool.submit(try_seed, s, strides): s for s in itertools.islice(seeds, 2 * jobs)}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            if any(isinstance(task.exception(), BrokenProcessPool) for task in done):
                left += running.values()
                return
            for task in done:
                del running[task]
                yield task.result()
            for s in itertools.islice(seeds, len(done) if more() else 0):
                try:
                    running[pool.submit(try_seed, s, strides)] = s
                except BrokenProcessPool:  # just now: what runs will say so
                    left.append(s)


def _text_of(seed: int) -> str:
    return str(compose(seed))


def try_seed(seed: int, strides: bool = True, shorter: bool = True) -> Found:
    """Run the program of a seed, and make it short if it fails (unless told not to)."""
    program = compose(seed)
    once = lambda p: judge(p, strides=strides)
    verdict = once(program)
    if verdict.right:
        return Found(seed, verdict.kind, refused=verdict.refused)
    return found_in(seed, *(shrink(program, verdict, once) if shorter else (program, verdict)))


def found_in(seed: int, program: Program, verdict: Verdict) -> Found:
    return Found(seed, verdict.kind, verdict.message, str(program), verdict.refused)


# -- processes -------------------------------------------------------------------------------------------------------
def gloo(
    seed: int, programs: int | None, deadline: float | None, ranks: int, device: str = "cpu", strides: bool = True
) -> Iterator[Found]:
    """The same on processes, all of which run each program. When they do not come to its end, they are ended and others
    go on with the next program."""
    left = None if programs is None else programs
    while left is None or left > 0:
        with Group(ranks, device, seed, left, strides) as group:
            for found in group.results(deadline):
                seed, left = found.seed + 1, None if left is None else left - 1
                yield found
                if not is_in_step(found):
                    break
            else:
                return


class Group:
    """Processes that run programs in step."""

    def __init__(self, ranks: int, device: str, seed: int, programs: int | None, strides: bool) -> None:
        self.ranks, self.device, self.first, self.programs = ranks, device, seed, programs
        self.folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        spawn = multiprocessing.get_context("spawn")
        self.answers: Queue[Found] = spawn.Queue()
        shared = (ranks, self.folder.name, device, seed, programs, strides, self.answers)
        self.processes: list[BaseProcess] = [
            spawn.Process(target=_serve, args=(rank, *shared), daemon=True) for rank in range(ranks)
        ]

    def __enter__(self) -> Group:
        before = os.environ.get("PYTHONHASHSEED")
        os.environ["PYTHONHASHSEED"] = "0"  # samples come from sets: all processes go through them in the same order
        try:
            for process in self.processes:
                process.start()
        finally:
            if before is None:
                del os.environ["PYTHONHASHSEED"]
            else:
                os.environ["PYTHONHASHSEED"] = before
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()

    def results(self, deadline: float | None) -> Iterator[Found]:
        """What the first rank tells, program after program."""
        last = None if self.programs is None else self.first + self.programs - 1
        for seed in itertools.count(self.first) if last is None else range(self.first, last + 1):
            if deadline is not None and time.monotonic() > deadline:
                return
            try:
                yield self.answers.get(timeout=_PATIENCE + (_START if seed == self.first else 0))
            except queue.Empty:
                codes = {rank: p.exitcode for rank, p in enumerate(self.processes) if p.exitcode is not None}
                said = f"exit codes {codes}" if codes else f"no answer within {_PATIENCE} s"
                yield self.of_program_without_end(seed, said)

    def of_program_without_end(self, seed: int, said: str) -> Found:
        """What is told of a program that the ranks did not end. Its text is made in a process of its own: where that
        dies, it was plain torch that died of what is composed on it."""
        try:
            with pool_of(1) as pool:
                text = pool.submit(_text_on_ranks, seed, self.ranks, self.device).result()
        except BrokenProcessPool:
            return Found(seed, RIGHT, f"{_NO_END}: {said}")
        return Found(seed, HANG, f"{_NO_END}: {said}", text)


def is_in_step(found: Found) -> bool:
    """Whether the processes that ran a program can go on with the next one."""
    return not found.message.startswith((_NO_END, OUT_OF_STEP)) and "CommError" not in found.message


def composed_for(seed: int, ranks: int, device: str) -> Program:
    """The program of a seed for this many processes."""
    return compose(seed, shapes_of(ranks), errors=device == "cpu")


def _text_on_ranks(seed: int, ranks: int, device: str) -> str:
    return str(composed_for(seed, ranks, device))


def shapes_of(ranks: int) -> list[tuple[int, ...]]:
    """The shapes of meshes of this many ranks."""
    pairs = [(a, ranks // a) for a in range(2, ranks) if ranks % a == 0]
    return [(ranks,), *pairs]


def _serve(
    rank: int,
    ranks: int,
    folder: str,
    device: str,
    seed: int,
    programs: int | None,
    strides: bool,
    answers: Queue[Found],
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if torch.cuda.device_count() < ranks:  # NCCL takes several ranks on one GPU if each says it is another host
            os.environ.update({"NCCL_HOSTID": f"host{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"})
            os.environ.update({"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"})
    backend = "nccl" if device == "cuda" else "gloo"
    store, patience = Path(folder, "store").as_uri(), datetime.timedelta(seconds=_PATIENCE / 2)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=patience)
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    for shape in shapes_of(ranks):
        meshes[shape] = init_device_mesh(device, shape)
    for s in itertools.count(seed) if programs is None else range(seed, seed + programs):
        # composed by one rank: values that torch does not write, as the mean of no losses, would differ on the others
        text = [str(composed_for(s, ranks, device)) if rank == 0 else ""]
        dist.broadcast_object_list(text, src=0)
        program = Program.parse(text[0])
        verdict = judge(program, meshes[program.mesh], strides)  # the same on every rank
        if rank == 0:
            right = Found(s, verdict.kind, refused=verdict.refused)
            answers.put(right if verdict.right else found_in(s, program, verdict))
    dist.barrier()
    dist.destroy_process_group()
