"""The names of torch.distributed._shard.sharded_tensor.logging_handlers: where its log goes, by destination."""

import logging

_log_handlers: dict[str, logging.Handler] = {"default": logging.NullHandler()}
