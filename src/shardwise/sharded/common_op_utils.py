"""The names of torch.distributed._shard.common_op_utils: what ops of one's own start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.sharded import registry
from shardwise.sharded.tensor import first_sharded

__all__ = ["_basic_validation", "_register_default_op"]


def _basic_validation(op: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
    """Raise where an op is called without a sharded tensor."""
    kwargs = kwargs or {}
    if not args and not kwargs:
        raise ValueError(f" No input for '{op.__name__}'!")
    if first_sharded((*args, *kwargs.values())) is None:
        raise TypeError(
            f"torch function '{op.__name__}', with args: {tuple(args)} and kwargs: {dict(kwargs)} are called without "
            f"any sharded tensor!"
        )


def _register_default_op(op: Any, decorator: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Register, by a decorator such as `custom_sharded_op_impl`, that `op` does what it does without any registration:
    on the tiles where they allow it, else over a mesh layout."""

    @decorator(op)
    def default(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        _basic_validation(op, args, kwargs)
        return registry.default(op, args, kwargs or {})
