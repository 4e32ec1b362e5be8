"""Modules that a call changes in place: as they were, if it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def unchanged_on_error(root: nn.Module) -> Iterator[None]:
    """If what is inside raises, every module in `root` has the parameters, buffers, hooks and attributes of before."""
    before = [(module, dict(module.__dict__)) for module in root.modules()]
    tables = [(table, table.copy()) for _, values in before for table in values.values() if isinstance(table, dict)]
    try:
        yield
    except BaseException:
        for module, values in before:
            module.__dict__.clear()
            module.__dict__.update(values)
        for table, entries in tables:
            table.clear()
            table.update(entries)
        raise
