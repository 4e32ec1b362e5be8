"""Ranks that are processes have a generator each. What they draw must be the same: here they compare it.

Every rank keeps, for each mesh, a digest of all it has drawn there, and the ranks compare their digests: at once after
draws 1, 2, 4 and 8; later after 16, 32, 64 and every 64th, where the answer is awaited only when the next comparison
begins. So a random op costs next to nothing, and ranks that drift apart are named soon. An optimizer compares what is
left before its step. All ranks compare at the same places of the program, so all of them raise. On gloo the digest is
also part of the number by which ranks tell collectives apart, so that ranks that drew different numbers cannot
exchange any.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.calls import SEED_ALIKE, Clock, Drawn
from shardwise.comm.guard import Guard
from shardwise.comm.messages import clock_of
from shardwise.comm.peers import ranks_that_differ
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.comm.record import Note, record
from shardwise.errors import CommError
from shardwise.mesh import Mesh
from shardwise.torch_private.tensors import without_fake_mode

_AT_ONCE = 8  # up to so many draws, a comparison is over before anyone sees the numbers
_EVERY = 64  # the most draws between two comparisons
_NOTE = Note("random", "do the ranks draw alike?")


class Agreement:
    """What this rank has drawn on one mesh, and how far the others are known to have drawn the same. It keeps neither
    the mesh nor its groups alive.

    Attributes:
        ranks: Those of the mesh.
        drawn: How many random ops there were, and a digest of what they drew.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.ranks = tuple(mesh.ranks)
        some = (axes for n in range(len(mesh.shape)) for axes in itertools.combinations(_crossed(mesh), n + 1))
        self._clocks = [_clock(mesh, axes) for axes in some]
        self._begin_anew()

    def forget(self) -> None:
        """Begin anew, as if nothing had been drawn."""
        self._begin_anew()
        for clock in self._clocks:
            clock.drawn = Drawn()

    def _begin_anew(self) -> None:
        self.drawn = Drawn()
        self._begun = 0  # the number of draws that were compared, or are being compared
        self._due = 1  # the number of draws after which the ranks compare next
        self._under_way: tuple[tuple[Guard, dist.Work], torch.Tensor] | None = None

    def add(self, drawn: int, mesh: Mesh) -> None:
        """Take note of a draw: of its key, or of anything that tells it from others."""
        self.drawn = self.drawn.after(drawn)
        for clock in self._clocks:
            clock.drawn = clock.drawn.after(drawn)
        count = self.drawn.ops
        if count >= self._due:
            self._due = count + min(count, _EVERY)
            self._compare(mesh, later=count > _AT_ONCE)

    def before_step(self, mesh: Mesh) -> None:
        """Compare what was not compared yet; where that would mean to wait for a GPU, by the next step."""
        if self.drawn.ops > self._begun or self._under_way is not None:
            self._compare(mesh, later=_device(mesh).type != "cpu")

    def _compare(self, mesh: Mesh, later: bool = False) -> None:
        if _device(mesh).type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # a graph can neither wait nor take numbers from the host
        with without_fake_mode():
            self._finish(mesh)
            self._begin(mesh)
            if not later:
                self._finish(mesh)

    def _begin(self, mesh: Mesh) -> None:
        """Have the ranks along the first axis find the largest and the smallest digest."""
        count, digest = self.drawn
        self._begun = count
        both = torch.tensor([digest, ~digest], dtype=torch.int64, device=_device(mesh))
        self._under_way = self._reduce(both, mesh, _crossed(mesh)[0]), both

    def _finish(self, mesh: Mesh) -> None:
        """Wait for the answer, pass it along the other axes, and raise on every rank if two of them differ."""
        if self._under_way is None:
            return
        (begun, both), self._under_way = self._under_way, None
        self._wait(*begun)
        for axis in _crossed(mesh)[1:]:
            self._wait(*self._reduce(both, mesh, axis))
        most, least = both.tolist()
        if most != ~least:
            count, others = self._begun, ranks_that_differ(f"{self._begun} {self.drawn.digest}", self.ranks)
            self.forget()
            raise CommError(
                f"the ranks of {mesh!r} draw different random numbers{others}: their generators are in different "
                f"states, seen after {count} draws (seed of torch's generator here: {torch.initial_seed()}). "
                f"{SEED_ALIKE}"
            )

    def _reduce(self, both: torch.Tensor, mesh: Mesh, axis: int) -> tuple[Guard, dist.Work]:
        along = _comm(mesh).along((axis,))
        k = len(along.ranks)
        record(_comm(mesh), "all_reduce", axis, 2 * (k - 1) * both.nbytes // k, _NOTE)
        where = f"mesh axis {mesh.axis_names[axis]!r} ({k} ranks)"
        guard = Guard(along, "all_reduce", where, "", _NOTE, compares_draws=True)
        with guard:
            guard.meet()
            work = dist.all_reduce(both, dist.ReduceOp.MAX, group=along.group, async_op=True)
        assert work is not None
        return guard, work

    @staticmethod
    def _wait(guard: Guard, work: dist.Work) -> None:
        with guard:
            work.wait()


def _comm(mesh: Mesh) -> ProcessGroupComm:
    assert isinstance(mesh.comm, ProcessGroupComm)
    return mesh.comm


def _crossed(mesh: Mesh) -> list[int]:
    return [axis for axis, k in enumerate(mesh.shape) if k > 1]


def _clock(mesh: Mesh, axes: Sequence[int]) -> Clock:
    along = _comm(mesh).along(axes)
    return along.clock or clock_of(along.group, along.ranks)


def _device(mesh: Mesh) -> torch.device:
    """Where the digests are compared: on a CPU if the groups can, so that nobody has to wait for a GPU."""
    groups = [_comm(mesh).group(axis) for axis in _crossed(mesh)]
    on_cpu = all("cpu:" in dist.get_backend_config(group) for group in groups)
    return torch.device("cpu") if on_cpu else mesh.device


_any_draw = [False]


def note_draw(mesh: Mesh, drawn: int) -> None:
    """Take note of a draw on a mesh of processes."""
    _any_draw[0] = True
    key, meshes = _key(mesh)
    found = meshes.get(key)
    if found is None:
        found = meshes[key] = Agreement(mesh)
    found.add(drawn, mesh)


def compare_before_step(meshes: Iterable[Mesh]) -> None:
    """Compare what was drawn on these meshes since the last comparison. Their ranks call it together."""
    for mesh in meshes:
        if isinstance(mesh.comm, ProcessGroupComm) and not mesh.comm.outside and _crossed(mesh):
            key, known = _key(mesh)
            if key in known:
                known[key].before_step(mesh)


def anything_drawn() -> bool:
    """Whether anything was drawn on a mesh of processes at all."""
    return _any_draw[0]


def _key(mesh: Mesh) -> tuple[tuple[Clock | str, ...], dict[tuple[Clock | str, ...], Any]]:
    """What this mesh is known by, and among which others."""
    clocks = [_clock(mesh, (axis,)) for axis in _crossed(mesh)]
    return (*mesh.axis_names, *clocks), clocks[0].meshes
