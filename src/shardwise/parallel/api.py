"""parallelize_module, under the module name that programs import it from."""

from shardwise.parallel.plan import parallelize_module

__all__ = ["parallelize_module"]
