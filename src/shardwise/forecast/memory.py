"""The memory of the rank that is played: every storage from its allocation to its end."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from shardwise.comm.without_values import Absent
from shardwise.forecast.allocator import Step, played
from shardwise.torch_private.tensors import FakeTensor, storage_number
from shardwise.wrapper import Wrapper

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, GATHERED, BUFFERS = "activations", "gathered parameters", "exchange buffers"
INPUTS, TEMPORARY = "inputs", "temporary"
CATEGORIES = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, GATHERED, BUFFERS, INPUTS, TEMPORARY)
ROUNDING = 512  # bytes: CUDA's caching allocator hands out multiples of it


def rounded(nbytes: int) -> int:
    """What CUDA's caching allocator counts for a block of so many bytes."""
    return -(-nbytes // ROUNDING) * ROUNDING


@dataclass(eq=False)
class Block:
    """One storage, as long as it lives."""

    size: int
    category: str
    line: str
    module: str
    fixed: bool = False  # whether its category is known for sure


@dataclass(frozen=True)
class Change:
    """At some moment a block has another size (0: it is gone)."""

    moment: int
    block: Block
    delta: int


def takes_memory(x: torch.Tensor) -> bool:
    """Whether a rank would have it in memory: plans are made with tensors that nobody has."""
    return x.device.type != "meta"


def plain_parts(value: object) -> list[FakeTensor]:
    """The tensors without values that a tensor is made of."""
    if isinstance(value, Wrapper):
        held = value.__dict__.get("_local", None)
        found = [held] if isinstance(held, torch.Tensor) else []
        return [part for x in found for part in plain_parts(x)]
    return [value] if isinstance(value, FakeTensor) and takes_memory(value) else []


class Tracker:
    """Knows which storages are alive, and notes every change with the moment at which it happened."""

    def __init__(self, now: Callable[[], int], mode: Absent) -> None:
        self.now, self.mode, self.changes = now, mode, list[Change]()
        self._alive: dict[int, tuple[weakref.ref[Any], Block]] = {}  # by the address of the storage
        self._now = self._most = 0

    def see(self, tensor: torch.Tensor, category: str, line: str = "", module: str = "") -> None:
        """Note the storage of a tensor, if it is new or has another size."""
        storage = tensor.untyped_storage()
        self.see_storage(storage, category, line, module)

    def see_storage(self, storage: torch.UntypedStorage, category: str, line: str = "", module: str = "") -> None:
        key, size = storage_number(storage), rounded(storage.nbytes())
        known = self._alive.get(key)
        if known is not None:
            self._resize(known[1], size)
            return
        block = Block(0, category, line, module)
        self._alive[key] = weakref.ref(storage, lambda _, key=key: self._gone(key)), block  # type: ignore[misc]
        self._resize(block, size)

    def _gone(self, key: int) -> None:
        known = self._alive.pop(key, None)
        if known is not None:
            self._resize(known[1], 0)

    def _resize(self, block: Block, size: int) -> None:
        if size != block.size:
            self.changes.append(Change(self.now(), block, size - block.size))
            self._now += size - block.size
            self._most = max(self._most, self._now)
            block.size = size

    def alive(self) -> int:
        """Bytes that are allocated now."""
        return self._now

    def most(self) -> int:
        """The most bytes that were allocated at once."""
        return self._most

    def forget_past(self, category: str) -> None:
        """What is alive counts as if it had always been; what nobody claimed is of this category."""
        self._most = self._now
        blocks = [block for _, block in self._alive.values() if block.size]
        for block in blocks:
            if not block.fixed:
                block.category = category
        self.changes[:] = [Change(self.now(), block, block.size) for block in blocks]

    def knows(self, storage: torch.UntypedStorage) -> bool:
        return storage_number(storage) in self._alive

    def block_of(self, storage: torch.UntypedStorage) -> Block | None:
        known = self._alive.get(storage_number(storage))
        return None if known is None else known[1]

    def claim(self, tensors: Iterable[object], category: str, over: Iterable[str] = ()) -> None:
        """What these tensors hold is of this category, from their allocation on."""
        for tensor in tensors:
            for part in plain_parts(tensor):
                if part.fake_mode is not self.mode:  # of another outlined mesh
                    continue
                storage = part.untyped_storage()
                self.see_storage(storage, category)
                block = self.block_of(storage)
                if block is not None and (not block.fixed or block.category in over):
                    block.category, block.fixed = category, True


def _in_order(changes: Iterable[Change]) -> list[Change]:
    """What an optimizer keeps is there before the step, as it is from the second step on."""
    first, rest = list[Change](), list[Change]()
    for change in changes:
        if change.block.category == STATE and change.delta > 0:
            first.append(replace(change, moment=-1))
        else:
            rest.append(change)
    return first + rest


class Memory:
    """The memory of one rank over a step.

    Args:
        changes: In the order of the program.
        is_warm: Whether the program has stepped before its last step. Then a rank's allocator has the optimizer's state
            where that order puts it: amid what the first step has left.

    Attributes:
        peak: The most bytes that are alive at once.
        moment: When that is: the number of the op.
        categories: Bytes at that moment, by category.
        lines, modules: The same, by the line of the program and by the module that allocated.
        over_time: (moment, bytes alive) after every change.
        start, end: Bytes alive before and after the step; before it with what the optimizer keeps.
        reserved: What CUDA's caching allocator has taken from the device by then, where it is played.
    """

    def __init__(self, changes: Iterable[Change], is_warm: bool = False) -> None:
        told = list(changes)
        changes = _in_order(told)
        alive, self.peak, at = 0, 0, -1
        self.over_time: list[tuple[int, int]] = []
        for i, change in enumerate(changes):
            alive += change.delta
            self.over_time.append((change.moment, alive))
            if alive > self.peak:
                self.peak, at = alive, i
        self.end = alive
        self._changes = told if is_warm else changes
        self.start = sum(change.delta for change in changes if change.moment < 0)
        self.moment = changes[at].moment if at >= 0 else 0
        sizes: Counter[Block] = Counter()
        for change in changes[: at + 1]:
            sizes[change.block] += change.delta
        self.categories = dict.fromkeys(CATEGORIES, 0)
        self.lines: Counter[str] = Counter()
        self.modules: Counter[str] = Counter()
        for block, size in sizes.items():
            if size:
                self.categories[block.category] += size
                self.lines[block.line or block.category] += size
                self.modules[block.module or block.category] += size

    @cached_property
    def reserved(self) -> int:
        """Bytes that CUDA's caching allocator takes from the device for these blocks, by its rules (`allocator.py`)."""
        return self.reserved_on({}, is_expandable())

    def reserved_on(self, streams: Mapping[str, str], is_expandable: bool) -> int:
        """The same where blocks of some categories are allocated on streams of their own, whose memory no other uses.

        Args:
            streams: The streams by category; of the others it is the program's own.
            is_expandable: Whether the allocator's segments are expandable.
        """
        return played(self._blocks(streams), is_expandable).most

    def fits(self, room: float) -> bool:
        """Whether the allocator gets along with so many bytes of the device. It gives free segments back before it
        fails, and of expandable ones every free part."""
        if self.peak > room:
            return False
        return is_expandable() or not played(self._blocks({}), False, room).failed

    def _blocks(self, streams: Mapping[str, str]) -> Iterator[Step]:
        sizes: Counter[Block] = Counter()
        for change in self._changes:
            sizes[change.block] += change.delta
            yield change.block, sizes[change.block], streams.get(change.block.category, "")


def is_expandable() -> bool:
    """Whether the environment asks for expandable segments, as it does on a rank."""
    said = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "expandable_segments:true" in said.replace(" ", "").lower()
