"""The process group that tensors are loaded with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.sharded.owners import as_group

_state = threading.local()


def current_process_group() -> Any:
    """The group of the enclosing `load_with_process_group`, else the default one."""
    return as_group(getattr(_state, "group", None))


@contextmanager
def load_with_process_group(process_group: Any) -> Iterator[Any]:
    """Inside, pickled sharded tensors are loaded onto this process group."""
    if getattr(_state, "group", None) is not None:
        raise RuntimeError('ProcessGroup already set by previous "load_with_process_group" context manager')
    _state.group = process_group
    try:
        yield process_group
    finally:
        _state.group = None
