"""The record of a run: every collective, module and op of each rank, in files that outlive the process."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from shardwise.comm.flight import Flight, flights
from shardwise.comm.peers import is_of_peers
from shardwise.comm.watch import text_of, watch
from shardwise.debug.memory_by_category import MemoryByCategory, bytes_here
from shardwise.errors import CommError, check_type
from shardwise.layout import Placement
from shardwise.reports import blame, read_run
from shardwise.reports.blame import waiting
from shardwise.wrapper import Wrapper

_MOST_PARAMETERS = 2000
_MOST_MODULES = 10_000
_MOST_TOPS = 100  # a program may make a new module for each call


class Record:
    """A stretch of the program that is recorded, made by `record`."""

    def __init__(self, path: str | os.PathLike[str], keep: int, limit: float, ops: bool) -> None:
        check_type(path, (str, os.PathLike), "record: path", "give a folder")
        check_type(ops, bool, "record: ops", "give whether ops are kept")
        check_type(keep, int, "record: keep", "give how many events are kept")
        if keep < 1:
            raise ValueError(f"record: keep must be an int >= 1, got {keep}")
        self.path, self._keep, self._limit, self._ops = Path(path), keep, limit, ops
        self._names: dict[int, _Named] = {}  # by id of the module; of one that is gone, another may have the id
        self._tops = 0  # how many outermost modules were looked at

    def __enter__(self) -> Record:
        if flights:
            raise RuntimeError("record: a record is being written already; blocks of it do not nest")
        self._flight = Flight(self.path, self._keep, self._ops)
        self._memory = MemoryByCategory(self._flight)
        self._start()
        watch.on_blocked.append((self._limit, self._tell))
        return self

    def _start(self) -> None:
        flights.append(self._flight)
        self._unrecorded = torch.nn.Module.__call__
        self._recorded = torch.nn.Module.__call__ = self._recording(self._unrecorded)  # type: ignore[method-assign]

    def _stop(self) -> None:
        flights.clear()
        if torch.nn.Module.__call__ is self._recorded:  # else somebody replaced it since, and calls this one
            torch.nn.Module.__call__ = self._unrecorded  # type: ignore[method-assign]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._memory.close()
        watch.on_blocked[:] = [entry for entry in watch.on_blocked if entry[1] != self._tell]
        self._flight.say(**_end_of(error))
        self._flight.close()

    def _tell(self) -> None:
        """Say on stderr who hangs, once a collective has taken longer than the limit. One of the ranks that wait says
        all of it, the others that they wait, too."""
        run, here = read_run(self.path), self._flight.rank
        if here > min(waiting(run), default=here):
            said = f"rank {here} waits, too; `shardwise blame {self.path}` says for whom"
        else:
            said = str(blame(run))
        said = f"shardwise: a collective takes longer than {self._limit:g} s: {said}"
        print(said, file=sys.stderr, flush=True)

    # -- modules --------------------------------------------------------------------------------------------
    def _recording(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """What calls a module and records it. It takes the place of `Module.__call__`, because hooks of all modules
        cost more: where there are some, torch leaves its short way to `forward`."""
        flight, names = self._flight, self._names

        @functools.wraps(call)
        def recorded(module: torch.nn.Module, *args: object, **kwargs: object) -> object:
            if flight not in flights:  # also in a process that was forked since
                return call(module, *args, **kwargs)
            outer = flight.module
            if not outer:
                self._look_at(module)
            named = names.get(id(module))
            number = named.number if named is not None and named.module() is module else self._number_of(module)
            slot = flight.enter_module(number)
            try:
                return call(module, *args, **kwargs)
            finally:
                flight.leave(slot, None)
                flight.module = outer
                if not outer:
                    self._memory.forward_ends()

        return recorded

    def _number_of(self, module: torch.nn.Module, name: str = "") -> int:
        kind = type(module).__name__
        number = self._flight.name_module(name or kind, kind)
        if len(self._names) < _MOST_MODULES:
            self._names[id(module)] = _Named(weakref.ref(module), number)
        return number

    def _look_at(self, module: torch.nn.Module) -> None:
        """The layouts of an outermost module's parameters, once, and now and then what is in memory."""
        named = self._names.get(id(module))
        if (named is None or named.module() is not module) and self._tops < _MOST_TOPS:
            self._tops += 1
            top = type(module).__name__
            for name, inner in itertools.islice(module.named_modules(), _MOST_MODULES):
                self._number_of(inner, f"{top}.{name}" if name else top)
            rows = [_row(name, p) for name, p in itertools.islice(module.named_parameters(), _MOST_PARAMETERS)]
            self._flight.say(parameters=rows)
        self._memory.forward_begins(module)


class _Named(NamedTuple):
    """A module with its number in the record."""

    module: weakref.ref[torch.nn.Module]
    number: int


def _end_of(error: BaseException | None) -> dict[str, object]:
    now = time.time()
    if error is None:
        return {"end": "done", "at": now}
    if isinstance(error, SystemExit):
        line = text_of(error).removeprefix("failed at ").partition(": ")[0]
        return {"end": "quit", "at": now, "text": f"ended its program with sys.exit({error.code!r}) at {line}"}
    said = text_of(error)
    line, _, text = said.removeprefix("failed at ").partition(": ")
    others = isinstance(error, CommError) or is_of_peers(error)
    facts = {"end": "raised", "at": now, "kind": type(error).__name__, "text": text, "line": line}
    return {**facts, "because_of_others": others}


def _short(placement: Placement) -> str:
    """A placement in few letters: of irregular pieces, that there are some."""
    said = str(placement)
    return said if len(said) <= 32 else f"{said.partition(',')[0]}, in pieces)"


def _row(name: str, p: torch.Tensor) -> list[object]:
    places, mesh = "", ""
    if isinstance(p, Wrapper):
        places, mesh = ", ".join(map(_short, p._layout.placements)), repr(p._layout.mesh)
    return [name, list(p.shape), str(p.dtype).removeprefix("torch."), places, mesh, bytes_here(p)]


def record(path: str | os.PathLike[str], *, keep: int = 65_536, limit: float = 20.0, ops: bool = True) -> Record:
    """Record what each rank does and communicates inside of the block, in files that survive a crash.

    Every collective, every forward of a module and every op on a distributed tensor is recorded, with its line,
    layouts, time, bytes and memory. The newest `keep` events are kept: about 8 MiB per rank, however long the run is.
    The files are complete even after a ``kill -9``. Of the backward pass, only the communication is recorded: its other
    ops are torch's own, on local tensors. ``shardwise report FOLDER`` makes a page of the record, and ``shardwise blame
    FOLDER`` says which rank hung, died or did something else. If a collective takes longer than `limit` seconds, the
    latter is printed at once.

    Args:
        path: A folder that all ranks can write to; each writes files of its own.
        keep: How many events are kept for each rank, of collectives and modules and again of ops; older ones are
            overwritten.
        limit: After this many seconds in a collective, what `shardwise blame` says is printed on stderr.
        ops: Whether ops that do not communicate are kept too.

    Returns:
        A context manager.

    Example:
        >>> import shardwise, tempfile
        >>> x = shardwise.ones(8, device_mesh=shardwise.simulate(4), placements=[shardwise.Shard(0)])
        >>> folder = tempfile.TemporaryDirectory()
        >>> with record(folder.name):
        ...     y = x.redistribute(placements=[shardwise.Replicate()])
        >>> [event.kind for event in shardwise.reports.read_run(folder.name).ranks[0].events]
        ['all_gather']
    """
    return Record(path, keep, limit, ops)
