"""Writes that plain torch would notice: it keeps operands and results of an op for the op's gradient, and raises in the
backward pass if one was written since. Autograd on the local tensors does the same, except where an op first moves its
operands or is a program of several ops: there it keeps other tensors. In these cases, this file finds out what plain
torch would keep, and watches that.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node, increment_version, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.engine.aliasing import COPIES
from shardwise.engine.call_shape import CallShape, Path, fetch
from shardwise.engine.unseen import Again, TakenAgain, Unchanged
from shardwise.functions import written
from shardwise.layout import Layout
from shardwise.protocols import LocalValue
from shardwise.strategy.memory import meta_like
from shardwise.torch_private.autograd import is_saving_for_hooks
from shardwise.torch_private.tensors import are_transforms_active, storage_id
from shardwise.wrapper import Wrapper, storage_id_of

Plan = Callable[[Sequence[Any], dict[str, Any], list[Any], dict[str, Any]], Any]


_SMALL = 2**12  # elements
_SAYS_NOTHING = "CppFunction"  # the class of autograd nodes that do not show what they keep, such as those of list ops


class Kept(NamedTuple):
    """The numbers of the operands and results that plain torch keeps for the gradient of a call."""

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    nothing: bool = False  # whether it is known to keep no tensor at all, neither one of these nor another
    renewed: frozenset[int] = frozenset()  # operands that the call also writes, which its gradient does not read
    unnoticed: frozenset[int] = frozenset()  # operands of which it keeps aliases that do not notice writes


class watched:
    """A plan whose backward pass raises if what plain torch would have kept was written. It keeps the call's layouts
    and other arguments, but not its tensors.

    Args:
        plan: The plan.
        call: Its call.
        moved: The functions that move the operands, by number; None for a program, which may move anything.
        is_copied: Whether what it computes is copied into its first operand. As a program, it keeps other tensors for
            its gradient than its results.
        may_keep_all: Whether torch may keep all operands and results, whatever its kernels for meta tensors say. Then
            none may be written unseen.
    """

    def __init__(
        self,
        plan: Plan,
        call: CallShape,
        moved: dict[int, Again] | None,
        is_copied: bool = False,
        may_keep_all: bool = False,
    ) -> None:
        self.moved, self.keeps_results = moved, moved is not None and not is_copied
        self.may_keep_all = may_keep_all
        self.plan, self.func, self.name, self.paths = plan, call.func, call.name, call.paths
        self.layouts = call.layouts
        self.call_arguments = call.with_tensors([_Operand(i) for i in range(len(call.layouts))])
        self.kept: dict[tuple[bool, ...], Kept] = {}  # by which operands require grad
        self.elsewhere: dict[Kept, list[bool]] = {}  # of results that torch keeps: whether the ranks keep others

    def __call__(
        self, args: Sequence[Any], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled() or are_transforms_active():
            return self.plan(args, kwargs, local_args, local_kwargs)
        operands = [fetch(args, kwargs, path) for path in self.paths]
        if is_saving_for_hooks():
            kept = self._kept_for(operands)
            # a checkpoint recomputes up to the last kept tensor, and also runs what the program does before that
            with saved_tensors_hooks(_as_it_is, _as_it_is) if kept.nothing else contextlib.nullcontext():
                return self.plan(args, kwargs, local_args, local_kwargs)
        result = self.plan(args, kwargs, local_args, local_kwargs)
        self._watch(operands, result, lambda i: fetch(local_args, local_kwargs, self.paths[i]))
        return result

    def _kept_for(self, operands: Sequence[Wrapper]) -> Kept:
        flags = tuple(_local(tensor).requires_grad for tensor in operands)
        if not any(flags):
            return Kept()
        kept = self.kept.get(flags)
        if kept is None:
            kept = self.kept[flags] = kept_by_torch(self.func, self.call_arguments, self.layouts, flags)
        return kept

    def _watch(self, operands: Sequence[Wrapper], result: object, entered: Callable[[int], LocalValue]) -> None:
        kept = self._kept_for(operands)
        may_keep_all = self.may_keep_all and any(_local(tensor).requires_grad for tensor in operands)
        if not kept.operands and not kept.results and not may_keep_all:
            return
        results = [out for out in tree_flatten(result)[0] if isinstance(out, Wrapper)]
        as_torch = lambda i: i in kept.unnoticed and self.moved is not None and i not in self.moved  # noqa: E731
        seen = [operands[i] for i in kept.operands if not as_torch(i)]
        seen += [results[i] for i in kept.results if i < len(results)]
        check = Check(self.name, seen)
        given = {storage_id(_local(tensor)) for tensor in operands}
        for node in {node for out in results for node in _nodes_of(_local(out), given)}:
            node.register_prehook(check)
        read = [i for i in kept.operands if i not in kept.renewed]
        looks = self._unseen(operands, read, entered)
        if not self.keeps_results:
            made = [results[i] for i in kept.results if i < len(results)]
            made += [operands[i] for i in kept.operands if self.moved is not None and self.paths[i] == (0,)]
            if kept not in self.elsewhere:
                self.elsewhere[kept] = [not _is_kept_by_its_node(_local(result)) for result in made]
            others = itertools.compress(made, self.elsewhere[kept])
            looks += [Unchanged(self.name, result, "gave") for result in others]
        if may_keep_all:
            looks = [Unchanged(self.name, tensor) for tensor in operands if tensor.dtype.is_floating_point]
            looks += [Unchanged(self.name, result, "gave") for result in results]
        for look in looks:  # the ranks' nodes, whichever comes first
            for node in {n for out in results for value in _values(out) for n in _nodes_of(value, given)}:
                node.register_prehook(look)

    def _unseen(
        self, operands: Sequence[Wrapper], kept: Sequence[int], entered: Callable[[int], LocalValue]
    ) -> list[TakenAgain | Unchanged]:
        if self.moved is None:
            return [Unchanged(self.name, operands[i]) for i in kept]
        return [TakenAgain(self.name, operands[i], entered(i), self.moved[i]) for i in kept if i in self.moved]


def _is_kept_by_its_node(local: torch.Tensor) -> bool:
    """Whether the node that made a tensor keeps the tensor itself."""
    return storage_id(local) in map(storage_id, _kept_by(local.grad_fn))


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def watched_from_before(
    func: Callable[..., object], name: str, args: Sequence[object], kwargs: dict[str, object], paths: Sequence[Path]
) -> Iterator[Callable[[object], object]]:
    """The context of a call that writes into its first argument and reads tensors that share its memory: torch keeps
    them as they were before the write, so this write itself makes the backward pass raise. Yields a function that takes
    the call's result and returns it."""
    operands = [fetch(args, kwargs, path) for path in paths]
    flags = [_local(tensor).requires_grad for tensor in operands]
    if not torch.is_grad_enabled() or not any(flags) or is_saving_for_hooks():
        yield lambda result: result
        return
    numbered = iter(range(len(operands)))
    arguments = tree_map_only(Wrapper, lambda _: _Operand(next(numbered)), (tuple(args), kwargs))
    kept = kept_by_torch(func, arguments, [tensor._layout for tensor in operands], flags)
    check = Check(name, [operands[i] for i in kept.operands if paths[i][0] != 0])

    def watch(result: object) -> object:
        refusal = check.refusal()

        def refuse(_: object) -> None:
            raise RuntimeError(refusal)

        written = [out for out in tree_flatten(result)[0] if isinstance(out, Wrapper)]
        for out in written:  # a write to a copied view is repeated on its base
            written += [copy.source for copy in COPIES.get(storage_id_of(out), ())[:1]]
        for node in {node for out in written for node in _nodes_of(_local(out), set())} if refusal else ():
            node.register_prehook(refuse)
        return result

    yield watch


def _nodes_of(local: torch.Tensor, given: set[int]) -> Iterator[Node]:
    """The nodes that compute the gradient of a result. If the result is a view of a tensor that the call made, torch
    gives it another node when it is written, but keeps the node of that tensor."""
    if local.grad_fn is not None:
        yield local.grad_fn
    base = local._base
    if base is not None and base.grad_fn is not None and storage_id(local) not in given:
        yield base.grad_fn


class Check:
    """Called before the gradient of a call is computed: raises if one of the tensors was written since."""

    def __init__(self, name: str, tensors: Sequence[Wrapper]) -> None:
        self.name = name
        # weak references: a freed tensor can no longer be written, and its memory must not be kept
        found = [(tensor, _in_memory(_local(tensor))) for tensor in tensors]
        self.seen = [(weakref.ref(t), t._rebinds, weakref.ref(local), local._version) for t, local in found]

    def __call__(self, _: object) -> None:
        found = self.refusal()
        if found:
            raise RuntimeError(found)

    def refusal(self) -> str:
        """The text of the error to raise; empty if nothing was written."""
        for wrapper, rebinds, local, version in self.seen:
            tensor, value = wrapper(), local()
            writes = 0 if value is None else value._version - version
            writes += 0 if tensor is None else tensor._rebinds - rebinds
            if writes:
                of = "" if tensor is None else f" of shape {list(tensor.shape)}"
                return (
                    f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a distributed tensor{of}, which {self.name} took or gave, was written {writes} times since. "
                    f"Write to its clone() instead, or before {self.name}"
                )
        return ""


def _values(tensor: Wrapper) -> tuple[torch.Tensor, ...]:
    return tensor._layout.mesh.comm.values(tensor._local)


def _local(tensor: Wrapper) -> torch.Tensor:
    return tensor._layout.mesh.comm.first(tensor._local)


def _in_memory(local: torch.Tensor) -> torch.Tensor:
    """The tensor that lives as long as this memory can be written: the base if this is a view, else itself."""
    return local if local._base is None else local._base


@dataclass(frozen=True)
class _Operand:
    """Stands for a tensor among the arguments."""

    index: int


def kept_by_torch(
    func: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    layouts: Sequence[Layout],
    flags: Sequence[bool],
) -> Kept:
    """What plain torch keeps for the gradient of a call, found by recording it on meta tensors or, where sizes depend
    on values and the tensors are small, on zeros. Nothing where torch cannot run the call on those."""
    alias: Callable[[torch.Tensor], torch.Tensor] = torch.ops.aten.alias
    ways = [(meta_like, alias), (meta_like, torch.clone)]  # a view of a leaf cannot be written; copies lose strides
    if sum(math.prod(layout.shape) for layout in layouts) <= _SMALL:
        ways.append((_zeros_like, torch.clone))
    for made, copied in ways:
        try:
            with torch.random.fork_rng(devices=()):
                return _kept_with(made, copied, func, arguments, layouts, flags)
        except Exception:  # it writes, sizes depend on values, or an op has no meta kernel
            continue
    return Kept()


def _zeros_like(layout: Layout) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype).zero_()


def _kept_with(
    made: Callable[[Layout], torch.Tensor],
    copied: Callable[[torch.Tensor], torch.Tensor],
    func: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    layouts: Sequence[Layout],
    flags: Sequence[bool],
) -> Kept:
    packed: list[int] = []

    def note_kept(tensor: torch.Tensor) -> torch.Tensor:  # hooks of the program, as a checkpoint's, see nothing
        packed.append(storage_id(tensor))
        return tensor.detach()  # a result that is kept by its own node would never be freed

    with torch.enable_grad(), saved_tensors_hooks(note_kept, lambda tensor: tensor):
        leaves = [made(layout).requires_grad_(flag) for layout, flag in zip(layouts, flags, strict=True)]
        operands = [copied(leaf) if leaf.requires_grad else leaf for leaf in leaves]
        given, inputs = {storage_id(x) for x in operands}, {x.grad_fn for x in operands}
        args, kwargs = tree_map_only(_Operand, lambda operand: operands[operand.index], arguments)
        outs = [out for out in tree_flatten(func(*args, **kwargs))[0] if isinstance(out, torch.Tensor)]
    found = list(_saved_by(outs, inputs))
    saved, unnoticed = set(map(storage_id, found)), _unnoticed(operands, found)
    if any(type(out.grad_fn).__name__ == _SAYS_NOTHING for out in outs):
        saved.update(packed)
    of = lambda tensors: tuple(i for i, x in enumerate(tensors) if storage_id(x) in saved)  # noqa: E731
    results = tuple(i for i in of(outs) if storage_id(outs[i]) not in given)
    besides = {storage_id(x) for _, x in written(func, args, kwargs) if x is not args[0]} if args else set()
    renewed = frozenset(i for i, x in enumerate(operands) if storage_id(x) in besides)
    return Kept(of(operands), results, not packed and not saved, renewed, unnoticed)


def _unnoticed(operands: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> frozenset[int]:
    """The operands of which aliases were saved that do not notice writes, such as those by _unsafe_view in kron."""
    versions = [x._version for x in saved]
    for operand in operands:
        increment_version(operand)
    noticed = {storage_id(x) for x, version in zip(saved, versions, strict=True) if x._version != version}
    kept = {storage_id(x) for x in saved}
    return frozenset(i for i, x in enumerate(operands) if storage_id(x) in kept - noticed)


def _saved_by(outs: Sequence[torch.Tensor], inputs: set[Node | None]) -> Iterator[torch.Tensor]:
    """The tensors that the nodes between `outs` and the nodes `inputs` keep."""
    waiting = [out.grad_fn for out in outs]
    done: set[Node | None] = {None, *inputs}
    while waiting:
        node = waiting.pop()
        if node is None or node in done:
            continue
        done.add(node)
        waiting += [following for following, _ in node.next_functions]
        yield from _kept_by(node)


def _kept_by(node: Node | None) -> Iterator[torch.Tensor]:
    for name in dir(node):
        if name.startswith("_saved_"):
            yield from (x for x in tree_flatten(getattr(node, name))[0] if isinstance(x, torch.Tensor))
