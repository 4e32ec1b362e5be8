"""A program as it is, played: the steps of its training loop are found where its optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwise.comm.record import Entry
from shardwise.comm.record import Recorder as Listener
from shardwise.errors import OutlineError
from shardwise.forecast.checkpoints import played_checkpoints
from shardwise.forecast.devices import played_device
from shardwise.forecast.hardware import Hardware
from shardwise.forecast.kinds import coordinates_of_kinds
from shardwise.forecast.memory import Memory
from shardwise.forecast.recorder import Recorder
from shardwise.forecast.report import Report
from shardwise.forecast.timing import play
from shardwise.forecast.world import PlayedWorld
from shardwise.mesh import OutlinedMesh

Told = Callable[[int, int], None]  # told(steps that are done, ops so far)


class Enough(BaseException):
    """Ends a program of which enough steps were played. No Exception, so that no handler of the program takes it."""


class _Mark(NamedTuple):
    """How much was recorded when a step ended."""

    events: int
    entries: int


class _Steps:
    """Cuts what a program does into steps. One ends whenever the first optimizer that stepped has stepped again; what
    comes before the first call of a module is no part of any."""

    def __init__(self, recorder: Recorder, most: int, told: Told | None) -> None:
        self.recorder, self.most, self.told = recorder, most, told
        self.entries: list[Entry] = []
        self.marks: list[_Mark] = []
        self.begun: _Mark | None = None
        self.kinds: Callable[[], list[int]] = list  # gives a rank of each kind, while the program's layouts live
        self.ranks: list[int] = []
        self._optimizer: torch.optim.Optimizer | None = None

    def called(self, module: nn.Module, inputs: object) -> None:
        """A module is called: from the first call on, memory and time count."""
        if self.begun is None:
            self.recorder.begin_here()
            self.entries.clear()
            self.begun = _Mark(0, 0)

    def stepped(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self._optimizer is None and self._has_differentiated():
            self._optimizer = optimizer
        if optimizer is not self._optimizer or not self._has_differentiated():
            return  # as where a state dict is asked of an optimizer that has no state yet
        self.recorder.take_stock()
        self.marks.append(_Mark(len(self.recorder.events), len(self.entries)))
        if self.told is not None:
            self.told(len(self.marks), self.recorder.moment)
        self.ranks = self.kinds()
        if len(self.marks) >= self.most:
            raise Enough

    def _has_differentiated(self) -> bool:
        """Whether there was a backward pass since the last step."""
        first = self.marks[-1].events if self.marks else 0
        played = self.recorder.events
        return any(getattr(played[i], "phase", "") == "backward" for i in range(len(played) - 1, first - 1, -1))

    def last(self) -> tuple[_Mark, _Mark]:
        """Where the last whole step begins and ends; all that was recorded where there is none."""
        ends = [self.begun or _Mark(0, 0), *self.marks]
        return (ends[-2], ends[-1]) if self.marks else (ends[0], _Mark(len(self.recorder.events), len(self.entries)))


def estimate_program(
    program: Callable[[], Any],
    mesh: OutlinedMesh,
    *,
    hardware: str | Path | Hardware = "h100-sxm",
    steps: int = 2,
    tokens: int | None = None,
    say: Callable[[str], None] = print,
    told: Told | None = None,
) -> tuple[Report, list[int]]:
    """Play a program that makes its process groups and meshes itself, until its optimizer has stepped `steps` times.

    Args:
        program: Runs it.
        mesh: How many ranks there are, and which one is played.
        hardware: As for `estimate`.
        steps: How many steps are played. The last one counts; the peak of memory is that of all of them.
        tokens: How many tokens all ranks together process in a step.
        say: Is told where the program asked for something else than it gets.
        told: Is told of progress: how many steps are done, and how many ops.

    Returns:
        The report, and the number of a rank of each kind.
    """
    hardware = Hardware.load(hardware)
    recorder, world = Recorder(mesh.mode), PlayedWorld(mesh, say)
    found = _Steps(recorder, steps, told)
    found.kinds = lambda: _kinds(mesh, world)
    if told is not None:
        recorder.told = lambda ops: told(len(found.marks), ops)
    listener = Listener(found.entries.append)
    with ExitStack() as stack:
        stack.enter_context(mesh)
        stack.enter_context(world.active())
        stack.enter_context(played_checkpoints(say))
        rank = mesh.get_rank()
        stack.enter_context(
            played_device(mesh.device_type, rank % world.local, world.local, hardware, recorder.tracker)
        )
        stack.enter_context(recorder.recording())
        stack.callback(register_module_forward_pre_hook(found.called).remove)
        stack.callback(register_optimizer_step_post_hook(found.stepped).remove)
        listener.open()
        stack.callback(listener.close)
        try:
            program()
        except Enough:
            pass
        except SystemExit as ended:
            if ended.code:
                raise
    if not recorder.events:
        raise OutlineError(
            "estimate: the program came to its end without an op on its mesh, so there is nothing to estimate; does it "
            "train when it is run as `python SCRIPT`, with these arguments (--args)?"
        )
    first, end = found.last()
    time = play(recorder.events[first.events : end.events], hardware)
    made = next(iter(world.meshes.values()), mesh)
    memory, entries = Memory(recorder.tracker.changes, len(found.marks) > 1), found.entries[first.entries : end.entries]
    return Report(made, hardware, memory, entries, time, tokens), found.ranks


def _kinds(mesh: OutlinedMesh, world: PlayedWorld) -> list[int]:
    """A rank of each kind, by the layouts on the first mesh that the program made."""
    made = next(iter(world.meshes.values()), mesh)
    return [made.playing(coords).get_rank() for coords in coordinates_of_kinds(made)]
