"""torch.autocast, which casts the arguments of some ops before it calls them.

Where each rank calls the same op on its local tensors, autocast does the same there. This is wrong where an operand is
a Partial sum, which must be summed before it is rounded, and where the op is computed by a program of other ops. There
we cast first, and run the call with autocast off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from shardwise.engine.call_shape import CallShape, fetch, put
from shardwise.engine.plan import Plan
from shardwise.strategy.memory import meta_like
from shardwise.strategy.spec import Factors
from shardwise.torch_private.tensors import ignore_torch_function, is_any_autocast_enabled, make_wrapper

is_on: Callable[[], bool] = is_any_autocast_enabled
Casts = dict[int, torch.dtype]  # which tensors of a call are cast, by their number in it, and to what
INSIDE: Casts = {-1: torch.float32}  # marks a function that torch computes by several ops, of which some are cast
_DEVICES = ("cpu", "cuda")


def state() -> tuple[Any, ...]:
    """The present state of autocast, for the key of a plan: per device where it is on, the dtype it casts to."""
    return tuple(torch.get_autocast_dtype(device) for device in _DEVICES if torch.is_autocast_enabled(device))


@contextmanager
def off() -> Iterator[None]:
    """In this context autocast is off: its casts are done already."""
    devices = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    try:
        for device in devices:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device in devices:
            torch.set_autocast_enabled(device, True)


class _Probe(torch.Tensor):
    """A tensor without values that claims to be on a device, and reports each op that is called on it."""

    _meta: torch.Tensor
    _watch: _Watch

    @staticmethod
    def make(meta: torch.Tensor, watch: _Watch) -> _Probe:
        probe = make_wrapper(_Probe, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=watch.device)
        probe._meta, probe._watch = meta, watch
        return probe

    __torch_function__ = ignore_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None) -> Any:
        probes: list[_Probe] = []
        tree_map_only(_Probe, probes.append, (args, kwargs or {}))
        watch = probes[0]._watch
        watch.note(func, probes, kwargs or {})
        as_meta = lambda t: t._meta if isinstance(t, _Probe) else t.to("meta")  # noqa: E731
        args, kwargs = tree_map_only(torch.Tensor, as_meta, (args, dict(kwargs or {})))
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return tree_map_only(torch.Tensor, lambda meta: _Probe.make(meta, watch), func(*args, **kwargs))


class _Watch:
    """Observes a call on probes: the ops that it runs, the dtypes of their tensors, and which tensors of the call are
    cast first. The tensors in `already` are cast before the call."""

    def __init__(self, call: CallShape, already: Casts | None = None) -> None:
        self.device = call.layouts[0].device
        self.casts: Casts = {}
        self.ops: list[Any] = []
        dtypes = {**dict(enumerate(layout.dtype for layout in call.layouts)), **(already or {})}
        metas = [meta_like(layout.replace(dtype=dtypes[i])) for i, layout in enumerate(call.layouts)]
        self.probes = [_Probe.make(meta, self) for meta in metas]
        args, kwargs = call.with_tensors(self.probes)
        with torch.no_grad():
            call.func(*args, **kwargs)

    def note(self, func: Any, probes: Sequence[_Probe], kwargs: dict[str, Any]) -> None:
        number = next((i for i, probe in enumerate(self.probes) if probe is probes[0]), None)
        if func is torch.ops.aten._to_copy.default and number is not None and len(self.casts) == len(self.ops):
            self.casts[number] = kwargs.get("dtype", probes[0].dtype)
        self.ops.append((func, [probe._meta.dtype for probe in probes]))


def _draws_undone(device: torch.device) -> AbstractContextManager[None]:
    """In this context random draws are undone at the end, since the real call draws the same numbers again."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=())
    return torch.random.fork_rng([torch.get_device_module(device).current_device()], device_type=device.type)


def casts_of(call: CallShape) -> Casts | None:
    """Which tensors of a call autocast casts, and to what; INSIDE if it casts something else than the call's own
    tensors; None where the call cannot be tried without values."""
    try:
        with _draws_undone(call.layouts[0].device):
            watch = _Watch(call)
            with off():
                if _Watch(call).ops == watch.ops:
                    return {}
                ops = _Watch(call, watch.casts).ops
    except Exception:  # if the call itself is wrong, planning it raises the same error
        return None
    return watch.casts if watch.ops[len(watch.casts) :] == ops else INSIDE


def done_by_ranks(spec: object, call: CallShape, casts: Casts) -> bool:
    """Whether autocast in the ranks' own calls is right: each rank calls exactly this op, and no operand that is cast
    is a Partial sum."""
    alone = isinstance(spec, Factors) and spec.local is None and len(spec.outputs) == 1
    return alone and not any(call.layouts[i].is_partial for i in casts)


def cast_first(func: Any, call: CallShape, casts: Casts) -> Plan:
    """The plan that casts the tensors and makes the call again with autocast off."""
    targets = [(call.paths[i], dtype) for i, dtype in casts.items()]

    def run(args: Sequence[Any], kwargs: dict[str, Any], local_args: Any, local_kwargs: Any) -> Any:
        args, kwargs = list(args), dict(kwargs)
        with off():
            for path, dtype in targets:
                put(args, kwargs, path, fetch(args, kwargs, path).to(dtype))
            return func(*args, **kwargs)

    return run
