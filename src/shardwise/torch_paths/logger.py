"""The logger that torch has for sharded tensors: silent unless somebody puts a handler in."""

from __future__ import annotations

import logging

_log_handlers: dict[str, logging.Handler] = {"default": logging.NullHandler()}


def _get_or_create_logger() -> logging.Logger:
    """Return the logger of sharded tensors, with the default handler."""
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
    """Return the handler of a destination, and the name of its class."""
    if destination not in _log_handlers:
        raise KeyError(f"destination: no handler for {destination!r}; there are {sorted(_log_handlers)}")
    handler = _log_handlers[destination]
    return handler, type(handler).__name__
