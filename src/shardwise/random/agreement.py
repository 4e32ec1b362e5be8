"""Ranks that are processes have a generator each. What they draw must be the same: here they compare it.

Every rank keeps, for each mesh, a digest of all it has drawn there, and the ranks compare their digests: at once after
draws 1, 2, 4 and 8; later after 16, 32, 64 and every 64th, where the answer is awaited only when the next comparison
begins. So a random op costs next to nothing, and ranks that drift apart are named soon. An optimizer compares what is
left before its step. All ranks compare at the same places of the program, so all of them raise.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist

from shardwise.comm.calls import draws
from shardwise.comm.guard import Guard
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
    """What this rank has drawn on one mesh, and how far the others are known to have drawn the same. It does not keep
    the mesh alive."""

    def __init__(self, mesh: Mesh) -> None:
        assert isinstance(mesh.comm, ProcessGroupComm)
        self._name, self._device, self.axis_names = repr(mesh), mesh.device, mesh.axis_names
        self._ranks = tuple(mesh.ranks)
        crossed = [axis for axis, k in enumerate(mesh.shape) if k > 1]
        self._groups = {axis: mesh.comm.group(axis) for axis in crossed}
        self._alongs = {axis: mesh.comm.along((axis,)) for axis in crossed}
        if all("cpu:" in dist.get_backend_config(group) for group in self._groups.values()):
            self._device = torch.device("cpu")  # nobody has to wait for a GPU
        self._forget()

    def _forget(self) -> None:
        self._count = self._digest = 0
        self._begun = 0  # the number of draws that were compared, or are being compared
        self._due = 1  # the number of draws after which the ranks compare next
        self._under_way: tuple[tuple[Guard, dist.Work], torch.Tensor] | None = None

    def add(self, drawn: int) -> None:
        """Take note of a draw: of its key, or of anything that tells it from others."""
        self._count += 1
        self._digest = hash((self._digest, drawn))
        draws[self._ranks] = self._count, self._digest
        if self._count >= self._due:
            self._due = self._count + min(self._count, _EVERY)
            self._compare(later=self._count > _AT_ONCE)

    def before_step(self) -> None:
        """Compare what was not compared yet; where that would mean to wait for a GPU, by the next step."""
        if self._count > self._begun or self._under_way is not None:
            self._compare(later=self._device.type != "cpu")

    def _compare(self, later: bool = False) -> None:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # a graph can neither wait nor take numbers from the host
        with without_fake_mode():
            self._finish()
            self._begin()
            if not later:
                self._finish()

    def _begin(self) -> None:
        """Have the ranks along the first axis find the largest and the smallest digest."""
        self._begun = self._count
        if self._groups:
            both = torch.tensor([self._digest, ~self._digest], dtype=torch.int64, device=self._device)
            self._under_way = self._reduce(both, next(iter(self._groups))), both

    def _finish(self) -> None:
        """Wait for the answer, pass it along the other axes, and raise on every rank if two of them differ."""
        if self._under_way is None:
            return
        (begun, both), self._under_way = self._under_way, None
        self._wait(*begun)
        for axis in [*self._groups][1:]:
            self._wait(*self._reduce(both, axis))
        most, least = both.tolist()
        if most != ~least:
            count, others = self._begun, ranks_that_differ(f"{self._begun} {self._digest}", self._ranks)
            self._forget()
            raise CommError(
                f"the ranks of {self._name} draw different random numbers{others}: their generators are in different "
                f"states, seen after {count} draws (seed of torch's generator here: {torch.initial_seed()}). Seed all "
                f"ranks alike with shardwise.manual_seed(seed), and draw what differs between ranks with a generator "
                f"of its own or inside shardwise.random.fork()"
            )

    def _reduce(self, both: torch.Tensor, axis: int) -> tuple[Guard, dist.Work]:
        group = self._groups[axis]
        k = dist.get_world_size(group)
        record(self, "all_reduce", axis, 2 * (k - 1) * both.nbytes // k, _NOTE)
        where = f"mesh axis {self.axis_names[axis]!r} ({k} ranks)"
        guard = Guard(self._alongs[axis], "all_reduce", where, "", _NOTE)
        with guard:
            guard.meet()
            work = dist.all_reduce(both, dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        return guard, work

    @staticmethod
    def _wait(guard: Guard, work: dist.Work) -> None:
        with guard:
            work.wait()


_agreements: weakref.WeakKeyDictionary[Mesh, Agreement] = weakref.WeakKeyDictionary()


def note_draw(mesh: Mesh, drawn: int) -> None:
    """Take note of a draw on a mesh of processes."""
    found = _agreements.get(mesh)
    if found is None:
        found = _agreements[mesh] = Agreement(mesh)
    found.add(drawn)


def compare_before_step(meshes: Iterable[Mesh]) -> None:
    """Compare what was drawn on these meshes since the last comparison. Their ranks call it together."""
    for mesh in meshes:
        found = _agreements.get(mesh)
        if found is not None:
            found.before_step()


def anything_drawn() -> bool:
    """Whether anything was drawn on a mesh of processes at all."""
    return len(_agreements) > 0
