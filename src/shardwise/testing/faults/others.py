"""Errors that only one rank can see; threads, forks, groups that are left and made anew."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from os import _exit as exit_at_once

import torch
import torch.distributed as dist
from torch import nn

from shardwise import CommError, Replicate, Shard, distribute_tensor
from shardwise.testing.faults.scene import (
    Scene,
    WrongValueError,
    raises,
)


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
    threading.Event().wait(scene.timeout)


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
