"""Calling torch from inside of `__torch_dispatch__` as from outside: recorded by autograd, seen by tensor classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_C = torch._C
_MODES = _C.DispatchKeySet(_C.DispatchKey.Python) | _C.DispatchKeySet(_C.DispatchKey.PythonTLSSnapshot)  # type: ignore[attr-defined]


@contextmanager
def reentrant() -> Iterator[None]:
    """Inside, torch is as it was where the op was called, less the dispatch mode that showed the op on its way here: it
    is off the stack while it does, but torch would look for it."""
    with torch.overrides.enable_reentrant_dispatch():
        included = _C._dispatch_tls_local_include_set()  # type: ignore[attr-defined]
        if _C._len_torch_dispatch_stack() or not included.has(_C.DispatchKey.Python):  # type: ignore[attr-defined]
            yield
        else:
            excluded = _C._dispatch_tls_local_exclude_set()  # type: ignore[attr-defined]
            with _C._ForceDispatchKeyGuard(included - _MODES, excluded):  # type: ignore[attr-defined]
                yield
