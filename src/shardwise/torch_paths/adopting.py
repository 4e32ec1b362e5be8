"""adopt() and release(): torch's own module paths of distributed tensors lead to this library, for programs and
libraries that import them themselves."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping

from shardwise.interop import adoption
from shardwise.torch_paths import elsewhere

_ROOT = __name__.partition(".")[0]

ROOTS = {
    "torch.distributed.tensor": _ROOT,
    "torch.distributed._tensor": _ROOT,
    "torch.distributed._shard": f"{_ROOT}.sharded",
}
"""Path in torch -> path of ours."""

_FULLY_SHARD = (
    "fully_shard FSDPModule MixedPrecisionPolicy OffloadPolicy CPUOffloadPolicy UnshardHandle "
    "DataParallelMeshDims register_fsdp_forward_method share_comm_ctx"
).split()


def adopt() -> list[str]:
    """Make torch's own modules of distributed tensors be this library, for everything that is imported afterwards.

    `torch.distributed.tensor`, `torch.distributed._tensor` and `torch.distributed._shard`, with all modules below, have
    our names from here on; so have the modules of torch that use them, whether imported or not (checkpoints, state
    dicts, `assert_close`, pipelines), and `torch.distributed.fsdp.fully_shard` is ours. Call it in the first line of a
    program, or run the program with ``shardwise run``. `release()` undoes it.

    Returns:
        What could not be adopted, since it was imported before and is no part of torch: "module.name" each. A warning
        says so, too.
    """
    if adoption.active() is None:
        adoption.start(adoption.Adoption(ROOTS, _RENAMED, elsewhere))
    left = adoption.active().left_out()  # type: ignore[union-attr]
    if left:
        warnings.warn(
            f"shardwise.adopt(): imported before, so torch's own: {', '.join(left)}. Call it before these imports",
            stacklevel=2,
        )
    return left


def release() -> None:
    """Undo adopt(): torch's modules are torch's own again. What other modules imported meanwhile, they keep."""
    adoption.stop()


def _state_dicts() -> Mapping[str, object]:
    ours = importlib.import_module(f"{_ROOT}.checkpoint.state_dict")
    names = getattr(ours, "__all__", ())
    complete = all(hasattr(ours, name) for name in names)  # if not, ours imports torch's just now, and comes again
    return {name: getattr(ours, name) for name in names} if complete else {}


def _data_parallel() -> Mapping[str, object]:
    ours = importlib.import_module(f"{_ROOT}.parallel")
    return {name: getattr(ours, name) for name in _FULLY_SHARD}


_RENAMED: dict[str, Callable[[], Mapping[str, object]]] = {
    "torch.distributed.checkpoint.state_dict": _state_dicts,
    "torch.distributed.fsdp": _data_parallel,
    "torch.distributed._composable.fsdp": _data_parallel,
    "torch.distributed._composable.fsdp.fully_shard": _data_parallel,
}
