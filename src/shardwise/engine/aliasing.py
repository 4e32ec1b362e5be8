"""Views that had to be copied. In torch a view shares memory with its base. Where a view op had to move data, the
result is a copy and cannot. So a write to such a copy is repeated on its base, and after a write to the base its copies
are made again. Autograd records both. Where `strict` forbids the communication, such writes, and uses of outdated
copies, raise instead.

Until the first such copy is made, nothing is stored and a write costs nothing extra.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten

from shardwise.context import is_strict
from shardwise.engine.call_shape import Path, fetch, put
from shardwise.engine.local_copies import LOCAL_COPIES, after_local_write, source_of_local_copy
from shardwise.errors import RuleError
from shardwise.torch_private.autograd import has_gradient_hooks, view_anew
from shardwise.torch_private.tensors import are_transforms_active
from shardwise.wrapper import Wrapper, after_fill, before_fill, origin_of, restride, storage_id_of, storage_of, wrap


class _Copy(NamedTuple):
    tensor: weakref.ref[Wrapper]  # the copy, or a view of it
    name: str  # of the view op
    base: int  # the storage of what it is a copy of
    kept: StorageWeakRef  # keeps the address of that storage reserved, so that no other storage gets the same number
    source: Wrapper  # the tensor the view op was called on
    again: Callable[[Any], Any]  # calls the view op on another tensor
    of_several: bool  # whether the view op has several results
    unrecorded: bool  # whether it was made where autograd records nothing
    whole: Wrapper | None  # the copy, if `tensor` is a view of a copy


_of_base: dict[int, list[_Copy]] = {}  # by the storage the view would have shared
COPIES: dict[int, list[_Copy]] = {}  # by the storage the copy has; empty in nearly every program


class _UnderWay(threading.local):
    copies: tuple[
        Wrapper, ...
    ] = ()  # copies that this thread is updating from their bases, or whose bases it is updating


_here = _UnderWay()


def note_copies(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], path: Path, result: object, name: str
) -> None:
    """Note that func(*args, **kwargs) copied the tensor at `path` into `result`, where torch would make views of it."""
    source = fetch(args, kwargs, path)

    def again(base: Any, i: int) -> Any:
        other_args, other_kwargs = list(args), dict(kwargs)
        put(other_args, other_kwargs, path, base)
        return tree_flatten(func(*other_args, **other_kwargs))[0][i]

    origin = storage_id_of(source)
    first = next(((c.base, c.kept) for c in COPIES.get(origin, ())), (origin, StorageWeakRef(storage_of(source))))
    unrecorded = not torch.is_grad_enabled()
    for i, copy in enumerate(tree_flatten(result)[0]):
        if copy is not result:  # one of several results: each has its own memory, and autograd lets us write to it
            copy._local = copy._layout.mesh.comm.bind(torch.clone)(copy._local)
        if unrecorded and source.requires_grad:
            _say_base_requires_grad(copy)
        several = copy is not result
        _note(copy, name, *first, source, functools.partial(again, i=i), several, unrecorded, None)


def _say_base_requires_grad(copy: Wrapper) -> None:
    """A view that is made under no_grad requires grad if its base does, although no gradient reaches the base: neither
    does one from the copy, which becomes such a view of memory that nobody has."""
    comm, local = copy._layout.mesh.comm, copy._local
    if torch.is_inference_mode_enabled() or not (copy.dtype.is_floating_point or copy.dtype.is_complex):
        return
    copy._local = comm.rebuild(local, [_as_view_of_leaf(value) for value in comm.values(local)])


def _as_view_of_leaf(value: torch.Tensor) -> torch.Tensor:
    """The same elements as a view of a leaf. Windows that overlap stay views of the memory that they are windows of."""
    base = value._base
    if base is None or base.dtype != value.dtype:  # as_strided cannot make view_as_real(base) from base
        leaf = value.detach().requires_grad_()
        return leaf.view_as(leaf)
    leaf = base.detach().requires_grad_()
    return leaf.as_strided(value.shape, value.stride(), value.storage_offset())


def note_view(base: Wrapper, view: Wrapper) -> None:
    """Note that `view` shares memory with `base`. If `base` is a copy, so is the view."""
    for copy in COPIES.get(storage_id_of(base), ())[:1]:
        _note(view, *copy[1:-1], _root(copy))


def _note(copy: Wrapper, name: str, base: int, *rest: Any) -> None:
    for table, key in ((_of_base, base), (COPIES, storage_id_of(copy))):
        ref = weakref.ref(copy, functools.partial(_forget, table, key))
        table.setdefault(key, []).append(_Copy(ref, name, base, *rest))


def copied_from(tensor: Wrapper) -> tuple[Wrapper, Callable[[Any], Any]] | None:
    """The tensor of which `tensor` is a copied view, and a function that takes the same view of another tensor; None if
    `tensor` is no such copy."""
    entries = COPIES.get(storage_id_of(tensor), ()) if COPIES else ()
    return next(((c.source, c.again) for c in entries if c.tensor() is tensor and c.whole is None), None)


def memory_of(tensor: Wrapper) -> tuple[int, int]:
    """A set of numbers for the memory of a tensor. The sets of two tensors overlap if the tensors share memory in
    torch: a copy of a view counts as a view, and the parts of one buffer of this process count as different memory."""
    own = storage_id_of(tensor)
    if LOCAL_COPIES:
        own = source_of_local_copy(own)
    return next((copy.base for copy in COPIES.get(own, ())), own) if COPIES else own, id(origin_of(tensor).memory)


# -- tensors that become others --------------------------------------------------------------------------------------
def as_it_is(tensor: Wrapper) -> Wrapper:
    """Another tensor object with the same memory, shape and graph. It keeps the present state of `tensor`, even if
    `tensor` is changed into another tensor later."""
    same: Wrapper = wrap(tensor._local, tensor._layout, tensor._offset)
    same._origin = origin_of(tensor)
    return same


def became(target: Wrapper, before: Wrapper, now: Wrapper | None) -> None:
    """Note that `target` was changed into another tensor.

    Args:
        target: The tensor. If `now` is a copy of a view, or a view of such a copy, so is `target` from now on.
        before: What `target` was: its views and copies belong to this one.
        now: What `target` holds; None if that is neither a copy of a view nor a view of one.
    """
    for table in (COPIES, _of_base):
        for key, copies in list(table.items()):
            table[key] = [_followed(copy, table, key, target, before, now) for copy in copies]
            _forget(table, key, None)


def _followed(
    copy: _Copy, table: dict[int, list[_Copy]], key: int, target: Wrapper, before: Wrapper, now: Wrapper | None
) -> _Copy:
    tensor = copy.tensor()
    other = before if tensor is target else target if tensor is now and now is not None else None
    if other is not None:
        copy = copy._replace(tensor=weakref.ref(other, functools.partial(_forget, table, key)))
    if copy.source is target:
        copy = copy._replace(source=before)
    return copy._replace(whole=before) if copy.whole is target else copy


def _root(copy: _Copy) -> Any:
    """The copy itself; of a view of a copy, that copy."""
    return copy.tensor() if copy.whole is None else copy.whole


def _forget(table: dict[int, list[_Copy]], key: int, _: object) -> None:
    alive = [copy for copy in table.get(key, ()) if copy.tensor() is not None]
    if alive:
        table[key] = alive
    else:
        table.pop(key, None)


# -- writes ----------------------------------------------------------------------------------------------------------
def before_write(target: Wrapper, op: str, recorded: bool) -> None:
    """Raise if `target` is a copied view and the write cannot be repeated on its base, or if torch would refuse a
    recorded write to the view."""
    for copy in COPIES.get(storage_id_of(target), ())[:1] if COPIES else ():
        if _is_under_way(_root(copy)):
            continue
        if is_strict():
            raise RuleError(
                f"{op} would write to the result of {copy.name} of shape {tuple(target.shape)}. In torch it is a view; "
                f"on this layout it had to be a copy, and to repeat the write on its base takes communication, which "
                f"strict() forbids. Write to its .clone(), or redistribute the base so that {copy.name} moves nothing"
            )
        if recorded and copy.of_several:
            raise RuntimeError(
                f"{op}: the result of {copy.name} is a view and is being modified inplace. This view is the output of "
                f"a function that returns multiple views, which autograd does not allow; write to its .clone()"
            )
        if copy.unrecorded and torch.is_grad_enabled() and copy.source.requires_grad and target.requires_grad:
            raise RuntimeError(
                f"{op}: the result of {copy.name} is a view that was created in no_grad mode and is being modified "
                f"inplace with grad mode enabled; write under torch.no_grad(), or take the view outside of it"
            )
        if torch.is_grad_enabled() and target.requires_grad and copies_leaf(target):
            raise RuntimeError(
                f"{op}: a view of a leaf Variable that requires grad is being used in an in-place operation; "
                f"write under torch.no_grad()"
            )


def copies_leaf(target: Wrapper) -> bool:
    """Whether `target` is a copy of a view of a leaf that requires grad."""
    return any(_is_of_leaf(copy.source) for copy in COPIES.get(storage_id_of(target), ())[:1])


def _is_of_leaf(tensor: Wrapper) -> bool:
    """Whether a tensor is a leaf that requires grad, or a view of one."""
    base = tensor._layout.mesh.comm.first(tensor._local)._base
    return tensor.requires_grad and (tensor.is_leaf or (base is not None and base.is_leaf) or copies_leaf(tensor))


def without_hooks(target: Wrapper) -> None:
    """Remove the hooks of a view that is about to be written. In torch a written view gets a new graph from its base,
    and its hooks stay with the old graph."""
    copy = next(iter(COPIES.get(storage_id_of(target), ())), None)
    is_copy = copy is not None and copy.tensor() is target and copy.whole is None
    if copy is not None and is_copy and has_gradient_hooks(target._layout.mesh.comm.first(target._local)):
        with torch.enable_grad():  # also a write that is not recorded gives the view its base's graph
            fresh = copy.again(copy.source)
        became(target, as_it_is(target), fresh)
        target._local = fresh._local


def after_write(*targets: Wrapper) -> None:
    """Repeat the writes of one call to copies on their bases, then make the copies of a written base again (under
    strict(): have their use raise). All writes go to the bases first, since making a copy again overwrites it."""
    for target in targets:
        if _is_unseen(target):
            origin_of(target).memory.unseen_writes += 1
    if LOCAL_COPIES:
        for target in targets:
            after_local_write(target._layout.mesh.comm.values(target._local))
    if COPIES:
        _repeat_on_bases(targets)
        unseen: dict[int, bool] = {}
        for target in targets:
            storage = storage_id_of(target)
            unseen[storage] = unseen.get(storage, True) and _is_unseen(target)
        for storage, quiet in unseen.items():
            _make_copies_again(storage, quiet)


def _repeat_on_bases(targets: Sequence[Wrapper]) -> None:
    written = [(copy, _is_unseen(target)) for target in targets for copy in COPIES.get(storage_id_of(target), ())[:1]]
    wholes = {id(_root(copy)): (_root(copy), copy, quiet) for copy, quiet in written if not _is_under_way(_root(copy))}
    with _under_way(*(whole for whole, _, _ in wholes.values())):
        for whole, copy, quiet in wholes.values():
            source = copy.source
            # the written view of a leaf was detached from the leaf, and a view that was made under no_grad has no graph
            recorded = torch.is_grad_enabled() and not quiet and not copy.unrecorded and not _is_of_leaf(source)
            value = _detached(whole) if copy.unrecorded else whole
            with torch.set_grad_enabled(recorded):
                (unseen_alias(source) if quiet else source).copy_(_with_view(source, copy.again, value))
        for whole, copy, quiet in wholes.values():
            if torch.is_grad_enabled() and copy.source.requires_grad and not quiet and not copy.unrecorded:
                _take_again(whole, copy.again(_beside(copy.source)))  # its gradients reach the base, as in torch
            if not quiet:
                _lose_graph(copy, whole)


def _make_copies_again(storage: int, unseen: bool) -> None:
    """Bring the copies of what is in this memory up to date with what was written there."""
    for copy in list(_of_base.get(storage, ())):
        tensor = copy.tensor()
        if tensor is None or copy.whole is not None or _is_under_way(tensor):
            continue  # views of a copy are up to date if the copy is
        if is_strict():
            _make_stale(storage, tensor)
        elif unseen:
            with _under_way(tensor), torch.no_grad():
                _take_again(unseen_alias(tensor), copy.again(copy.source))
        else:
            with _under_way(tensor), torch.set_grad_enabled(torch.is_grad_enabled() and not copy.unrecorded):
                _take_again(tensor, copy.again(_beside(copy.source)))
                _lose_graph(copy, tensor)


def _lose_graph(copy: _Copy, tensor: Wrapper) -> None:
    """In torch, one of several views has no graph any more once their memory was written, and what asks for it raises.
    The copy becomes such a view."""
    if copy.of_several and not copy.unrecorded and tensor.requires_grad and not are_transforms_active():
        comm, local = tensor._layout.mesh.comm, tensor._local
        tensor._local = comm.rebuild(local, [_written_view_of_several(value) for value in comm.values(local)])


def _written_view_of_several(value: torch.Tensor) -> torch.Tensor:
    """The same memory as a view whose graph torch refuses to make."""
    with torch.enable_grad():
        leaf = value.detach().requires_grad_()
        (view,) = leaf.unsqueeze(0).unbind(0)
    torch.autograd.graph.increment_version(leaf)
    return view


def _is_unseen(target: Wrapper) -> bool:
    """Whether autograd does not notice writes to this tensor: it is ``.data`` of a tensor, or a view of that."""
    origin = target._origin
    return origin is not None and origin.memory is not origin


def unseen_alias(tensor: Wrapper) -> Wrapper:
    """``tensor.data``: the same memory without a graph."""
    comm, local = tensor._layout.mesh.comm, tensor._local
    same: Wrapper = wrap(comm.rebuild(local, [v.data for v in comm.values(local)]), tensor._layout, tensor._offset)
    same._origin = origin_of(tensor).hand_out()
    if COPIES:
        note_view(tensor, same)
    return same


def _detached(tensor: Wrapper) -> Wrapper:
    """The values alone, of which nothing is noted."""
    comm, local = tensor._layout.mesh.comm, tensor._local
    values = comm.rebuild(local, [value.detach() for value in comm.values(local)])
    return cast(Wrapper, wrap(values, tensor._layout, tensor._offset))


def _beside(source: Wrapper) -> Wrapper:
    """`source`, or, if that is a view, another view of the same base. After a write, torch makes views of a view anew
    from the base, so that gradients go to the base and not through the view."""
    comm, local = source._layout.mesh.comm, source._local
    values = comm.values(local)
    if not torch.is_grad_enabled() or all(v._base is None or not v.requires_grad for v in values):
        return source
    same: Wrapper = wrap(comm.rebuild(local, list(map(view_anew, values))), source._layout, source._offset)
    same._origin = source._origin
    return same


def _take_again(copy: Wrapper, value: Wrapper) -> None:
    """Give a copy of a view the values that the view has now."""
    comm = copy._layout.mesh.comm
    pairs = list(zip(comm.values(copy._local), comm.values(value._local), strict=True))
    if not any(overlaps(mine) for mine, _ in pairs):
        copy.copy_(value)
        return
    for mine, now in pairs:  # overlapping windows: write to their base, each element once
        base, fresh = mine._base, now._base
        if base is None or fresh is None:
            mine.copy_(now)
        else:
            base.copy_(fresh)
    copy._spreads = None


def overlaps(value: torch.Tensor) -> bool:
    """Whether elements of a tensor may share memory with each other."""
    reach = 0
    for step, size in sorted((s, n) for s, n in zip(value.stride(), value.shape, strict=True) if n > 1):
        if step <= reach:
            return bool(value.numel())
        reach += step * (size - 1)
    return False


@contextlib.contextmanager
def _under_way(*copies: Wrapper) -> Iterator[None]:
    outer, _here.copies = _here.copies, (*_here.copies, *copies)
    try:
        yield
    finally:
        _here.copies = outer


def _is_under_way(copy: Wrapper) -> bool:
    return any(copy is other for other in _here.copies)


def _make_stale(storage: int, tensor: Wrapper) -> None:
    """Make the next use of a copy, or of its views, raise."""
    stale = [copy for copy in _of_base[storage] if _root(copy) is tensor]
    _of_base[storage] = [copy for copy in _of_base[storage] if _root(copy) is not tensor]
    for copy in stale:
        view = copy.tensor()
        if view is not None:
            view._layout = _Stale(copy.name)  # type: ignore[assignment]


def _with_view(source: Wrapper, again: Callable[[Any], Any], value: Wrapper) -> torch.Tensor:
    """`source` with `value` in the place of its view. The gradient of the view op brings each element to its place."""
    reals = {t.dtype.to_real() if t.dtype.is_complex else t.dtype for t in (value, source)}
    if value.dtype.is_complex != source.dtype.is_complex and len(reals) == 1:
        return _with_numbers(source, again, value)
    if value.dtype != source.dtype:
        return value.view(source.dtype)  # a view of the same bytes as another dtype, which has no gradient
    recorded = torch.is_grad_enabled() and value.requires_grad

    def back(seed: Any) -> Any:
        if are_transforms_active():
            return torch.func.vjp(again, torch.zeros_like(source, dtype=seed.dtype))[1](seed)[0]
        with torch.inference_mode(False), torch.enable_grad():
            leaf: Any = torch.zeros_like(source, dtype=seed.dtype)
            restride(leaf, source._layout.stride, source._offset)  # which as_strided looks at
            leaf.requires_grad_()
            return torch.autograd.grad(again(leaf), leaf, seed, create_graph=recorded)[0]

    is_complex = value.dtype.is_complex  # of which a view may be the conjugate, that of a real tensor may not
    times = back(torch.ones_like(value, dtype=torch.complex64 if is_complex else torch.float32))
    times = times.real if is_complex else times
    twice = (times > 1).any()
    if source._layout.mesh.comm.outlined:
        twice.full_tensor()  # ranks with values exchange it
    elif bool(twice):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )
    if value.dtype.is_floating_point or value.dtype.is_complex:
        placed = back(value)
    elif value.dtype.itemsize < 8:
        placed = back(value.double())
    else:  # 64-bit integers do not fit into a double (53 bits): in two halves
        high, low = back((value >> 32).double()), back((value & 0xFFFFFFFF).double())
        placed = (high.to(value.dtype) << 32) | low.to(value.dtype)
    return torch.where(times > 0, placed.to(source.dtype), source)


def _with_numbers(source: Wrapper, again: Callable[[Any], Any], value: Wrapper) -> torch.Tensor:
    """The same where the view shows complex numbers as real ones, or the other way round: on pairs of real numbers."""
    if value.dtype.is_complex:
        return _with_view(source, lambda x: torch.view_as_real(again(x)), _pairs(value))
    return torch.view_as_complex(
        _with_view(_pairs(source), lambda x: again(torch.view_as_complex(x)), value).contiguous()
    )


def _pairs(tensor: Wrapper) -> Wrapper:
    return cast(Wrapper, torch.view_as_real(tensor.resolve_conj()))


class _Stale:
    """Takes the place of the layout of a copied view whose base was written. It is the key of no plan, and reading it
    raises."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        raise RuleError(
            f"the result of {self.name} is used after its base was written in place. In torch it is a view and would "
            f"show the write; on this layout it had to be a copy. Take it again after the write, or .clone() it before"
        )


before_fill.append(lambda target, op: before_write(target, op, recorded=False))
after_fill.append(after_write)
