"""The functions of the package: `save`, `load`, `plan_load`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch.distributed as dist

from shardwise.checkpoint import others, read, write
from shardwise.checkpoint.background import (
    STAGED_BYTES,
    SaveHandle,
    ended,
    has_failed,
    raise_earlier,
    settle,
    start,
    wait_for_all,
)
from shardwise.checkpoint.files import MOST_FILE_BYTES
from shardwise.checkpoint.mapped_source import MappedSource
from shardwise.checkpoint.mapping import Map
from shardwise.checkpoint.opening import VERIFY, open_source
from shardwise.checkpoint.plan import MEMORY, LoadPlan
from shardwise.checkpoint.read import Loaded
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.tree import Value
from shardwise.checkpoint.verify import check_blocks
from shardwise.checkpoint.world import World
from shardwise.errors import CheckpointError, check_type
from shardwise.random.generator import set_state

AnyPath: TypeAlias = str | os.PathLike[str]
FORMATS = ("shardwise", "safetensors", "dcp", "pt")


def save(
    path: AnyPath,
    state: Value,
    *,
    step: int | None = None,
    format: str = "shardwise",
    async_: bool = False,
    max_file_bytes: int = MOST_FILE_BYTES,
    staged_bytes: int = STAGED_BYTES,
    process_group: dist.ProcessGroup | None = None,
) -> SaveHandle | None:
    """Save a state to a folder. Every process of the group calls it.

    The folder is there once all of it is on the disk, in one step; until then, and if anything fails, a checkpoint that
    was there before stays.

    Args:
        path: The folder. A checkpoint that is there is replaced.
        state: Tensors, numbers, strings, lists and dicts of those, modules, optimizers, and whatever has `state_dict()`
            and `load_state_dict()`. A plain tensor or a value must be the same on all processes that have its name.
        step: A number that `load` gives back.
        format: "shardwise": safetensors files and a manifest. "safetensors": the files alone, for tensors only.
            "dcp": a folder of torch.distributed.checkpoint. "pt": one file of torch.save; the first process gathers
            all tensors for it. Files of these two are there when `save` returns, also with `async_`.
        async_: Whether to return once memory was copied: a thread writes the copy. What goes wrong in either, on any
            process, is raised on all of them by the next call of `save`, or by `wait()`.
        staged_bytes: With `async_`, how many bytes this process may have for copies, those of the last save included,
            whose memory is kept for the next one. `save` waits for earlier ones to end where there are more; a single
            save may have more.
        max_file_bytes: A file gets no further tensor beyond this.
        process_group: The processes that save together; by default all.

    Returns:
        With `async_` a handle: `wait()` returns once the checkpoint is there. Else None.

    Raises:
        CheckpointError: On all processes, if one of them could not write, an earlier asynchronous save failed, or
            what they have differs.
        LayoutError: A tensor is Partial.
        TypeError: Something in the state cannot be saved.
    """
    check_arguments(format=format, step=step, max_file_bytes=max_file_bytes, staged_bytes=staged_bytes)
    check_type(path, (str, os.PathLike), "save: path", "give a folder")
    check_type(async_, bool, "save: async_", "give whether to return before the files are written")
    world = World.of(process_group)
    if format in ("dcp", "pt"):
        wait_for_all(world)
        others.save(path, state, world, format)
        return ended(os.fspath(path)) if async_ else None
    manifest = format == "shardwise"
    return save_then(path, state, None, step, manifest, async_, max_file_bytes, staged_bytes, process_group)


def save_then(
    path: AnyPath,
    state: Value,
    then: Callable[[], None] | None,
    step: int | None = None,
    manifest: bool = True,
    async_: bool = False,
    max_file_bytes: int = MOST_FILE_BYTES,
    staged_bytes: int = STAGED_BYTES,
    process_group: dist.ProcessGroup | None = None,
) -> SaveHandle | None:
    """`save` to safetensors files. Once the checkpoint is there, the first process does something as a part of it."""
    world = World.of(process_group)
    if not async_:
        settle()  # an earlier one may be of the same path; all processes hear below if it has failed on one
    most, failed = max_file_bytes, has_failed()
    attempt = write.prepare(path, state, world, step=step, most=most, manifest=manifest, failed=failed)
    if attempt is None:
        raise_earlier()
    if async_:
        return start(attempt, World.of(process_group, own=True), staged_bytes, then)
    write.run(attempt, world)
    if then is not None:
        world.from_first(then)
    return None


def load(
    path: AnyPath,
    into: Value,
    *,
    strict: bool = True,
    map: Map | None = None,
    verify: str = "fast",
    random: bool = False,
    memory: int = MEMORY,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load a checkpoint into a state, in place. Every process of the group calls it.

    Any layout is loaded into any other, on any mesh and any number of processes. Each byte is read once and goes from
    there to all processes that need it.

    Args:
        path: A folder of `save`, a Hugging Face folder, a safetensors file, a folder of torch.distributed.checkpoint or
            a file of torch.save.
        into: What to load into, as it was given to `save`. Values in dicts and lists are replaced.
        strict: Whether names that only one side has are an error.
        map: A table between the names in the files and those in `into`: renamed, joined, split, stacked, transposed,
            converted.
        verify: "fast" checks all that is read. "full" reads and checks every byte first, before anything is changed.
            "none" looks at no checksum.
        random: Whether torch's CPU generator goes on where it was when the checkpoint was saved.
        memory: Bytes that a process may use for buffers. Where the state is at most half of it, nothing in `into`
            changes before all was read and checked.
        process_group: The processes that load together; by default all.

    Returns:
        What was loaded: the step, names that only one side has, bytes and seconds, and the plan.

    Raises:
        CheckpointError: On all processes, if a file is missing or damaged, or names, shapes or dtypes differ.
    """
    check_type(path, (str, os.PathLike), "load: path", "give a folder or a file")
    check_arguments(verify=verify, memory=memory, strict=strict, random=random)
    begin, world = time.perf_counter(), World.of(process_group)
    also = {"path": os.path.abspath(path), "verify": verify, "random": random}
    source = world.from_first(lambda: opened(path, map, verify))
    try:
        prepared = read.prepare(source, into, world, strict=strict, memory=memory, also=also)
        if random and source.random is None:
            raise CheckpointError(
                f"{source.path}: it has no random state: another program wrote it, or the processes had different ones "
                f"when it was saved (torch.manual_seed(n) on all makes them one); random=False loads the rest"
            )
        if verify == "full":
            check_blocks(source, world)
        read.run(prepared, into, world)
        if random and source.random is not None:
            set_state(source.random)
        report = Loaded(
            source.step, tuple(prepared.missing), tuple(prepared.unexpected), source.bytes_read, prepared.plan
        )
    finally:
        source.close()
    return replace(report, seconds=time.perf_counter() - begin)


def plan_load(
    path: AnyPath,
    into: Value,
    *,
    strict: bool = True,
    map: Map | None = None,
    memory: int = MEMORY,
    process_group: dist.ProcessGroup | None = None,
) -> LoadPlan:
    """Plan what `load` would do, without doing it. Every process of the group calls it.

    Args:
        path, into, strict, map, memory, process_group: As for `load`.

    Returns:
        The plan; its `explain()` says in words what is read, what travels and what it takes.

    Raises:
        CheckpointError: `load` would not start, as where tensors are missing and `strict` is set.
    """
    check_type(path, (str, os.PathLike), "plan_load: path", "give a folder or a file")
    check_arguments(memory=memory, strict=strict)
    world = World.of(process_group)
    also = {"path": os.path.abspath(path)}
    source = world.from_first(lambda: opened(path, map, "fast"))
    try:
        return read.prepare(source, into, world, strict=strict, memory=memory, also=also, measure=True).plan
    finally:
        source.close()


def opened(path: AnyPath, table: Map | None, verify: str) -> Source:
    """A checkpoint of any format, as a table says it."""
    if table is not None:
        check_type(table, Map, "load: map", "make one of rename, join, split, stack, transpose and drop")
    source = open_source(path, verify=verify)
    return source if table is None else MappedSource(source, table)


def check_arguments(**given: object) -> None:
    """Raise where an argument of this name cannot have this value."""
    for name, value in given.items():
        if name in ("format", "verify"):
            known = FORMATS if name == "format" else VERIFY
            if value not in known:
                raise ValueError(f"{name} = {value!r}; give one of {', '.join(map(repr, known))}")
        elif name in ("strict", "random"):
            check_type(value, bool, f"load: {name}", "give True or False")
        elif value is not None or name != "step":
            check_type(value, int, name)
            if name != "step" and value <= 0:  # type: ignore[operator]
                raise ValueError(f"{name} = {value!r}; give a number of bytes > 0")
