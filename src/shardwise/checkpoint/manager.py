"""`Manager`: a folder of checkpoints by step: how often, how many are kept, which is the best, and how to resume."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import torch.distributed as dist

from shardwise.checkpoint.api import AnyPath, check_arguments, load, save_then
from shardwise.checkpoint.background import SaveHandle, check_earlier, under_way, wait_for_all
from shardwise.checkpoint.commit import clean, recover_all
from shardwise.checkpoint.files import sync_folder, write_synced
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.checkpoint.plan import MEMORY
from shardwise.checkpoint.read import Loaded
from shardwise.checkpoint.tree import Value
from shardwise.checkpoint.world import World
from shardwise.comm.peers import ranks_that_differ
from shardwise.errors import CheckpointError, check_type

_NAME = re.compile(r"step-(\d+)")
_SCORES = "scores.json"
Scores: TypeAlias = dict[int, float]


class Manager:
    """Saves to `root/step-00000100` and the like, and keeps the newest.

    Every process makes one with the same arguments and calls it alike.

    Args:
        root: The folder of the checkpoints; it is made.
        keep: How many of the newest are kept; None keeps all.
        every: `save` does something only at steps that this divides; None: at every call.
        best: "min" or "max": the checkpoint with the lowest or highest `metric` is kept beside the newest.
        async_: Whether saves go on beside the program.
        sigterm: Whether SIGTERM has the next call of `save` write a checkpoint whatever the step, and set `stopping`.
        process_group: The processes that save together; by default all.

    Example:
        manager = Manager("run", keep=3, every=100)
        start = manager.restore(state, default=0)
        for step in range(start + 1, 1001):
            train()
            manager.save(step, state)
    """

    def __init__(
        self,
        root: AnyPath,
        keep: int | None = 3,
        *,
        every: int | None = None,
        best: str | None = None,
        async_: bool = False,
        sigterm: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        for name, value in (("keep", keep), ("every", every)):
            if value is not None:
                check_type(value, int, f"Manager: {name}")
                if value < 1:
                    raise ValueError(f"Manager: {name} = {value}; give a number >= 1, or None")
        for name, flag in (("async_", async_), ("sigterm", sigterm)):
            check_type(flag, bool, f"Manager: {name}", "give True or False")
        if best not in (None, "min", "max"):
            raise ValueError(f"Manager: best = {best!r}; give 'min', 'max' or None")
        self.root, self.keep, self.every, self.best, self.async_ = Path(root), keep, every, best, async_
        self.group = process_group
        self.stopping = False  # a SIGTERM came
        self._stop_saved = False
        self._cleaned = False  # of what was left by a program that was killed
        self._lock = threading.Lock()  # of the metrics, which the thread of asynchronous saves changes too
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        World.of(process_group).from_first(self._make_root)
        if sigterm:
            self._listen()

    def _make_root(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"Manager: root = {str(self.root)!r} cannot be made: {error.strerror}") from error
        recover_all(self.root)  # and no more: who only reads must not take its draft from a program that saves

    # -- saving -----------------------------------------------------------------------------------------------
    def save(
        self, step: int, state: Value, *, metric: float | None = None, force: bool = False
    ) -> SaveHandle | Path | None:
        """Save a state, if this step is due.

        Args:
            step: The number of the step.
            state: As of `checkpoint.save`.
            metric: What `best` looks at. Where processes give different ones, that of the first one counts.
            force: Save whatever `every` says.

        Returns:
            The folder, a handle with `wait()` where saves are asynchronous, or None where nothing was due.

        Raises:
            CheckpointError: The save failed, or an earlier asynchronous one did.
        """
        check_type(step, int, "Manager.save: step")
        check_type(force, bool, "Manager.save: force", "give True or False")
        if step < 0:
            raise ValueError(f"Manager.save: step = {step}; give a number >= 0")
        world = World.of(self.group)
        stop, due = self._asked(world, step, force)
        self.stopping = self.stopping or stop
        if not due:
            check_earlier(world)
            return None
        self._stop_saved = stop
        if not self._cleaned and world.is_first:
            clean(self.root, under_way())
        self._cleaned = True
        path, then = self.path(step), partial(self._retain, step)
        if self.best is not None:
            self._note_first(world, step, metric)
        handle = save_then(path, state, then, step, async_=self.async_ and not stop, process_group=self.group)
        return path if handle is None else handle

    def _asked(self, world: World, step: int, force: bool) -> tuple[bool, bool]:
        """Whether some process is told to stop, which stops all, and whether this step is due. One small message."""
        lowest, stays, highest, asked = world.lowest([step, int(not self.stopping), -step, int(not force)])
        if lowest != -highest:
            raise CheckpointError(
                f"Manager.save: the ranks differ: steps {lowest} to {-highest}"
                f"{ranks_that_differ(str(step), world.ranks)}; give all the same"
            )
        stop = not stays
        due = not asked or self.every is None or step % self.every == 0 or (stop and not self._stop_saved)
        return stop, due

    def _note_first(self, world: World, step: int, metric: float | None) -> None:
        """Write the metric down; that of the first process that has one."""
        number, error = None, None
        try:
            number = None if metric is None else float(metric)
        except Exception as raised:  # told to the others, so that they do not wait
            error = TypeError(f"Manager.save: metric = {metric!r} is no number: {raised}")
        told = world.gather((number, error))
        world.raise_first([theirs for _, theirs in told], error)
        given = [m for m, _ in told if m is not None]
        if given:
            world.from_first(lambda: self._note(step, given[0]))

    def wait(self) -> None:
        """Wait for asynchronous saves that are under way. Every process calls it; all raise if one has failed."""
        wait_for_all(World.of(self.group))

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or would be.

        Args:
            step: The number of the step.
        """
        return self.root / f"step-{step:08}"

    # -- what is there ----------------------------------------------------------------------------------------
    def steps(self) -> list[int]:
        """Return the steps that there are checkpoints of, in order."""
        found = []
        for folder in self.root.iterdir():
            match = _NAME.fullmatch(folder.name)
            if match and (folder / MANIFEST).exists():
                found.append(int(match[1]))
        return sorted(found)

    def latest(self) -> Path | None:
        """Return where the newest checkpoint is; None where there is none."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def best_path(self) -> Path | None:
        """Return where the checkpoint with the best metric is; None where there is none."""
        best = self._best(self.steps())
        return None if best is None else self.path(best)

    def restore(
        self,
        into: Value,
        *,
        step: int | None = None,
        default: int | None = None,
        strict: bool = True,
        verify: str = "fast",
        random: bool = True,
        memory: int = MEMORY,
    ) -> int | None:
        """Load the newest checkpoint (or that of `step`), random stream included.

        Args:
            into: As of `checkpoint.load`.
            step: Which one; by default the newest.
            default: What to return where there is none.
            strict: As of `checkpoint.load`, like `verify` and `memory`.
            random: Whether random numbers go on from where they were.

        Returns:
            The step of the checkpoint, or `default`.
        """
        check_arguments(verify=verify, memory=memory, strict=strict, random=random)
        if step is not None:
            check_type(step, int, "Manager.restore: step")
        world = World.of(self.group)
        wait_for_all(world)
        path = world.from_first(lambda: self.latest() if step is None else self.path(step))
        if path is None:
            return default
        done: Loaded = load(
            path, into, strict=strict, verify=verify, random=random, memory=memory, process_group=self.group
        )
        return done.step

    # -- retention --------------------------------------------------------------------------------------------
    def _retain(self, newest: int) -> None:
        """Remove what is no longer kept: never the one that was just saved."""
        steps = self.steps()
        kept = {newest, self._best(steps), *(steps if self.keep is None else steps[-self.keep :])}
        removed = [step for step in steps if step not in kept]
        for step in removed:
            gone = self.root / f".{self.path(step).name}.saving"  # removed by the next save if this does not end
            os.rename(self.path(step), gone)
            sync_folder(self.root)
            shutil.rmtree(gone, ignore_errors=True)
        self._forget(removed)

    def _scores(self) -> Scores:
        """The metrics that were written down. None of them is guessed: without its metric the best would be removed."""
        path = self.root / _SCORES
        try:
            return {int(step): float(score) for step, score in json.loads(path.read_text()).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{path}: the metrics cannot be read: {error}; remove the file to go on without them"
            ) from error

    def _note(self, step: int, metric: float) -> None:
        """Write a metric down, before its checkpoint is there."""
        with self._lock:
            self._write_scores(self._scores() | {step: metric})

    def _forget(self, steps: list[int]) -> None:
        """Drop the metrics of checkpoints that were removed; those of saves under way stay."""
        with self._lock:
            scores = {} if self.best is None else self._scores()
            if scores.keys() & set(steps):
                self._write_scores({step: score for step, score in scores.items() if step not in steps})

    def _write_scores(self, scores: Scores) -> None:
        draft = self.root / f".{_SCORES}"
        write_synced(draft, json.dumps(scores))
        os.replace(draft, self.root / _SCORES)

    def _best(self, steps: list[int]) -> int | None:
        scores = {} if self.best is None else self._scores()
        known = {step: scores[step] for step in steps if scores.get(step, float("nan")) == scores.get(step)}
        if not known:
            return None
        return (min if self.best == "min" else max)(known, key=known.__getitem__)

    # -- signals ----------------------------------------------------------------------------------------------
    def _listen(self) -> None:
        try:
            self._before = signal.signal(signal.SIGTERM, self._told_to_stop)
        except ValueError:  # not the main thread: the program's own handler stays
            self._before = None

    def _told_to_stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True
        if callable(self._before):
            self._before(number, frame)
