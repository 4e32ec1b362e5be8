"""What torch.autocast does to a call. It casts the arguments of some ops on their way down, which the ranks' own calls
repeat; but a pending sum must be finished before it is rounded, and the parts of a program are not the op itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from shardwise.engine.call_shape import CallShape, fetch, meta_like, put
from shardwise.engine.plan import Plan
from shardwise.strategy.spec import Factors
from shardwise.torch_private import ignore_torch_function, is_any_autocast_enabled, make_wrapper

is_on: Callable[[], bool] = is_any_autocast_enabled
Casts = dict[int, torch.dtype]  # by a tensor's number in the call
INSIDE: Casts = {-1: torch.float32}  # those of an op that is made of others, some of which are cast
_DEVICES = ("cpu", "cuda")


def state() -> tuple[Any, ...]:
    """What autocast would do to a call, for the key of its plan."""
    return tuple(torch.get_autocast_dtype(device) for device in _DEVICES if torch.is_autocast_enabled(device))


@contextmanager
def off() -> Iterator[None]:
    """No autocast: what there was to cast has been."""
    devices = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    for device in devices:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in devices:
            torch.set_autocast_enabled(device, True)


class _Probe(torch.Tensor):
    """A tensor of a device without values, which notes what autocast makes of it."""

    _meta: torch.Tensor
    _watch: _Watch

    @staticmethod
    def make(meta: torch.Tensor, watch: _Watch) -> _Probe:
        probe = make_wrapper(_Probe, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=watch.device)
        probe._meta, probe._watch = meta, watch
        return probe

    __torch_function__ = ignore_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found: list[_Probe] = []
        tree_map_only(_Probe, found.append, (args, kwargs or {}))
        watch = found[0]._watch
        watch.see(func, found, kwargs or {})
        as_meta = lambda t: t._meta if isinstance(t, _Probe) else t.to("meta")  # noqa: E731
        args, kwargs = tree_map_only(torch.Tensor, as_meta, (args, dict(kwargs or {})))
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return tree_map_only(torch.Tensor, lambda meta: _Probe.make(meta, watch), func(*args, **kwargs))


class _Watch:
    """What a call does, op by op with the dtypes it has, and which of its own tensors it casts before anything else."""

    def __init__(self, call: CallShape, given: Casts | None = None) -> None:
        self.device = call.layouts[0].device
        self.casts: Casts = {}
        self.ops: list[Any] = []
        dtypes = {**dict(enumerate(layout.dtype for layout in call.layouts)), **(given or {})}
        metas = [meta_like(layout.replace(dtype=dtypes[i])) for i, layout in enumerate(call.layouts)]
        self.probes = [_Probe.make(meta, self) for meta in metas]
        args, kwargs = call.with_tensors(self.probes)
        with torch.no_grad():
            call.func(*args, **kwargs)

    def see(self, func: Any, given: Sequence[_Probe], kwargs: dict[str, Any]) -> None:
        number = next((i for i, probe in enumerate(self.probes) if probe is given[0]), None)
        if func is torch.ops.aten._to_copy.default and number is not None and len(self.casts) == len(self.ops):
            self.casts[number] = kwargs.get("dtype", given[0].dtype)
        self.ops.append((func, [probe._meta.dtype for probe in given]))


def casts_of(call: CallShape) -> Casts | None:
    """Which tensors of a call autocast casts, and to what, if all else goes as it does without autocast, or INSIDE;
    None where torch cannot tell without values."""
    try:
        watch = _Watch(call)
        with off():
            if _Watch(call).ops == watch.ops:
                return {}
            ops = _Watch(call, watch.casts).ops
    except Exception:  # a wrong call raises again when it is planned
        return None
    return watch.casts if watch.ops[len(watch.casts) :] == ops else INSIDE


def done_by_ranks(spec: Any, call: CallShape, casts: Casts) -> bool:
    """Whether the ranks' own calls are cast as the whole one is: they are that op, and nothing cast is pending."""
    alone = isinstance(spec, Factors) and spec.local is None and len(spec.outputs) == 1
    return alone and not any(call.layouts[i].is_partial for i in casts)


def cast_first(func: Any, call: CallShape, casts: Casts) -> Plan:
    """The call on tensors that are cast already, with autocast off."""
    targets = [(call.paths[i], dtype) for i, dtype in casts.items()]

    def run(args: Sequence[Any], kwargs: dict[str, Any], locals: Any, local_kwargs: Any) -> Any:
        args, kwargs = list(args), dict(kwargs)
        with off():
            for path, dtype in targets:
                put(args, kwargs, path, fetch(args, kwargs, path).to(dtype))
            return func(*args, **kwargs)

    return run
