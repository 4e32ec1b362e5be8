"""The arguments and results of a captured call: what tells calls apart, and how plain tensors come out and go in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwise.captures.differentiable import used_up
from shardwise.comm.rank_tensor import RankTensor, unique
from shardwise.context import is_strict
from shardwise.engine import autocast
from shardwise.engine.aliasing import COPIES, copied_from
from shardwise.errors import CaptureError
from shardwise.protocols import Item
from shardwise.random.generator import stream
from shardwise.torch_private.autograd import is_saving_for_own_hooks, is_transforming
from shardwise.torch_private.tensors import DeviceMode, attention_kernels, function_modes, storage_id
from shardwise.wrapper import Wrapper, notes_of, storage_id_of, wrap, wrapper_of


class NotHashable(Exception):
    """An argument that calls cannot be told apart by."""


def modes() -> tuple[Hashable, ...]:
    """What holds around a call and changes what ops do."""
    if torch.is_anomaly_enabled():
        raise NotHashable("anomalies are looked for (torch.autograd.detect_anomaly), where autograd has no part")
    if is_transforming():
        raise NotHashable("a transform of torch.func, or a level of forward-mode differentiation, is around the call")
    if is_saving_for_own_hooks():
        raise NotHashable("hooks take what autograd keeps (torch.autograd.graph.saved_tensors_hooks)")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast.state() if autocast.is_on() else None,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        stream(),
        is_strict(),
        attention_kernels(),
        _functions_are_changed_by(),
    )


def _functions_are_changed_by() -> tuple[Hashable, ...]:
    """The function modes around a call. `torch.device(...)` is one whose effect is in what is written down."""
    found = []
    for mode in function_modes():
        if isinstance(mode, DeviceMode):
            found.append(mode.device)  # type: ignore[attr-defined]
        elif not type(mode).__module__.startswith("shardwise."):
            raise NotHashable(f"a torch function mode, {type(mode).__name__}, is on")
    return tuple(found)


def key_of(leaves: Sequence[Any]) -> tuple[Hashable, ...]:
    """What tells the arguments of one call from those of another: each by itself, and which are the same object."""
    return *map(_key, leaves), _repeated(leaves)


def _repeated(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Per tensor the place of the first one that is the same object; empty if all are different."""
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    first: dict[int, int] = {}
    found = tuple(first.setdefault(id(leaves[i]), i) for i in at)
    return () if len(first) == len(found) else found


def _key(leaf: Item) -> Hashable:
    kind = type(leaf)
    if isinstance(leaf, Wrapper):
        needs_grad, local = leaf.requires_grad, leaf._layout.mesh.comm.first(leaf._local)
        grad = (leaf.is_leaf, leaf.is_leaf and leaf.grad is None) if needs_grad else local.grad is None
        own = _notes(leaf) if len(leaf.__dict__) > _OF_ALL else ()
        return kind, leaf._layout, leaf._offset, grad, local.is_conj(), local.is_neg(), own
    if isinstance(leaf, RankTensor):
        distinct = unique(leaf.ranks)
        place = {id(value): i for i, value in enumerate(distinct)}
        return kind, tuple(place[id(v)] for v in leaf.ranks), tuple(map(_plain_key, distinct))
    if isinstance(leaf, torch.Tensor):
        return kind, _plain_key(leaf)
    if kind in _BY_VALUE:
        return kind, leaf
    found = _key_of_object(leaf)
    try:
        hash(found)
    except TypeError:
        raise NotHashable(f"an argument of type {kind.__name__} has no hash") from None
    return found


_OF_ALL = 2  # attributes that every distributed tensor has: its local value and its layout


def _notes(tensor: torch.Tensor) -> Hashable:
    """The attributes that the program has set on a tensor."""
    return tuple((name, _key_of_note(value)) for name, value in notes_of(tensor).items())


def _key_of_note(value: Item) -> Hashable:
    return _Itself(value) if isinstance(value, torch.Tensor) else _key(value)


def attributes_of(leaves: Iterable[Any]) -> list[Any]:
    """What the attributes hold that the program has set on tensors among the arguments."""
    return [value for leaf in leaves if isinstance(leaf, torch.Tensor) for value in notes_of(leaf).values()]


_BY_VALUE = frozenset(
    {int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)


def _key_of_object(leaf: Item) -> Hashable:
    """What tells an object from others that may call themselves equal to it: `==` of a class need not look at
    everything that a function can read."""
    kind = type(leaf)
    if kind in _BY_VALUE or kind.__eq__ is object.__eq__:  # type: ignore[comparison-overlap]
        return kind, leaf
    if kind is float or kind is complex:
        return kind, repr(leaf)  # 0.0 and -0.0 differ, and each nan is like the others
    if kind is tuple:
        return kind, *map(_key_of_object, leaf)
    if isinstance(leaf, np.generic):
        return kind, leaf.tobytes()
    if is_dataclass(leaf) and vars(leaf).keys() == {f.name for f in fields(leaf)}:
        return kind, *((name, _key_of_object(value)) for name, value in vars(leaf).items())
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return kind, leaf, repr(leaf)
    return kind, _Itself(leaf)


class _Itself:
    """An object that is equal to nothing but itself."""

    __slots__ = ("_item",)

    def __init__(self, item: Item) -> None:
        self._item = item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._item is self._item

    def __hash__(self) -> int:
        return id(self._item)


def kind_of(leaves: Sequence[Any]) -> tuple[Hashable, ...]:
    """What calls have in common that differ in numbers and other objects among their arguments alone."""
    return tuple(_key(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf),) for leaf in leaves)


def _plain_key(t: torch.Tensor) -> Hashable:
    grad = (t.is_leaf, t.is_leaf and t.grad is None) if t.requires_grad else t.grad is None
    return t.shape, t.stride(), t.dtype, t.device, grad, t.is_conj(), t.is_neg(), _notes(t) if t.__dict__ else ()


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
    """An argument as an object of its own with the same memory, graph and attributes of the program's: nothing else
    that is remembered of the argument is found. Parameters, and leaves that take or have a gradient, are themselves."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, torch.nn.Parameter):
        return leaf
    if leaf.is_leaf and (leaf.requires_grad or leaf.grad is not None):
        return leaf
    own = _as_own_object(leaf)
    own.__dict__.update(notes_of(leaf))
    return own


def _as_own_object(leaf: torch.Tensor) -> torch.Tensor:
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

    def __init__(self, result: Item, given: Sequence[Any], known: Iterable[torch.Tensor] = ()) -> None:
        leaves, self.spec = tree_flatten(result)
        self._lasting = {*map(id, known)}  # objects that outlive the call
        self.tensors: list[torch.Tensor] = []
        self.are_used_up: list[bool] = []  # which of them the call has differentiated itself
        same = {id(leaf): i for i, leaf in enumerate(given) if isinstance(leaf, torch.Tensor)}
        self._parts: list[tuple[Build | None, int | None, Any]] = []
        self._again: dict[int, int] = {}  # places of results that are the same object as an earlier one
        first: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            if first.setdefault(id(leaf), place) != place and isinstance(leaf, torch.Tensor):
                self._again[place] = first[id(leaf)]
                self._parts.append((None, None, None))
                continue
            at = same.get(id(leaf))
            build = None if at is not None else self._builder(leaf)
            self._parts.append((build, at, leaf if build is None and at is None else None))

    def _builder(self, leaf: Item) -> Build | None:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, torch.nn.Parameter) or id(leaf) in self._lasting:
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

    @property
    def hands_back(self) -> bool:
        """Whether an argument is among the results."""
        return any(at is not None for _, at, _ in self._parts)

    def build(self, plain: Sequence[torch.Tensor], given: Sequence[Any]) -> Item:
        """The results of a call with these plain tensors and arguments."""
        if any(self.are_used_up):
            plain = [used_up(t) if is_one else t for t, is_one in zip(plain, self.are_used_up, strict=True)]
        parts = [
            build(plain) if build is not None else given[at] if at is not None else value
            for build, at, value in self._parts
        ]
        for place, first in self._again.items():
            parts[place] = parts[first]
        return tree_unflatten(parts, self.spec)


def holds_known_container(result: Item, is_known: Callable[[object], bool]) -> bool:
    """Whether a result is, or has in it, a list or dict that was there before: a replay would give a copy of it."""
    if isinstance(result, (list, tuple)):
        own = isinstance(result, list) and is_known(result)
        return own or any(holds_known_container(item, is_known) for item in result)
    if isinstance(result, dict):
        return is_known(result) or any(holds_known_container(item, is_known) for item in result.values())
    return False


def view_in_other_memory(result: Item, known: Iterable[torch.Tensor]) -> str:
    """Why a call cannot be repeated that returns a view in memory of its own, since data had to move for it: a write
    to such a view is repeated on what it is a view of. Empty if that is of the call alone.

    Args:
        result: The result of the call.
        known: Plain tensors that were there before.
    """
    leaves = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Wrapper)] if COPIES else []
    of = [(leaf, copied_from(leaf)) for leaf in leaves]
    if not any(found for _, found in of):
        return ""
    theirs = {*map(storage_id, known), *map(storage_id_of, leaves)}
    for leaf, found in of:
        if found is not None and storage_id_of(found[0]) in theirs:
            return f"a result of shape {tuple(leaf.shape)} is a copied view of a tensor that others have"
    return ""


def with_tensors_of_caller(result: Item, swap: dict[int, Any]) -> Item:
    """A result with the arguments in it as the objects that the caller has passed."""
    leaves, spec = tree_flatten(result)
    if not any(id(leaf) in swap for leaf in leaves):
        return result
    return tree_unflatten([swap.get(id(leaf), leaf) for leaf in leaves], spec)


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


def hand_back_changes(given: Item, taken: Item, swap: dict[int, Any]) -> bool:
    """Do to the lists and dicts of the caller what a call has done to the copies that it was given.

    Args:
        given: What the caller has passed.
        taken: The copy.
        swap: By the ids of tensors that were handed on as other objects: the caller's.

    Returns:
        Whether anything was changed, so that the call cannot be repeated.
    """
    if type(given) is not type(taken) or not isinstance(given, (list, tuple, dict)):
        return swap.get(id(taken), taken) is not given
    pairs = (given.values(), taken.values()) if isinstance(given, dict) else (given, taken)
    if len(given) == len(taken) and list(given) == list(taken) if isinstance(given, dict) else len(given) == len(taken):
        changed = [hand_back_changes(one, other, swap) for one, other in zip(*pairs, strict=True)]
        if not any(changed) or isinstance(given, tuple):
            return any(changed)
    own = lambda item: swap.get(id(item), item)  # noqa: E731
    if isinstance(given, dict):
        found = {key: own(value) for key, value in taken.items()}
        given.clear()
        given.update(found)
    elif isinstance(given, list):
        given[:] = map(own, taken)
    return True


def hand_back_tensors(own: Sequence[Any], given: Sequence[Any]) -> str:
    """Do to the tensors of the caller what a call has done to the objects that stood for them, beyond their values.

    Returns:
        Why the call cannot be repeated; empty if nothing was done.

    Raises:
        CaptureError: Where it cannot be done to a tensor from outside.
    """
    reason = ""
    for mine, leaf in zip(own, given, strict=True):
        if not isinstance(leaf, torch.Tensor) or mine is leaf:
            continue
        if notes_of(mine) != notes_of(leaf):
            leaf.__dict__.update(notes_of(mine))
            reason = f"an attribute of an argument of shape {tuple(leaf.shape)} is set in the call"
        if _shape_of(mine) != _shape_of(leaf) or (mine.requires_grad and not mine.is_leaf and not leaf.requires_grad):
            raise CaptureError(
                f"capture: an argument of shape {tuple(leaf.shape)} gets another shape or layout in the call, or the "
                f"graph of what is written into it; do that outside of the captured function"
            )
        if mine.requires_grad and not leaf.requires_grad:
            leaf.requires_grad_()
            leaf.grad = mine.grad
            reason = f"an argument of shape {tuple(leaf.shape)} is made to take gradients in the call"
    return reason


def _shape_of(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    layout = tensor._layout if isinstance(tensor, Wrapper) else None
    return (layout,) if layout is not None else (tensor.shape, tensor.stride())


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    """The arguments as a flat list."""
    return tree_flatten((args, kwargs))
