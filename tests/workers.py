"""Run a test function on several real processes, joined by gloo.

    def total(rank, world_size):
        value = torch.tensor(rank)
        dist.all_reduce(value)
        return value.item()

    def test_total():
        assert run_ranks(total, 4) == [6, 6, 6, 6]

The processes of one world size start at the first use and serve the whole test session. They are forked off a process
that has loaded torch and the library, and does nothing else: to load those costs far more than most tests. Every task has a time limit: a
worker that hangs or dies fails its test with a message, its pool is killed, and the next test gets a new one.
"""

import atexit
import datetime
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

START_SECONDS = 200  # to import torch and join the group
TASK_SECONDS = 240  # far more than a test takes, also where the machine is busy with other things
GRACE_SECONDS = 8  # for the other ranks to answer after one has failed


class RankError(RuntimeError):
    """A rank raised, died, or did not answer in time. `rank` is the first such; its exception is `__cause__`."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank


def run_ranks(fn, world_size, *args, timeout=TASK_SECONDS):
    """The list of `fn(rank, world_size, *args)`, by rank, each computed in its own process of one gloo group.

    `fn` is a function at the top of a module, so that the workers can import it.
    """
    try:
        task = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(
            f"{name} or its arguments cannot be sent to the workers: {error}. "
            "Use a function at the top of a module, and arguments that pickle."
        ) from error
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = Pool(world_size)
    return pool.run(task, timeout)


def preloaded():
    """The context of processes that are forked off one which has loaded torch and the library."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def close_pools():
    """Stop all workers; the next `run_ranks` starts new ones."""
    while _pools:
        _pools.popitem()[1].close()


@functools.cache
def device_mesh(shape: tuple[int, ...], axis_names: tuple[str, ...] | None = None) -> DeviceMesh:
    """In a worker: the mesh of this shape, made once in a process, so that tests do not pile up process groups."""
    return init_device_mesh("cpu", shape, mesh_dim_names=axis_names)


_pools: dict[int, "Pool"] = {}
atexit.register(close_pools)


# ---------------------------------------------------------------- the parent's side


@dataclass(frozen=True)
class Failure:
    rank: int
    what: str  # "ValueError: the text"
    where: str  # "file:line" of the raise; ranks that fail in the same place have stayed in step
    details: str = ""  # the remote traceback
    cause: BaseException | None = None


class Pool:
    """`world_size` processes in one gloo group. Started by the first `run`, started again after a failure."""

    def __init__(self, world_size: int, context=None):
        self.world_size = world_size
        self._context = context  # of multiprocessing; None: forked off the process that has loaded torch
        self._processes: list = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def run(self, task: bytes, timeout: float) -> list:
        try:
            if not self._processes:
                self._start()
            message = pickle.dumps((sys.path, task))
            for pipe in self._pipes:
                pipe.send_bytes(message)
            results, failures = self._collect(timeout)
        except BaseException as error:  # also pytest's own time-out and ctrl-C: the workers may be anywhere by now
            self.kill()
            if isinstance(error, OSError):
                raise RankError(f"a worker of {self.world_size} died between two tests: {error!r}", -1) from error
            raise
        if failures:
            places = {failure.where for failure in failures}
            in_step = len(failures) == self.world_size and len(places) == 1 and places != {"hang"}
            if not in_step:
                self.kill()
            raise _error(failures, self.world_size) from failures[0].cause
        return [results[rank] for rank in range(self.world_size)]

    def close(self):
        """Let the workers leave their group and exit; kill those that do not."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self):
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self):
        context = self._context or preloaded()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world_size, theirs, self._folder.name)
            process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rank {rank}")
            process.start()
            theirs.close()  # so that the worker's death closes the pipe
            self._processes.append(process)
            self._pipes.append(ours)
        _, failures = self._collect(START_SECONDS)
        if failures:
            self.kill()
            raise _error(failures, self.world_size) from failures[0].cause

    def _collect(self, timeout: float) -> tuple[dict, list[Failure]]:
        """One answer of each rank: results by rank, and failures in the order they came in, deaths before all others."""
        results: dict = {}
        failures: list[Failure] = []
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    failure, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    failure, value = self._death(rank), None
                if failure is None:
                    results[rank] = value
                else:
                    if not failures:  # the others may wait for this rank for ever
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    failures.append(failure)
        if waiting:
            limit = f"did not finish within {timeout:g} s" if not failures else "did not finish after that"
            failures += [Failure(rank, limit, "hang", self._stack(rank)) for rank in waiting.values()]
        # A rank's death makes the others raise, and their answers may come in before it is noticed.
        return results, sorted(failures, key=lambda failure: not failure.where.startswith("death"))

    def _death(self, rank: int) -> Failure:
        process = self._processes[rank]
        process.join(GRACE_SECONDS)
        return Failure(rank, f"the process died with exit code {process.exitcode}", f"death of rank {rank}")

    def _stack(self, rank: int) -> str:
        """Where a hanging worker is: it writes its own stack to a file when signalled."""
        file = _stack_file(self._folder.name, rank)
        if not hasattr(signal, "SIGUSR1") or not file.exists():
            return ""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + GRACE_SECONDS
        while not (text := file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)  # for the rest of it
        return file.read_text() if text else ""


def _error(failures: list[Failure], world_size: int) -> RankError:
    first = failures[0]
    lines = [f"rank {first.rank} of {world_size}: {first.what}", "", first.details]
    lines += [f"also rank {other.rank}: {other.what}" for other in failures[1:]]
    hanging = [other for other in failures[1:] if other.where == "hang"]
    lines += [f"\nrank {other.rank} is here:\n{other.details}" for other in hanging]
    return RankError("\n".join(lines), first.rank)


# ---------------------------------------------------------------- the worker's side


def _serve(rank: int, world_size: int, pipe: Connection, folder: str):
    """The life of a worker: join the group, answer tasks until the pipe closes, leave the group."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=open(_stack_file(folder, rank), "w"))  # noqa: SIM115
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=Path(folder, "store").as_uri(),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(minutes=10),  # the parent's limit comes first
    )
    pipe.send_bytes(pickle.dumps((None, None)))
    while True:
        try:
            path, task = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            break
        sys.path[:] = path  # the parent can import the test's module, so we can
        pipe.send_bytes(_answer(rank, world_size, task))
    dist.destroy_process_group()


def _answer(rank: int, world_size: int, task: bytes) -> bytes:
    torch.manual_seed(0)
    try:
        fn, args = pickle.loads(task)
        return pickle.dumps((None, fn(rank, world_size, *args)))
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = "".join(traceback.format_exception_only(error)).strip()
        place = f"{where.filename}:{where.lineno}"
        failure = Failure(rank, what, place, traceback.format_exc(), _if_it_pickles(error))
        return pickle.dumps((failure, None))


def _if_it_pickles(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _die_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder, f"stack-{rank}.txt")
