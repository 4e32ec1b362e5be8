"""The names of torch.distributed._shard.sharded_tensor.logger: a log that is silent unless a handler is put in."""

from __future__ import annotations

import logging

from shardwise.sharded.sharded_tensor.logging_handlers import _log_handlers

__all__: list[str] = []


def _get_or_create_logger() -> logging.Logger:
    """The log of sharded tensors, with the default handler."""
    handler, name = _get_logging_handler()
    logger = logging.getLogger(f"sharding-spec-{name}")
    logger.setLevel(logging.DEBUG)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(filename)s:%(lineno)s %(levelname)s p:%(processName)s %(message)s")
    )
    logger.propagate = False
    if handler not in logger.handlers:
        logger.addHandler(handler)
    return logger


def _get_logging_handler(destination: str = "default") -> tuple[logging.Handler, str]:
    """The handler of a destination, and its name."""
    if destination not in _log_handlers:
        raise KeyError(f"destination: no handler for {destination!r}; there are {sorted(_log_handlers)}")
    handler = _log_handlers[destination]
    return handler, type(handler).__name__
