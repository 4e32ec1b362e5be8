"""Writes into a tensor that shares memory with another one of the call. torch refuses most of those, by where the
tensors lie in memory. Ranks do not see that: what a rank reads may have been moved, or lie in another rank's part. So
torch itself is asked, with plain tensors that lie as the whole ones would.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch.utils._pytree import tree_map_only

from shardwise.comm.capturing import unwritten
from shardwise.context import of_thread
from shardwise.engine.aliasing import COPIES, memory_of
from shardwise.engine.call_shape import Path, fetch
from shardwise.engine.plan import Plan
from shardwise.torch_private.autograd import is_transforming
from shardwise.torch_private.tensors import are_apart, share_memory
from shardwise.wrapper import Wrapper

Args = Sequence[object]
Kwargs = dict[str, object]

_MOST = 2**26  # bytes of memory for which torch is asked
_SAYS_SO = "single memory location"


def refusing_overlap(func: Callable[..., object], paths: Sequence[Path], plan: Plan) -> Plan:
    """The plan of a call that writes, which raises what torch raises if the tensors at `paths` overlap. It does not ask
    about what the program of an op calls: that op was asked about."""
    known: dict[Hashable, str] = {}  # by how they do: torch's words, if it refuses

    def check(args: Args, kwargs: Kwargs) -> None:
        tensors = [fetch(args, kwargs, path) for path in paths]
        memory = [memory_of(tensor) for tensor in tensors]
        if len(set(memory)) < len(memory) and of_thread.op is None and not is_transforming():
            key = tuple((memory.index(own), t._offset) for own, t in zip(memory, tensors, strict=True))
            if key not in known:
                known[key] = _refusal(func, args, kwargs)
            if known[key]:
                raise RuntimeError(known[key])

    at = [path[0] for path in paths]  # of a tensor that is an argument, or of the list that it is in
    if len(paths) == 2 and all(type(i) is int and len(path) == 1 for i, path in zip(at, paths, strict=True)):
        return _checked_if_shared(at, check, plan)
    lists = list(dict.fromkeys(at)) if all(type(path[0]) is int and len(path) == 2 for path in paths) else []

    def run(args: Args, kwargs: Kwargs, local_args: list[object], local_kwargs: Kwargs) -> object:
        if not lists or _may_share([tensor for i in lists for tensor in args[i]]):  # type: ignore[attr-defined]
            check(args, kwargs)
        return plan(args, kwargs, local_args, local_kwargs)

    return run


def _checked_if_shared(at: Sequence[int], check: Callable[[Args, Kwargs], None], plan: Plan) -> Plan:
    """The plan of a call of two tensors, the arguments `at`: nothing but one question of C++ where they share none."""
    first, second = at

    def run(args: Args, kwargs: Kwargs, local_args: list[object], local_kwargs: Kwargs) -> object:
        one, other = args[first]._local, args[second]._local  # type: ignore[attr-defined]
        if type(one) is not torch.Tensor or COPIES or is_transforming() or share_memory(one, other):
            check(args, kwargs)
        return plan(args, kwargs, local_args, local_kwargs)

    return run


def _may_share(tensors: Sequence[object]) -> bool:
    """Whether some of the tensors of lists may share memory, found in little time for each."""
    local = [tensor._local for tensor in tensors if isinstance(tensor, Wrapper)]
    return bool(COPIES) or type(local[0]) is not torch.Tensor or is_transforming() or not are_apart(local)


@torch.no_grad()
def _refusal(func: Callable[..., object], args: Args, kwargs: Kwargs) -> str:
    """What torch says against a call on tensors that lie in memory like these; empty if nothing."""
    sizes: dict[int, int] = {}

    def measure(tensor: Wrapper) -> Wrapper:
        memory = memory_of(tensor)
        sizes[memory] = max(sizes.get(memory, 0), _end(tensor) * tensor.dtype.itemsize)
        return tensor

    tree_map_only(Wrapper, measure, (list(args), kwargs))
    if sum(sizes.values()) > _MOST:
        return ""
    with unwritten(), torch.random.fork_rng(devices=[]):
        rooms = {memory: torch.zeros(size, dtype=torch.uint8).untyped_storage() for memory, size in sizes.items()}
        lying = lambda t: torch.empty(0, dtype=t.dtype).set_(  # noqa: E731
            rooms[memory_of(t)], t._offset, t._layout.shape, t._layout.stride
        )
        plain_args, plain_kwargs = tree_map_only(Wrapper, lying, (list(args), kwargs))
        try:
            func(*plain_args, **plain_kwargs)
        except Exception as error:  # whatever else torch has against the call is said by its plan
            return str(error) if _SAYS_SO in str(error) else ""
    return ""


def _end(tensor: Wrapper) -> int:
    """Where the elements of a tensor end in the memory that plain torch would have."""
    layout = tensor._layout
    reach = sum((n - 1) * step for n, step in zip(layout.shape, layout.stride, strict=True))
    return tensor._offset + reach + 1 if all(layout.shape) else 0
