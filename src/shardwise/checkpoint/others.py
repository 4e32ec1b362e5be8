"""Saves in the formats of others: torch.distributed.checkpoint and torch.save, committed in one step like ours."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardwise.checkpoint.commit import commit, draft_of, drop_draft, folder_of, new_draft
from shardwise.checkpoint.files import sync_folder
from shardwise.checkpoint.holders import check_all
from shardwise.checkpoint.tree import Flat, Value, built, flatten, value_of
from shardwise.checkpoint.world import World
from shardwise.errors import CheckpointError
from shardwise.imports import later
from shardwise.sharded.tensor import ShardedTensor
from shardwise.tensor import DTensor

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
    world.agree(error)
    if kind == "dcp":
        _save_dcp(target, flat, world)
    else:
        _save_pt(target, flat, world)


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


def _save_pt(path: Path, flat: Flat, world: World) -> None:
    whole = {}
    for name, tensor in flat.tensors.items():
        found = _whole(tensor)  # every process takes part
        if world.is_first:
            whole[name] = found

    def write() -> None:
        if path.is_dir():
            raise CheckpointError(f"{path}: is a folder; format='pt' writes one file: give its name")
        draft = path.parent / f".{path.name}.saving"
        state = built(flat.tree, whole.__getitem__, arrays=False)  # `weights_only` reads no numpy arrays
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


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, (DTensor, ShardedTensor)):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().clone()
