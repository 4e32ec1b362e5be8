"""`DTensor._op_dispatcher`: a private name of torch's that programs use to let plain tensors in."""

from __future__ import annotations

from typing import NoReturn

from shardwise.context import of_thread

_INSTEAD = {
    "sharding_propagator": "register rules by shardwise.register_sharding, clear caches by shardwise.clear_caches",
    "_custom_op_handlers": "register a rule by shardwise.register_sharding, or call your function by local_map",
    "_random_ops": "every function of torch that draws numbers draws the same for every layout; see docs/random.md",
}


class Dispatcher:
    """`DTensor._op_dispatcher`, as far as it means something here: calls are planned by `engine/`."""

    @property
    def _allow_implicit_replication(self) -> bool:
        """Whether the program is inside `implicit_replication()`; setting it enters or leaves."""
        return of_thread.replicating > 0

    @_allow_implicit_replication.setter
    def _allow_implicit_replication(self, flag: bool) -> None:
        of_thread.replicating = int(flag)

    def __getattr__(self, name: str) -> NoReturn:
        instead = _INSTEAD.get(name, "register rules by shardwise.register_sharding")
        raise AttributeError(f"_op_dispatcher.{name} works inside of torch's DTensor and is not here: {instead}")
