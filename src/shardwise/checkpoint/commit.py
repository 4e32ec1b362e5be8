"""Folders that are there wholly or not at all: written under another name, flushed, then renamed in one step."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path

from shardwise.checkpoint.files import INDEX, sync_folder
from shardwise.checkpoint.manifest import MANIFEST
from shardwise.errors import CheckpointError

_EXCHANGE = 2  # RENAME_EXCHANGE of Linux
_AT_FDCWD = -100
_REMOVED = ".removed"  # how the names of replaced checkpoints end while they are removed
_removers: dict[Path, threading.Thread] = {}  # threads of this process that remove them


def folder_of(path: str | os.PathLike[str]) -> Path:
    """Where a path leads. A draft is made beside that, since a link cannot be exchanged with a folder."""
    return Path(os.path.realpath(path))


def draft_of(path: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return path.parent / f".{path.name}.saving"


def _aside_of(path: Path) -> Path:
    """Where the last checkpoint of a name is for a moment while it is replaced."""
    return path.parent / f".{path.name}.replaced"


def new_draft(path: Path) -> Path:
    """An empty folder to write a checkpoint in; leftovers of a save that did not end are removed."""
    recover(path)
    _remove_replaced(path.parent, glob.escape(path.name))
    if path.exists() and not is_checkpoint(path) and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path}: exists and is no checkpoint; give another path, or remove it")
    draft = draft_of(path)
    if draft.exists():
        shutil.rmtree(draft)
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{draft}: cannot be made: {error.strerror}; is the folder writable?") from error
    return draft


def is_checkpoint(path: Path) -> bool:
    """Whether a folder looks like a checkpoint of any format that `save` writes."""
    return path.is_dir() and (
        any((path / name).exists() for name in (MANIFEST, INDEX, ".metadata")) or any(path.glob("*.safetensors"))
    )


def commit(draft: Path, path: Path) -> None:
    """Put a complete draft in its place, in one step, over the checkpoint that is there."""
    sync_folder(draft)
    if not path.exists() or not any(path.iterdir()):
        os.rename(draft, path)
        sync_folder(path.parent)
        return
    if not _exchange(draft, path):
        aside = _aside_of(path)
        os.rename(path, aside)  # a load that finds nothing here takes this one back
        os.rename(draft, path)
        draft = aside
    sync_folder(path.parent)
    _remove_later(draft, path)


def _remove_later(folder: Path, path: Path) -> None:
    """Remove what was replaced while the program goes on: it takes long to free gigabytes. The program ends only after
    that; if it is killed, the next save removes the rest."""
    gone = path.parent / f".{path.name}.{uuid.uuid4().hex}{_REMOVED}"
    os.rename(folder, gone)
    remover = threading.Thread(target=shutil.rmtree, args=(gone,), kwargs={"ignore_errors": True})
    try:
        remover.start()
    except RuntimeError:  # the program is ending, and may start no thread
        shutil.rmtree(gone, ignore_errors=True)
        return
    for other, thread in list(_removers.items()):  # threads that save may come here at the same time
        if not thread.is_alive():
            _removers.pop(other, None)
    _removers[gone] = remover


def settle_removals() -> bool:
    """Wait until what this process has replaced is removed; whether there was something to wait for."""
    waited = [remover for remover in list(_removers.values()) if remover.is_alive()]
    for remover in waited:
        remover.join()
    return bool(waited)


def _remove_replaced(folder: Path, name: str) -> None:
    """Remove what was left of replaced checkpoints; `name` may be a pattern."""
    for left in folder.glob(f".{name}.*{_REMOVED}"):
        remover = _removers.get(left)
        if remover is None or not remover.is_alive():  # in a forked process none is
            shutil.rmtree(left, ignore_errors=True)


def recover(path: Path) -> None:
    """Bring back a checkpoint that was being replaced when the process was killed."""
    aside = _aside_of(path)
    if aside.exists():
        if path.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.rename(aside, path)


def drop_draft(draft: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(draft)


def recover_all(root: Path) -> None:
    """Bring back all checkpoints of a folder that were being replaced when a process was killed."""
    for left in root.glob(".*.replaced"):
        recover(root / left.name[1:].removesuffix(".replaced"))


def clean(root: Path, under_way: Iterable[str] = ()) -> None:
    """Remove what saves that did not end have left in a folder of checkpoints.

    Args:
        under_way: Where this process is saving to now.
    """
    busy = {draft_of(Path(path)) for path in under_way}
    for left in folder_of(root).glob(".*.saving"):
        if left not in busy:
            shutil.rmtree(left, ignore_errors=True)
    _remove_replaced(root, "*")


def _exchange(one: Path, other: Path) -> bool:
    """Whether two names were exchanged in one step; not every system can."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = (ctypes.c_char_p(os.fsencode(path)) for path in (one, other))
    if rename(_AT_FDCWD, next(names), _AT_FDCWD, next(names), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
