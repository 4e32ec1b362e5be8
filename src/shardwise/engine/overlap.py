"""Writes into a tensor that shares memory with another one of the call. torch refuses most of these, depending on where
the tensors are in memory; the others read what they have just written. The ranks' own calls cannot notice this: the
elements that a rank reads may have been moved, or be in another rank's part. So torch is tried on plain tensors that
are stored as the whole ones would be.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from shardwise.comm.capturing import unwritten
from shardwise.context import of_thread
from shardwise.engine.aliasing import COPIES, memory_of
from shardwise.engine.call_shape import CallShape, fetch
from shardwise.engine.local_copies import LOCAL_COPIES
from shardwise.engine.one_memory import (
    LARGEST,
    Lying,
    as_in_one_memory,
    called_on_clones,
    lazy_bits,
    may_read_what_it_writes,
    reads_what_it_writes,
)
from shardwise.engine.plan import Plan
from shardwise.engine.saved import watched_from_before
from shardwise.functions import written
from shardwise.torch_private.autograd import is_transforming
from shardwise.torch_private.tensors import are_apart, share_memory
from shardwise.wrapper import Wrapper, storage_id_of

Args = Sequence[object]
Kwargs = dict[str, object]

_SAYS_SO = "single memory location"


class _Meeting(NamedTuple):
    """What torch does with a call whose tensors share memory in a certain way."""

    refusal: str  # torch's error text, if it refuses
    reads_its_own: bool  # whether it reads what it has just written


def minding_overlap(func: Callable[..., object], call: CallShape, plan: Plan) -> Plan:
    """The plan of a call that writes. If its tensors overlap, it raises torch's error, or gives torch's result where
    torch does not refuse. Calls inside the program of an op are not checked: the op itself was."""
    known: dict[Hashable, _Meeting] = {}  # keyed by how the tensors share memory
    paths, name = call.paths, call.name
    copies_nothing = getattr(plan, "copies_nothing", False)  # the ranks' tensors lie in memory as torch's do

    def meeting_of(args: Args, kwargs: Kwargs) -> _Meeting | None:
        """What torch does with the overlapping tensors of the call; None if none overlap."""
        tensors = [fetch(args, kwargs, path) for path in paths]
        memory = [memory_of(tensor) for tensor in tensors]
        if len(set(memory)) == len(memory) or of_thread.op is not None or is_transforming():
            return None
        numbers: dict[Hashable, int] = {}  # which tensors are one, and which share memory
        number = lambda value: numbers.setdefault(value, len(numbers))  # noqa: E731
        key = tuple(
            (number(m), t._offset, number(id(t)), lazy_bits(t)) for m, t in zip(memory, tensors, strict=True)
        )
        if key not in known:
            known[key] = _meeting(func, args, kwargs)
        return known[key]

    def run_shared(args: Args, kwargs: Kwargs, local_args: list[object], local_kwargs: Kwargs) -> object:
        meeting = meeting_of(args, kwargs)
        if meeting is None:
            return plan(args, kwargs, local_args, local_kwargs)
        if meeting.refusal:
            raise RuntimeError(meeting.refusal)
        if copies_nothing and not meeting.reads_its_own and not are_copies(args, kwargs):
            return plan(args, kwargs, local_args, local_kwargs)
        with watched_from_before(func, name, args, kwargs, paths) as watch:
            if not meeting.reads_its_own:
                return watch(plan(args, kwargs, local_args, local_kwargs))
            write = as_in_one_memory(func, name, args, kwargs)
            result = watch(called_on_clones(func, name, args, kwargs))
            write()
            return result

    def are_copies(args: Args, kwargs: Kwargs) -> bool:
        return bool(COPIES) and any(storage_id_of(fetch(args, kwargs, path)) in COPIES for path in paths)

    at = [path[0] for path in paths]  # of a tensor that is an argument, or of the list that it is in
    if len(paths) == 2 and all(type(i) is int and len(path) == 1 for i, path in zip(at, paths, strict=True)):
        return _if_shared(at, run_shared, plan)
    lists = list(dict.fromkeys(at)) if all(type(path[0]) is int and len(path) == 2 for path in paths) else []

    def run(args: Args, kwargs: Kwargs, local_args: list[object], local_kwargs: Kwargs) -> object:
        if lists and torch.is_grad_enabled():
            _refuse_leaves(func, args, kwargs)
        if not lists or _may_share([tensor for i in lists for tensor in args[i]]):  # type: ignore[attr-defined]
            return run_shared(args, kwargs, local_args, local_kwargs)
        return plan(args, kwargs, local_args, local_kwargs)

    return run


def _if_shared(at: Sequence[int], run_shared: Plan, plan: Plan) -> Plan:
    """The plan of a call of two tensors, the arguments `at`. If they share no memory, it costs one C++ call more."""
    first, second = at

    def run(args: Args, kwargs: Kwargs, local_args: list[object], local_kwargs: Kwargs) -> object:
        one, other = args[first]._local, args[second]._local  # type: ignore[attr-defined]
        simple = type(one) is torch.Tensor and not (COPIES or LOCAL_COPIES or is_transforming())
        if simple and not share_memory(one, other):
            return plan(args, kwargs, local_args, local_kwargs)
        return run_shared(args, kwargs, local_args, local_kwargs)

    return run


def _refuse_leaves(func: Callable[..., object], args: Args, kwargs: Kwargs) -> None:
    """Raise torch's error about writes to leaves before anything is written. Simulated ranks write one after the other,
    so some would have written already when a leaf refuses."""
    for _, target in written(func, args, kwargs):
        if isinstance(target, Wrapper) and target.requires_grad and target.is_leaf:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")


def _may_share(tensors: Sequence[object]) -> bool:
    """Whether some of the tensors of lists may share memory; a quick check."""
    local = [tensor._local for tensor in tensors if isinstance(tensor, Wrapper)]
    copied = bool(COPIES or LOCAL_COPIES)
    return copied or type(local[0]) is not torch.Tensor or is_transforming() or not are_apart(local)


@torch.no_grad()
def _meeting(func: Callable[..., object], args: Args, kwargs: Kwargs) -> _Meeting:
    """What torch does with a call on tensors that lie in memory like these."""
    lying = Lying(args, kwargs)
    if lying.bytes > LARGEST:
        return _Meeting("", may_read_what_it_writes(func, lying))
    with unwritten(), torch.random.fork_rng(devices=[]):
        plain_args, plain_kwargs = lying.call_with()
        try:
            func(*plain_args, **plain_kwargs)
        except Exception as error:  # errors of other kinds are raised by the plan
            return _Meeting(str(error) if _SAYS_SO in str(error) else "", False)
        return _Meeting("", reads_what_it_writes(func, lying))
