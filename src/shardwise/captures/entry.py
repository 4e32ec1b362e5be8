"""The arguments and results of a captured call: what tells calls apart, and how plain tensors come out and go in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwise.captures.differentiable import used_up
from shardwise.comm.rank_tensor import RankTensor, unique
from shardwise.context import is_strict
from shardwise.engine import autocast
from shardwise.protocols import Item
from shardwise.random.generator import stream
from shardwise.wrapper import Wrapper, wrap, wrapper_of


class NotHashable(Exception):
    """An argument that calls cannot be told apart by."""


def modes() -> tuple[Hashable, ...]:
    """What holds around a call and changes what ops do."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast.state() if autocast.is_on() else None,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        stream(),
        is_strict(),
    )


def key_of(leaves: Sequence[Any]) -> tuple[Hashable, ...]:
    """What tells the arguments of one call from those of another."""
    return tuple(map(_key, leaves))


def _key(leaf: Item) -> Hashable:
    kind = type(leaf)
    if isinstance(leaf, Wrapper):
        needs_grad = leaf.requires_grad
        return kind, leaf._layout, leaf._offset, needs_grad and (leaf.is_leaf, leaf.is_leaf and leaf.grad is None)
    if isinstance(leaf, RankTensor):
        distinct = unique(leaf.ranks)
        place = {id(value): i for i, value in enumerate(distinct)}
        return kind, tuple(place[id(v)] for v in leaf.ranks), tuple(map(_plain_key, distinct))
    if isinstance(leaf, torch.Tensor):
        return kind, _plain_key(leaf)
    try:
        hash(leaf)
    except TypeError:
        raise NotHashable(f"an argument of type {kind.__name__} has no hash") from None
    return kind, leaf


def _plain_key(t: torch.Tensor) -> Hashable:
    needs_grad = t.requires_grad and (t.is_leaf, t.is_leaf and t.grad is None)
    return t.shape, t.stride(), t.dtype, t.device, needs_grad, t.is_conj(), t.is_neg()


def plain_of(leaf: Item) -> list[torch.Tensor]:
    """The distinct plain tensors of an argument."""
    if isinstance(leaf, Wrapper):
        return list(leaf._layout.mesh.comm.values(leaf._local))
    if isinstance(leaf, RankTensor):
        return unique(leaf.ranks)
    return [leaf] if isinstance(leaf, torch.Tensor) else []


def plain_inputs(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """The plain tensors of all arguments, in order."""
    if not any(isinstance(leaf, RankTensor) for leaf in leaves):  # the way of every warm call
        found: list[torch.Tensor] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                found += plain_of(leaf)
        return found
    return [value for leaf in leaves for value in plain_of(leaf)]


def as_own_object(leaf: Item) -> Item:
    """An argument as an object of its own with the same memory and graph: nothing that is remembered of the argument is
    found. Leaves that take a gradient are themselves."""
    if not isinstance(leaf, torch.Tensor) or (leaf.requires_grad and leaf.is_leaf):
        return leaf
    if isinstance(leaf, Wrapper):
        comm = leaf._layout.mesh.comm
        values = [_alias(value) for value in comm.values(leaf._local)]
        return wrap(comm.rebuild(leaf._local, values), leaf._layout, leaf._offset)
    if isinstance(leaf, RankTensor):
        found = {id(value): _alias(value) for value in unique(leaf.ranks)}
        return RankTensor([found[id(value)] for value in leaf.ranks])
    return _alias(leaf)


def _alias(value: torch.Tensor) -> torch.Tensor:
    return value.view_as(value) if value.requires_grad else value.detach()


# -- results ---------------------------------------------------------------------------------------------------------
Build = Callable[[Sequence[torch.Tensor]], Any]


class Results:
    """How the results of a call are put together from plain tensors, and from arguments that are handed back."""

    def __init__(self, result: Item, given: Sequence[Any]) -> None:
        leaves, self.spec = tree_flatten(result)
        self.tensors: list[torch.Tensor] = []
        self.are_used_up: list[bool] = []  # which of them the call has differentiated itself
        same = {id(leaf): i for i, leaf in enumerate(given) if isinstance(leaf, torch.Tensor)}
        self._parts: list[tuple[Build | None, int | None, Any]] = []
        for leaf in leaves:
            at = same.get(id(leaf))
            build = None if at is not None else self._builder(leaf)
            self._parts.append((build, at, leaf if build is None and at is None else None))

    def _builder(self, leaf: Item) -> Build | None:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, torch.nn.Parameter):
            return None  # a number, or an object that outlives the call
        first = len(self.tensors)
        if isinstance(leaf, Wrapper):
            comm, layout, offset = leaf._layout.mesh.comm, leaf._layout, leaf._offset
            held = comm.structure(leaf._local)
            values = comm.values(leaf._local)
            self.tensors += values
            count, make = len(values), wrapper_of(layout)
            if not comm.simulated:
                return lambda plain: make(plain[first], offset)
            return lambda plain: make(comm.assemble(held, plain[first : first + count]), offset)
        if isinstance(leaf, RankTensor):
            distinct = unique(leaf.ranks)
            place = {id(value): i for i, value in enumerate(distinct)}
            order = [place[id(value)] for value in leaf.ranks]
            self.tensors += distinct
            return lambda plain: RankTensor([plain[first + i] for i in order])
        self.tensors.append(leaf)
        return lambda plain: plain[first]

    def build(self, plain: Sequence[torch.Tensor], given: Sequence[Any]) -> Item:
        """The results of a call with these plain tensors and arguments."""
        if any(self.are_used_up):
            plain = [used_up(t) if is_one else t for t, is_one in zip(plain, self.are_used_up, strict=True)]
        parts = [
            build(plain) if build is not None else given[at] if at is not None else value
            for build, at, value in self._parts
        ]
        return tree_unflatten(parts, self.spec)


def held_elsewhere(box: list[Any], own: list[Any], given: Sequence[Any], has_place: Callable[[Any], bool]) -> str:
    """Why a call cannot be repeated whose results or arguments somebody keeps: what is kept would be of the first call.

    References to them are counted against those to objects that nobody else knows, in the same containers.

    Args:
        box: The result of the call, which has no other name.
        own: The arguments that it was given, which are in no other list.
        given: The program's own arguments; where one was handed on itself, others may have it.
        has_place: Whether a plain tensor was there before, or is a gradient: others have it rightly.
    """
    leaves, spec = tree_flatten(box[0])
    probes: dict[int, object] = {}
    twins = [probes.setdefault(id(leaf), object()) for leaf in leaves]
    probes.clear()
    twin_box = [tree_unflatten(twins, spec)]
    known = {*map(id, own)}
    for count, twin_count, leaf in zip(_counts(leaves), _counts(twins), leaves, strict=True):
        if count > twin_count and isinstance(leaf, torch.Tensor) and id(leaf) not in known:
            if all(map(has_place, plain_of(leaf))):
                continue
            return f"a result of shape {tuple(leaf.shape)} is kept beyond the call"
    del twin_box, leaves
    returned = {*map(id, tree_flatten(box[0])[0])}
    twins = [object() for _ in own]
    for count, twin_count, leaf, outer in zip(_counts(own), _counts(twins), own, given, strict=True):
        count -= type(leaf) is torch.Tensor  # the tape has it
        if count > twin_count and isinstance(leaf, torch.Tensor) and leaf is not outer and id(leaf) not in returned:
            return f"an argument of shape {tuple(leaf.shape)} is kept beyond the call"
    return ""


def _counts(items: list[Any]) -> list[int]:
    return [sys.getrefcount(item) for item in items]


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    """The arguments as a flat list."""
    return tree_flatten((args, kwargs))
