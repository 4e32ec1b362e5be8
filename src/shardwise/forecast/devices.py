"""torch.cuda as a script sees it whose rank is played: the device that the estimate is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from shardwise.forecast.hardware import Hardware
from shardwise.forecast.memory import Tracker

_NOTHING = (
    *("set_device", "synchronize", "empty_cache", "ipc_collect", "init", "reset_peak_memory_stats"),
    *("reset_max_memory_allocated", "set_per_process_memory_fraction", "manual_seed", "manual_seed_all", "seed"),
)


@contextmanager
def played_device(kind: str, place: int, count: int, hardware: Hardware, tracker: Tracker) -> Iterator[None]:
    """Inside, functions of torch.cuda answer for the device that is played. Other kinds of device stay as they are.

    Args:
        kind: The kind of device, as "cuda".
        place, count: The number of the device on its machine, and how many there are.
        hardware: What it is.
        tracker: Knows what is allocated.
    """
    if torch.device(kind).type != "cuda":
        yield
        return
    with ExitStack() as stack:
        for name, function in _answers(place, count, hardware, tracker).items():
            if hasattr(torch.cuda, name):
                stack.enter_context(mock.patch.object(torch.cuda, name, function))
        yield


def _answers(place: int, count: int, hardware: Hardware, tracker: Tracker) -> dict[str, Callable[..., Any]]:
    room = int(hardware.memory.value)
    properties = SimpleNamespace(name=hardware.name, total_memory=room, major=9, minor=0)
    alive, peak = (lambda device=None: tracker.alive()), (lambda device=None: tracker.most())
    found: dict[str, Callable[..., Any]] = dict.fromkeys(_NOTHING, lambda *args, **kwargs: None)
    return found | {
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: count,
        "current_device": lambda: place,
        "get_device_name": lambda device=None: hardware.name,
        "get_device_properties": lambda device=None: properties,
        "memory_allocated": alive,
        "memory_reserved": alive,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "mem_get_info": lambda device=None: (room - tracker.alive(), room),
    }
