"""The faults: programs of a few ranks, one of which (the *faulty* one) does something else than the others.

Every program checks its values against plain torch, so a rank that goes on after a fault goes on right or says so.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from os import _exit as exit_at_once
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import shardwise
from shardwise import CommError, DTensor, Placement, Replicate, Shard, debug, distribute_tensor, init_device_mesh
from shardwise.parallel import ColwiseParallel, RowwiseParallel, data_parallel, parallelize_module

TIMEOUT_SECONDS = 12.0  # of the groups


class WrongValueError(AssertionError):
    """A rank got another value than plain torch."""


class Injected(ValueError):
    """The error that a faulty rank raises."""


@dataclass
class Scene:
    """One rank of one fault."""

    rank: int
    size: int
    faulty_rank: int
    folder: Path
    seed: int
    port: int  # of the store
    _worlds: Iterator[int] = field(default_factory=count)

    @property
    def faulty(self) -> bool:
        return self.rank == self.faulty_rank

    def join(self) -> None:
        """Make a world of the ranks; a new one each time."""
        everyones = dist.TCPStore("127.0.0.1", self.port, timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS))
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"{self.folder.name}/{next(self._worlds)}", everyones),
            rank=self.rank,
            world_size=self.size,
            timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS),
        )
        dist.barrier()  # no fault before all are there

    def mesh(self) -> dist.device_mesh.DeviceMesh:
        return init_device_mesh("cpu", (self.size,), mesh_dim_names=("dp",))

    def tensor(self, rows: int = 8, columns: int = 4, number: int = 0) -> torch.Tensor:
        """A tensor that all ranks know."""
        generator = torch.Generator().manual_seed(self.seed * 100 + number)
        return torch.randn(rows, columns, generator=generator)

    def check(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise if a value is not plain torch's."""
        value = found.full_tensor() if isinstance(found, DTensor) else found
        if value.shape != expected.shape or not torch.allclose(value, expected.to(value.dtype), atol=1e-5):
            raise WrongValueError(f"rank {self.rank} has {value.tolist()} instead of {expected.tolist()}")


# -- what happens to a rank --------------------------------------------------------------------------------
def raises() -> NoReturn:
    raise Injected("injected")


def exits() -> NoReturn:
    exit_at_once(3)


def quits() -> NoReturn:
    sys.exit(3)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def has_no_memory() -> NoReturn:
    raise torch.OutOfMemoryError("injected: tried to allocate 1.00 TiB")


Happens = Callable[[], None]
HAPPENS: dict[str, Happens] = {
    "raises": raises, "exits": exits, "quits": quits, "is killed": is_killed, "is stopped": is_stopped,
    "has no memory": has_no_memory,
}  # fmt: skip


# -- where it happens --------------------------------------------------------------------------------------
def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 4))


def in_forward(scene: Scene, happens: Happens) -> None:
    """A module whose layers are cut over the ranks, with a hook in its forward."""
    _train_cut(scene, lambda model: model[2].register_forward_pre_hook(lambda *_: happens()))


def in_backward(scene: Scene, happens: Happens) -> None:
    """The same with a hook in its backward."""
    _train_cut(
        scene,
        lambda model: model[1].register_forward_hook(
            lambda module, given, out: out.register_hook(lambda grad: happens()) and None
        ),
    )


def _train_cut(scene: Scene, spoil: Callable[[nn.Sequential], object]) -> None:
    scene.join()
    mesh, model, plain, whole = scene.mesh(), _net(), _net(), scene.tensor()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    at = scene.seed % 3
    for step in range(3):
        if scene.faulty and step == at:
            spoil(model)
        x = distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None)
        _step(scene, model, x, plain, whole)


def _step(scene: Scene, model: nn.Module, x: torch.Tensor, plain: nn.Module, whole: torch.Tensor) -> None:
    for one, given in ((model, x), (plain, whole)):
        loss = (one(given) - 1).square().mean()
        loss.backward()
        if one is model:
            found = loss
    scene.check(found, loss)
    for one in (model, plain):
        with torch.no_grad():
            for param in one.parameters():
                assert param.grad is not None
                param.sub_(param.grad, alpha=0.1)
                param.grad = None


def in_zero_step(scene: Scene, happens: Happens) -> None:
    """Training with all state cut over the ranks (ZeRO 3), each on its part of the batch."""
    scene.join()
    mesh, model, plain, whole = scene.mesh(), _net(), _net(), scene.tensor()
    shard = ("optimizer", "gradients", "parameters")[scene.seed % 3]
    data_parallel(model, mesh, shard=shard, units=[model[0], model[2]] if shard == "parameters" else None)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    if scene.faulty:
        if scene.seed % 2:
            model[2].register_forward_pre_hook(lambda *_: happens())
        else:
            model[0].register_full_backward_pre_hook(lambda *_: happens())
    for _ in range(2):
        x = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        losses = [(one(given) - 1).square().mean() for one, given in ((model, x), (plain, whole))]
        scene.check(losses[0], losses[1])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def in_async_move(scene: Scene, happens: Happens) -> None:
    """Two moves under way at once; it happens before the first, between them, or before the wait."""
    scene.join()
    mesh, whole, other = scene.mesh(), scene.tensor(), scene.tensor(number=1)
    x, y = (distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in (whole, other))
    if scene.faulty and scene.seed % 3 == 0:
        happens()
    a = x.redistribute(placements=[Replicate()], async_op=True)
    if scene.faulty and scene.seed % 3 == 1:
        happens()
    b = y.redistribute(placements=[Shard(1)], async_op=True)
    if scene.faulty and scene.seed % 3 == 2:
        happens()
    scene.check(a, whole)
    scene.check(b.redistribute(placements=[Shard(0)]), other)


class _Writer(dcp.FileSystemWriter):
    """Writes a checkpoint, and something happens meanwhile."""

    happens: Happens | None = None

    def write_data(self, plan, planner):  # type: ignore[no-untyped-def]
        if self.happens is not None:
            self.happens()
        return super().write_data(plan, planner)


def in_save(scene: Scene, happens: Happens) -> None:
    """A checkpoint that is being written. What is there afterwards must not load as if it were whole."""
    scene.join()
    mesh, whole, folder = scene.mesh(), scene.tensor(), scene.folder / "checkpoint"
    x = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    writer = _Writer(folder)
    writer.happens = happens if scene.faulty else None
    try:
        dcp.save({"x": x}, storage_writer=writer)
    finally:
        if (folder / ".metadata").exists():
            raise WrongValueError("a checkpoint that failed looks like a whole one")


PLACES = {
    "forward": in_forward, "backward": in_backward, "a ZeRO step": in_zero_step, "an async move": in_async_move,
    "a checkpoint save": in_save,
}  # fmt: skip


# -- ranks that run different programs ---------------------------------------------------------------------
def _differ(scene: Scene, checked: bool, usual: Callable[..., object], other: Callable[..., object]) -> None:
    """Some steps; at one of them the faulty rank does the other thing."""
    scene.join()
    mesh, whole = scene.mesh(), scene.tensor(12, 6)
    x = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    with debug.check_ranks() if checked else nullcontext():
        for step in range(3):
            scene.check(x.redistribute(placements=[Replicate()]), whole)
            (other if scene.faulty and step == scene.seed % 3 else usual)(x)
            scene.check(x.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()]), whole)


def _gather(x: torch.Tensor) -> DTensor:
    return _move(x, Replicate())


def _move(x: torch.Tensor, to: Placement) -> DTensor:
    assert isinstance(x, DTensor)
    return x.redistribute(placements=[to])


def _backward(x: DTensor, swapped: bool = False) -> None:
    weights = [distribute_tensor(torch.ones(6, n), x.device_mesh, [Replicate()], src_data_rank=None) for n in (2, 3)]
    losses = [(x @ weight.requires_grad_()).square().sum() for weight in weights]  # the gradients are summed
    for loss in reversed(losses) if swapped else losses:
        loss.backward()


def _two_moves(x: DTensor) -> None:
    _gather(x)
    _gather(x.double())


def _two_moves_swapped(x: DTensor) -> None:
    _gather(x.double())
    _gather(x)


def _leave_early(x: DTensor) -> NoReturn:
    raise _Ahead


class _Ahead(Exception):
    """A rank goes to the end of its program."""


THE_END = "the end of the program"
DIFFERENCES: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "another op": (lambda x: torch.cumsum(x, 0), lambda x: torch.softmax(x, 0)),
    "a branch on data": (lambda x: None, lambda x: x.sum().item()),
    "another shape": (_gather, lambda x: _gather(x[:, :5])),
    "another dtype": (_gather, lambda x: _gather(x.double())),
    "another layout": (_gather, lambda x: x.redistribute(placements=[Shard(1)])),
    "another reduction": (lambda x: _gather(x.sum(0)), lambda x: _gather(x.amax(0))),
    "another size of a reduction": (lambda x: _gather(x.sum(0)), lambda x: _gather(x[:, 1:].sum(0))),
    "two moves swapped": (_two_moves, _two_moves_swapped),
    "a move left out": (_gather, lambda x: None),
    "backward passes swapped": (_backward, partial(_backward, swapped=True)),
    "a random op left out": (lambda x: _gather(torch.rand_like(x)), _gather),
    THE_END: (_gather, _leave_early),
}


def differs(scene: Scene, what: str, checked: bool = False) -> None:
    """A rank whose program differs from the others'."""
    with suppress(_Ahead):
        _differ(scene, checked, *DIFFERENCES[what])


def other_axis(scene: Scene) -> None:
    """A rank that communicates along another axis."""
    scene.join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = scene.tensor()
    x = distribute_tensor(whole, mesh, [Shard(0), Replicate()], src_data_rank=None)
    y = distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)
    for step in range(3):
        scene.check(y if scene.faulty and step == 1 else x, whole)
        scene.check(x, whole)
        scene.check(y, whole)


def other_seed(scene: Scene) -> None:
    """A rank whose random numbers are others."""
    scene.join()
    shardwise.manual_seed(7 if scene.faulty else 5)
    x = distribute_tensor(scene.tensor(), scene.mesh(), [Shard(0)], src_data_rank=None)
    _gather(nn.functional.dropout(x, 0.5))


def waits_in_other_order(scene: Scene) -> None:
    """Asynchronous moves that ranks wait for in different orders."""
    scene.join()
    mesh, wholes = scene.mesh(), [scene.tensor(number=i) for i in range(3)]
    moves = [
        distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None).redistribute(placements=[Replicate()], async_op=True)
        for t in wholes
    ]
    pairs = list(zip(moves, wholes, strict=True))
    for move, whole in reversed(pairs) if scene.faulty else pairs:
        scene.check(move.wait().to_local(), whole)


# -- errors that only one rank can see ---------------------------------------------------------------------
def index_out_of_range(scene: Scene) -> None:
    """A rank with an index that a table has not, in the middle of a program."""
    scene.join()
    mesh, whole = scene.mesh(), scene.tensor()
    x = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    for _ in range(2):
        scene.check(x, whole)
    local = distribute_tensor(torch.full((4,), 9 if scene.faulty else 1), mesh, [Replicate()], src_data_rank=None)
    rows = nn.functional.embedding(local, x.redistribute(placements=[Shard(1)]))
    scene.check(rows, whole[1:2].expand(4, 4))


def caught_and_gone_on(scene: Scene) -> None:
    """All ranks raise the same error and catch it: nobody is to blame."""
    scene.join()
    mesh, whole = scene.mesh(), scene.tensor()
    x = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    with suppress(RuntimeError):
        x.reshape(7, 7)
    if scene.faulty:
        threading.Event().wait(2.5)  # the others wait for it, and find its error
    scene.check(x, whole)


def slow_rank(scene: Scene) -> None:
    """A rank that takes its time, but comes."""
    scene.join()
    whole = scene.tensor()
    x = distribute_tensor(whole, scene.mesh(), [Shard(0)], src_data_rank=None)
    if scene.faulty:
        threading.Event().wait(3.0)
    scene.check(x, whole)
    scene.check(x.sum(0), whole.sum(0))


# -- threads, forks, groups --------------------------------------------------------------------------------
def two_threads(scene: Scene) -> None:
    """Two threads with a group each communicate at the same time."""
    scene.join()
    meshes, failures = [scene.mesh(), scene.mesh()], list[BaseException]()
    groups = [dist.new_group(), dist.new_group()]
    meshes = [dist.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)) for group in groups]

    def work(number: int) -> None:
        try:
            whole = scene.tensor(number=number)
            x = distribute_tensor(whole, meshes[number], [Shard(0)], src_data_rank=None)
            for _ in range(20):
                scene.check(x, whole)
                scene.check(x.sum(0), whole.sum(0))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


def thread_raises(scene: Scene) -> None:
    """A thread of one rank, which communicates, raises; the others wait for it."""
    scene.join()
    whole = scene.tensor()
    x = distribute_tensor(whole, scene.mesh(), [Shard(0)], src_data_rank=None)

    def work() -> None:
        scene.check(x, whole)
        if scene.faulty:
            raises()
        scene.check(x, whole)

    if not scene.faulty:
        work()
        return
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    threading.Event().wait(TIMEOUT_SECONDS)


def forked(scene: Scene) -> None:
    """A process that a rank forks off communicates: it is refused, and the ranks go on."""
    scene.join()
    whole = scene.tensor()
    x = distribute_tensor(whole, scene.mesh(), [Shard(0)], src_data_rank=None)
    scene.check(x, whole)
    if scene.faulty:
        child = os.fork()
        if child == 0:
            try:
                x.full_tensor()
            except CommError:
                exit_at_once(17)
            exit_at_once(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 17:
            raise WrongValueError("a forked process was let communicate")
    scene.check(x, whole)


def group_destroyed(scene: Scene) -> None:
    """A rank leaves its groups while a move is under way."""
    scene.join()
    whole = scene.tensor()
    x = distribute_tensor(whole, scene.mesh(), [Shard(0)], src_data_rank=None)
    moving = x.redistribute(placements=[Shard(1)], async_op=True)
    if scene.faulty:
        dist.destroy_process_group()
        return
    scene.check(moving.wait().redistribute(placements=[Replicate()]), whole)


def groups_made_anew(scene: Scene) -> None:
    """After a fault, all ranks leave their groups, make new ones and go on."""
    scene.join()
    whole = scene.tensor()
    x = distribute_tensor(whole, scene.mesh(), [Shard(0)], src_data_rank=None)
    with suppress(RuntimeError):
        if scene.faulty:
            x.reshape(7, 7)  # an error of one rank only
        x.redistribute(placements=[Replicate()])
    dist.destroy_process_group()
    scene.join()
    x = distribute_tensor(whole, scene.mesh(), [Shard(0)], src_data_rank=None)
    scene.check(x, whole)
    scene.check(x.sum(0), whole.sum(0))


@dataclass(frozen=True)
class Kind:
    """One kind of fault, and how it must end."""

    name: str
    run: Callable[[Scene], None]
    sizes: tuple[int, ...] = (2, 3, 4)
    goes_on: bool = False  # whether all ranks must get to the end
    alike: bool = False  # whether all ranks must raise the same error
    stops: bool = False  # whether the faulty rank is stopped for good


def kinds() -> list[Kind]:
    """All of them."""
    found = [
        Kind(f"a rank {what} in {where}", partial(run, happens=happens), stops=happens is is_stopped)
        for where, run in PLACES.items()
        for what, happens in HAPPENS.items()
    ]
    found += [Kind(f"ranks differ: {what}", partial(differs, what=what)) for what in DIFFERENCES]
    found += [
        Kind(f"checked ranks differ: {what}", partial(differs, what=what, checked=True), alike=what != THE_END)
        for what in DIFFERENCES
    ]
    return [
        *found,
        Kind("ranks differ: another mesh axis", other_axis, (4,)),
        Kind("ranks differ: another seed", other_seed),
        Kind("waits in another order", waits_in_other_order, goes_on=True),
        Kind("an index that one rank finds out of range", index_out_of_range),
        Kind("an error that all ranks catch", caught_and_gone_on, goes_on=True),
        Kind("a slow rank", slow_rank, goes_on=True),
        Kind("two threads, a group each", two_threads, goes_on=True),
        Kind("a thread of a rank raises", thread_raises),
        Kind("a rank forks off a process that communicates", forked, goes_on=True),
        Kind("a rank leaves its groups with a move under way", group_destroyed),
        Kind("groups made anew after a fault", groups_made_anew, goes_on=True),
    ]  # fmt: skip
