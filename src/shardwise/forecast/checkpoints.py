"""Checkpoints as a script sees them whose rank is played: nothing is read into tensors, and nothing is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeAlias
from unittest import mock

from shardwise.comm.record import user_line
from shardwise.imports import when_imported

_ROOT = __name__.partition(".")[0]
_TORCHS = "torch.distributed.checkpoint"


_Path: TypeAlias = str | os.PathLike[str]


class _Manager(Protocol):
    """What is asked of our Manager."""

    root: Path
    async_: bool

    def latest(self) -> Path | None: ...

    def path(self, step: int) -> Path: ...


@contextmanager
def played_checkpoints(say: Callable[[str], None]) -> Iterator[None]:
    """Inside, loads leave tensors as they are, which have no values, and saves write nothing: of torch.distributed's
    checkpoints and of ours, wherever the script imports them from.

    Args:
        say: Is told, once for each line, what was not loaded.
    """
    told: set[str] = set()

    def tell(what: str) -> None:
        said = f"{user_line()} {what}"
        if said not in told:
            told.add(said)
            say(said)

    places: dict[str, Callable[[ModuleType], dict[str, Callable[..., Any]]]] = {
        _TORCHS: lambda module: _torchs(tell),
        f"{_TORCHS}.state_dict_loader": lambda module: _torchs(tell),
        f"{_TORCHS}.state_dict_saver": lambda module: _torchs(tell),
        f"{_ROOT}.checkpoint.api": lambda module: _ours(module, tell),
        f"{_ROOT}.checkpoint": lambda module: _ours(module.api, tell),
    }
    with ExitStack() as stack:

        def put(module: ModuleType) -> None:
            for name, function in places[module.__name__](module).items():
                if name in vars(module):
                    stack.enter_context(mock.patch.object(module, name, function))

        def put_into_manager(module: ModuleType) -> None:
            for name, function in _managers(_ours(module.api, tell)["load"]).items():
                stack.enter_context(mock.patch.object(module.Manager, name, function))
            alone = module.world.World(0, (0,), None)  # nobody is there to agree with
            stack.enter_context(mock.patch.object(module.world.World, "of", lambda *args, **kwargs: alone))

        for path in places:
            stack.callback(when_imported(path, put))
        stack.callback(when_imported(f"{_ROOT}.checkpoint", put_into_manager))
        yield


def _tell_of_load(path: object, tell: Callable[[str], None]) -> None:
    where = "a checkpoint" if path is None else f"{str(path)!r}"
    tell(f"loads {where}: tensors have no values, and numbers beside them (a step, an epoch) stay as they are")


def _torchs(tell: Callable[[str], None]) -> dict[str, Callable[..., Any]]:
    """In place of functions of torch.distributed.checkpoint."""

    def load(state_dict: object, *args: object, checkpoint_id: object = None, **kwargs: object) -> None:
        _tell_of_load(checkpoint_id, tell)

    def async_save(*args: object, **kwargs: object) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    save = lambda *args, **kwargs: None
    return {"load": load, "load_state_dict": load, "save": save, "save_state_dict": save, "async_save": async_save}


def _ours(module: ModuleType, tell: Callable[[str], None]) -> dict[str, Callable[..., Any]]:
    """In place of functions of our own checkpoints. One that is there is opened, so that its step is known."""

    def load(path: _Path, into: object, *, map: object = None, verify: str = "fast", **kwargs: object) -> object:
        _tell_of_load(path, tell)
        step = None
        if Path(path).exists():
            source = module.opened(path, map, verify)
            step = source.step
            source.close()
        return module.Loaded(step, (), (), 0, None)

    def save(path: object, state: object, *, async_: bool = False, **kwargs: object) -> object:
        return _Saved() if async_ else None

    return {"load": load, "save": save}


def _managers(load: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """In place of methods of our Manager: the folder stays as it is."""

    def restore(
        manager: _Manager, into: object, *, step: int | None = None, default: int | None = None, **kwargs: object
    ) -> object:
        there = manager.root.exists()
        path = manager.path(step) if step is not None else manager.latest() if there else None
        return default if path is None else load(path, into).step

    def save(manager: _Manager, step: int, state: object, **kwargs: object) -> object:
        return _Saved() if manager.async_ else None

    return {"restore": restore, "save": save, "_make_root": lambda manager: None}


class _Saved:
    """What an asynchronous save gives: it is done."""

    def wait(self, timeout: float | None = None) -> None:
        return None

    def done(self) -> bool:
        return True
