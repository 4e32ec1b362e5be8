"""Saves in the formats of others: torch.distributed.checkpoint and torch.save, committed in one step like ours."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardwise.checkpoint.agreement import Agreed, agree
from shardwise.checkpoint.commit import commit, draft_of, drop_draft, folder_of, new_draft
from shardwise.checkpoint.files import Entry, sync_folder
from shardwise.checkpoint.holders import as_bytes, check_all
from shardwise.checkpoint.loader import inside
from shardwise.checkpoint.tree import Flat, Node, Value, built, flatten, value_of
from shardwise.checkpoint.world import World
from shardwise.checkpoint.write import tasks_of
from shardwise.errors import CheckpointError
from shardwise.imports import later
from shardwise.layout.tiles import Tile

if TYPE_CHECKING:
    import torch.distributed.checkpoint as dcp
else:
    dcp = later("torch.distributed.checkpoint")  # which takes half a second to import


def save(path: str | os.PathLike[str], state: Value, world: World, kind: str) -> None:
    """Save a state as the kind "dcp" (a folder) or "pt" (a file). Every process calls it."""
    target, flat, error = folder_of(path), Flat(), None
    try:
        flat = flatten(state)
        check_all(flat.tensors, "saving")
    except Exception as raised:
        error = raised
    agreed = agree(flat, world, values=True, also=[os.path.abspath(path), kind], error=error)
    if kind == "dcp":
        _save_dcp(target, flat, world)
    else:
        _save_pt(target, agreed.tree, _gathered(target, flat, agreed, world), world)


def _save_dcp(folder: Path, flat: Flat, world: World) -> None:
    draft = world.from_first(lambda: new_draft(folder))
    try:
        entries = flat.tensors | {name: value_of(said) for name, said in flat.values.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be
            dcp.save(entries, checkpoint_id=draft, process_group=world.group, no_dist=world.group is None)
        world.from_first(lambda: commit(draft, folder))
    except BaseException as error:
        if world.is_first:
            drop_draft(draft_of(folder))
        if isinstance(error, dcp.CheckpointException):  # no Exception to Python, and all tracebacks in one text
            causes = [f"rank {rank}: {_cause(failed[0])}" for rank, failed in error.args[-1].items()]
            raise CheckpointError(f"{folder}: could not be written: {'; '.join(causes)}") from error
        raise


def _gathered(path: Path, flat: Flat, agreed: Agreed, world: World) -> dict[str, torch.Tensor]:
    """All tensors as a whole, on the first process; the others send it what it lacks."""
    error: Exception | None = None
    whole, (entries, tasks) = dict[str, torch.Tensor](), tasks_of(flat, agreed, world)
    given = {task.entry.name: dict(task.pieces) for task in tasks}  # by tile: replicas may be in one process
    for entry in entries:
        mine: list[tuple[Tile, np.ndarray]] = []
        try:
            mine = [(tile, as_bytes(values)) for tile, values in given.get(entry.name, {}).items()]
        except Exception as raised:  # told to the others below: they wait for a message of this process until then
            error = raised
        told = world.to_first(mine)
        if world.is_first and error is None:
            try:
                whole[entry.name] = _put_together(path, entry, [piece for pieces in told for piece in pieces])
            except Exception as raised:
                error = raised
    world.agree(error)
    return whole


def _put_together(path: Path, entry: Entry, pieces: Sequence[tuple[Tile, np.ndarray]]) -> torch.Tensor:
    if sum(data.size for _, data in pieces) != entry.nbytes:
        raise CheckpointError(
            f"{path}: some of tensor {entry.name!r} is held by no process that called save; call it on all ranks of "
            f"the tensor's mesh"
        )
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for tile, data in pieces:
        values = torch.from_numpy(data).view(entry.dtype).view(tile.sizes)
        inside(whole, Tile((0,) * whole.dim(), entry.shape), tile).copy_(values)
    return whole


def _save_pt(path: Path, tree: Node, whole: dict[str, torch.Tensor], world: World) -> None:
    def write() -> None:
        if path.is_dir():
            raise CheckpointError(f"{path}: is a folder; format='pt' writes one file: give its name")
        draft = path.parent / f".{path.name}.saving"
        state = built(tree, whole.__getitem__, arrays=False)  # `weights_only` reads no numpy arrays
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(draft, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
            sync_folder(path.parent)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise CheckpointError(f"{path}: could not be written: {_cause(error)}") from error

    world.from_first(write)


def _cause(error: BaseException) -> str:
    """What went wrong. torch.save meets a full disk and raises what it finds in its own counts afterwards."""
    first: BaseException | None = error
    while first is not None and not isinstance(first, OSError):
        first = first.__cause__ or first.__context__
    hint = "; is the disk full?" if first is None and "inline_container" in str(error) else ""
    return f"{error if first is None else first}{hint}"

