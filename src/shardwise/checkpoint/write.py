"""`save`: a state to a folder of safetensors files. Every process writes its own ranges; replicas share the writing."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from shardwise.checkpoint import crc
from shardwise.checkpoint.agreement import Agreed, agree
from shardwise.checkpoint.blocks import Block, Cuts, block_bytes_for
from shardwise.checkpoint.commit import commit, draft_of, drop_draft, folder_of, new_draft, settle_removals
from shardwise.checkpoint.dtypes import from_short
from shardwise.checkpoint.files import (
    INDEX,
    DataFile,
    Entry,
    index_json,
    lay_out,
    seal,
    sealed,
    write_synced,
)
from shardwise.checkpoint.holders import check_all, held, layouts_json, share_of
from shardwise.checkpoint.jobs import Job, Known, Task, Written, create, jobs_of, write
from shardwise.checkpoint.manifest import MANIFEST, manifest_text, random_state
from shardwise.checkpoint.tree import Flat, Json, Node, Value, flatten
from shardwise.checkpoint.world import World
from shardwise.comm.group_calls import group_call
from shardwise.errors import CheckpointError
from shardwise.layout import Layout
from shardwise.tensor import DTensor


@dataclass(frozen=True)
class Draft:
    """A checkpoint before it is written: what all processes know of it, and what this one has to write."""

    path: Path
    entries: list[Entry]
    most: int  # bytes of a file
    tasks: list[Task]
    tree: Node
    layouts: dict[str, Json]
    step: int | None
    random: str | None
    manifest: bool

    # what follows from these is found when it is needed, for an asynchronous save in its thread
    @cached_property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    @cached_property
    def files(self) -> list[DataFile]:
        return lay_out(self.entries, self.most, None if self.manifest else self.cuts)

    @property
    def block_bytes(self) -> int:
        return block_bytes_for(self.nbytes)

    @cached_property
    def cuts(self) -> Cuts:
        return Cuts(self.block_bytes)

    @cached_property
    def blocks(self) -> dict[str, list[Block]]:
        return {entry.name: self.cuts[entry.shape, entry.dtype.itemsize] for entry in self.entries}

    @cached_property
    def first(self) -> dict[str, int]:
        """The number of each tensor's first block."""
        counts = [len(found) for found in self.blocks.values()]
        return dict(zip(self.blocks, itertools.accumulate(counts, initial=0)))

    @property
    def count(self) -> int:
        return sum(map(len, self.blocks.values()))

    def jobs(self) -> list[Job]:
        """What this process writes."""
        place = {name: (i, start) for i, file in enumerate(self.files) for name, start in file.starts.items()}
        jobs: list[Job] = []
        known: Known = {}
        for entry, copies, turn, pieces in self.tasks:
            blocks = self.blocks[entry.name]
            mine = range(turn, len(blocks), copies)
            jobs += jobs_of(*place[entry.name], entry, blocks, self.first[entry.name], pieces, mine, known)
        return jobs


@dataclass(frozen=True)
class Attempt:
    """A draft, or what went wrong on this process alone: `run` tells the others."""

    path: Path
    draft: Draft | None
    error: Exception | None = None

    @staticmethod
    def of(path: Path, make: Callable[[], Draft]) -> Attempt:
        try:
            return Attempt(path, make())
        except Exception as error:
            return Attempt(path, None, error)

    def checked(self) -> Draft:
        """The draft; raises what went wrong."""
        if self.draft is None:
            raise self.error or CheckpointError(f"{self.path}: there is nothing to write")
        return self.draft


def prepare(
    path: str | os.PathLike[str],
    state: Value,
    world: World,
    *,
    step: int | None,
    most: int,
    manifest: bool,
    failed: bool = False,
) -> Attempt | None:
    """Work out what is written where. Every process calls it; nothing is written yet.

    Returns:
        None where some process has `failed` before, so that this is not the time for another save.
    """
    folder = folder_of(path)
    flat, error = Flat(), None
    try:
        flat = flatten(state)
        check_all(flat.tensors, "saving")
        if flat.values and not manifest:
            first = next(iter(flat.values))
            raise CheckpointError(
                f"save: format='safetensors' has room for tensors only, but {first!r} is a value; save the model "
                f"alone, or use format='shardwise'"
            )
    except Exception as raised:  # told to the others, so that they do not wait
        error = raised
    random = random_state()
    also = [os.path.abspath(path), step, most, manifest]
    agreed = agree(flat, world, values=True, also=also, error=error, told=(hash_of(random), failed))
    if any(before for _, before in agreed.told):
        return None
    stream = random if len(set(agreed.told)) == 1 else None
    return Attempt.of(folder, lambda: _drafted(folder, flat, agreed, world, step, stream, most, manifest))


def hash_of(text: str) -> int:
    return crc.raw(text.encode())


def _drafted(
    folder: Path,
    flat: Flat,
    agreed: Agreed,
    world: World,
    step: int | None,
    random: str | None,
    most: int,
    manifest: bool,
) -> Draft:
    entries, tasks = tasks_of(flat, agreed, world)
    layouts = layouts_json(flat.tensors)
    return Draft(folder, entries, most, tasks, agreed.tree, layouts, step, random, manifest)


def tasks_of(flat: Flat, agreed: Agreed, world: World) -> tuple[list[Entry], list[Task]]:
    """All tensors, and what this process gives of them: all processes together give each element once."""
    entries = [
        Entry(name, from_short(kinds[0][0].dtype, name), tuple(kinds[0][0].shape))
        for name, kinds in agreed.tensors.items()
    ]
    cuts = Cuts(block_bytes_for(sum(entry.nbytes for entry in entries)))
    return entries, [task.own(cuts) for task in _tasks(flat, agreed, world, entries)]


def _tasks(flat: Flat, agreed: Agreed, world: World, entries: Sequence[Entry]) -> Iterator[Task]:
    """What this process writes of each tensor: of the blocks it can write, its share among the replicas."""
    known: dict[Layout, tuple[int, int]] = {}  # most tensors of a model share a layout with others
    for number, entry in enumerate(entries):
        tensor = flat.tensors.get(entry.name)
        if tensor is not None:
            layout = tensor._layout if isinstance(tensor, DTensor) and agreed.same else None
            found = None if layout is None else known.get(layout)
            copies, mine = found or _turn(tensor, agreed.tensors[entry.name], world)
            if layout is not None:
                known[layout] = copies, mine
            if mine >= 0:
                yield Task(entry, copies, (mine - number) % copies, held(tensor))


def _turn(tensor: torch.Tensor, kinds: Sequence[tuple[object, list[int]]], world: World) -> tuple[int, int]:
    """How many copies of a tensor there are, and which one is this process's (-1: one that writes nothing). Where
    processes lay it out differently (each on its own part of a mesh), every layout has all of it."""
    if len(kinds) == 1:
        return share_of(tensor, kinds[0][1], world)
    own = next(i for i, (_, ranks) in enumerate(kinds) if world.rank in ranks)
    _, mine = share_of(tensor, kinds[own][1], world)
    # the layouts of others are not known here: each of them counts as one copy, written by its first replica
    return len(kinds), own if mine == 0 else -1


def run(attempt: Attempt, world: World) -> None:
    """Write a draft and commit it. Every process calls it; all raise if one of them fails, or has failed before."""
    folder = draft_of(attempt.path)
    world.from_first(lambda: begin(attempt.checked()))
    error: Exception | None = None
    try:
        draft = attempt.checked()
        written = write(folder, draft.files, draft.jobs(), draft.count)
    except Exception as raised:
        error = raised
    try:
        world.agree(error)
        sums, total = _together(written, world)
        world.from_first(lambda: finish(draft, folder, sums, total, world))
    except BaseException:
        if world.is_first:
            drop_draft(folder)
        raise


def begin(draft: Draft) -> None:
    """Make the folder and the files of a draft; nothing is left where there is no room for them."""
    folder = new_draft(draft.path)
    try:
        try:
            create(folder, draft.files)
        except CheckpointError:
            if not settle_removals():
                raise
            create(folder, draft.files)  # there may be room for them now
    except BaseException:
        drop_draft(folder)
        raise


def _together(written: Written, world: World) -> tuple[np.ndarray, int]:
    """The checksums of all blocks, and the bytes that all processes wrote."""
    if world.group is None:
        return written.checksums, written.bytes
    sums, total = torch.from_numpy(written.checksums.astype(np.int32)), torch.tensor([written.bytes])
    with group_call(world.group, "checkpoint", "all_reduce"):
        dist.all_reduce(sums, dist.ReduceOp.BXOR, group=world.group)
        dist.all_reduce(total, group=world.group)
    return sums.numpy().astype(np.int64) & 0xFFFFFFFF, int(total.item())


def finish(draft: Draft, folder: Path, sums: np.ndarray, total: int, world: World) -> None:
    """The first process writes what says that all is there, then puts the folder in its place."""
    if total != draft.nbytes:
        raise CheckpointError(
            f"{draft.path}: {total} bytes were written of {draft.nbytes}: some tiles are held by no process that "
            f"called save; call it on all ranks of the tensors' meshes"
        )
    checksums, at = {}, iter(sums.tolist())
    for entry in draft.entries:
        checksums[entry.name] = [crc.whole(next(at), block.stop - block.start) for block in draft.blocks[entry.name]]
    try:
        if len(draft.files) > 1:
            write_synced(folder / INDEX, index_json(draft.files))
        if draft.manifest:
            text = manifest_text(
                draft.entries,
                draft.files,
                checksums,
                block_bytes=draft.block_bytes,
                tree=draft.tree,
                layouts=draft.layouts,
                step=draft.step,
                world_size=world.size,
                random=draft.random,
            )
            write_synced(folder / MANIFEST, text)  # the names in the folder reach the disk in `commit`
        else:
            for file in draft.files:
                seal(folder / file.name, sealed(file, checksums))
        commit(folder, draft.path)
    except OSError as error:
        raise CheckpointError(f"{draft.path}: could not be completed: {error}") from error
