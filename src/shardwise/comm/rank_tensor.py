"""One tensor per rank as one tensor: ops run rank by rank.

Ranks that hold the same value (along a Replicate axis) hold the same tensor object, and share the work done on it.
Each value has its own native autograd graph, so uneven shapes are no special case.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.comm.plain_writes import DifferentWritesError, Done, Targets, Watch, place, run_unknown, run_writes
from shardwise.comm.shown import value_text
from shardwise.drawing import rank_names
from shardwise.errors import LayoutError
from shardwise.functions import may_write, writes_first, written
from shardwise.protocols import Ctx
from shardwise.torch_private.autograd import reentrant
from shardwise.torch_private.tensors import make_wrapper, storage_users


class PerRank(tuple):
    """One plain, hashable value per rank, in the place of one value in a call that runs rank by rank. A program gets
    one for a result that is no tensor and differs between ranks: it must then choose a rank."""

    def __bool__(self) -> bool:
        raise LayoutError(f"the ranks differ: {tuple(self)}; a program that runs once for all of them cannot decide by "
                          f"it: take that of rank i, value[i], or ask tensor.ranks[i]")  # fmt: skip

    def __getattr__(self, name: str) -> object:
        kind = type(self[0]).__name__ if len(self) else "value"
        raise AttributeError(f"{name}: each simulated rank has its own {kind}; take that of rank i: value[i].{name}")


SURFACE: dict[object, Callable[..., Any]] = {}  # methods that are not run rank by rank: see `rank_surface.py`


class RankTensor(torch.Tensor):
    """The local tensors of all ranks of a simulated mesh: `.ranks` is a tuple with one plain tensor for each rank.

    An op runs on each rank's tensor. If a property differs between ranks (such as the shape of uneven shards), read it
    from `.ranks[i]`.
    """

    ranks: tuple[torch.Tensor, ...]
    # whether ranks that share a tensor hold copies of it: then each gets the gradient, and none gets the sum
    copies = False

    @staticmethod
    def __new__(cls, ranks: Sequence[torch.Tensor]) -> RankTensor:
        if type(ranks) not in (list, tuple) or not ranks or not _TENSORS.issuperset(map(type, ranks)):
            _check_ranks(ranks)
        first = ranks[0]
        self = make_wrapper(cls, first.shape, strides=first.stride(), dtype=first.dtype, device=first.device)
        self.ranks = tuple(ranks)
        return self

    def __init__(self, ranks: Sequence[torch.Tensor]) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None) -> Any:
        surface = SURFACE.get(func)
        if surface is not None:
            return surface(*args, **(kwargs or {}))
        if len(types) > 1 and not all(issubclass(cls, kind) for kind in types):
            return NotImplemented  # a distributed tensor decides itself how to treat a local one
        if is_list_op(func) and writes_first(func):
            return _write_positions(func, args, kwargs or {})
        try:
            return map_ranks(func, args, kwargs or {})
        except Exception as error:
            _say_whose(error, func, (args, kwargs))
            raise

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None) -> Any:
        with reentrant():
            return map_ranks(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        kinds: dict[Hashable, list[int]] = {}
        for rank, value in enumerate(self.ranks):
            kinds.setdefault(None if value is None else tuple(value.shape), []).append(rank)
        first = value_text(self.ranks[0])
        if len(kinds) == 1:
            return f"RankTensor of {len(self.ranks)} ranks; .ranks[0] is\n{first}"
        shapes = [f"{shape} on {rank_names(ranks)}" for shape, ranks in itertools.islice(kinds.items(), 4)]
        more = f", {len(kinds) - 4} more shapes" if len(kinds) > 4 else ""
        return f"RankTensor of {len(self.ranks)} ranks: {', '.join(shapes)}{more}; .ranks[0] is\n{first}"

    def __deepcopy__(self, memo: dict[int, Any]) -> RankTensor:
        copies = {id(v): v.__deepcopy__(memo) for v in self.ranks}
        return RankTensor([copies[id(v)] for v in self.ranks])

    def __reduce_ex__(self, protocol: object) -> Any:
        return RankTensor, (self.ranks,)


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_WHOSE = "each simulated rank ran it on what it holds itself"


def _say_whose(error: Exception, func: object, given: object) -> None:
    """Add a note to torch's error about shapes that says which rank has these shapes."""
    if any(_WHOSE in note for note in getattr(error, "__notes__", ())):
        return
    tensors = [x for x in tree_flatten(given)[0] if isinstance(x, torch.Tensor)]
    here = [x.ranks[0] if isinstance(x, RankTensor) else x for x in tensors]
    shapes = ", ".join(str(tuple(x.shape)) for x in here if x is not None)
    error.add_note(
        f"{getattr(func, '__name__', func)}: {_WHOSE}, a part or a copy; those of rank 0 have the shapes {shapes}. To "
        f"compute with the whole, use the DTensor: a style of parallelize_module returns it with use_local_output=False"
    )


def _check_ranks(ranks: object) -> None:
    if not isinstance(ranks, (list, tuple)) or not ranks:
        raise LayoutError(f"RankTensor: ranks must be a list of tensors, one for each rank, got {ranks!r}")
    for rank, value in enumerate(ranks):
        if value is not None and (not isinstance(value, torch.Tensor) or isinstance(value, RankTensor)):
            raise LayoutError(f"RankTensor: ranks[{rank}] must be a plain tensor, got {type(value).__name__}")
    if ranks[0] is None:
        raise LayoutError("RankTensor: ranks[0] must be a plain tensor, got None")


def common(local: RankTensor, read: Callable[[torch.Tensor], Any], what: str) -> Any:
    """The value on which all ranks agree. If they do not, an error that says what to read instead."""
    values = [read(v) for v in local.ranks]
    if any(v != values[0] for v in values):
        raise LayoutError(f"the ranks differ in {what}: {values}; read it off .ranks[i] for rank i")
    return values[0]


def joined(values: Sequence[Any]) -> Any:
    """The results of all ranks as one: tensors as a RankTensor, containers element by element, equal values as one."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return RankTensor(values)
    if isinstance(first, (tuple, list)) and all(len(v) == len(first) for v in values):
        parts = [joined(column) for column in zip(*values, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else rebuild_sequence(first, parts)
    return first if all(type(v) is type(first) and _is_same(v, first) for v in values) else PerRank(values)


def _is_same(one: object, other: object) -> bool:
    """Whether two ranks have the same value; of arrays, the same object."""
    same = one is other or one == other
    return same if isinstance(same, bool) else False


def rebuild_sequence(like: Any, parts: list[Any]) -> Any:
    """A sequence of the kind of `like` (torch.return_types take one sequence)."""
    return type(like)(parts)


def map_ranks(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    keys: Sequence[tuple[Hashable, ...]] | None = None,
    watched: bool = False,
) -> Any:
    """Run `func` on each rank's values. Ranks with the same objects as arguments, and equal keys, share one call.
    Without keys, the call is one of the program itself. A `watched` function may write into tensors that are not its
    arguments."""
    many = [*_many_in(args), *_many_in(kwargs)]
    tensors = [x for x in many if isinstance(x, RankTensor)]
    copies = any(x.copies for x in tensors)
    targets: Targets = written(func, args, kwargs) if may_write(func, kwargs) else []
    ranks = range(len(tensors[0].ranks) if tensors else len(many[0]))
    which = [_call_key(rank, func, many, targets, keys) for rank in ranks]
    lent: dict[int, Hashable] = {}

    def run(rank: int) -> object:
        mine = _at((args, kwargs), rank)
        if copies:
            key = which[rank]
            taken = (id(x.ranks[rank]) for x in tensors if x.copies)
            mine = _as_copies(mine, {v for v in taken if lent.setdefault(v, key) != key})
        return func(*mine[0], **mine[1])

    first: dict[Hashable, int] = {}
    for rank, key in enumerate(which):
        first.setdefault(key, rank)
    if targets and len(first) > 1 and (keys is None or _several_groups(keys)):
        done = _run_writes(func, run, first, targets, tensors, keys is None)
    elif watched and len(first) > 1:
        watch = Watch(func)
        own = lambda rank: [x.ranks[rank] for x in tensors]  # noqa: E731
        done = {key: watch.run(functools.partial(run, rank), own(rank)) for key, rank in first.items()}
        watch.settle()
    elif keys is None and len(first) > 1:
        plain = [t for t in tree_flatten((args, kwargs))[0] if type(t) is torch.Tensor and not t.is_inference()]
        done = run_unknown(func, {key: functools.partial(run, rank) for key, rank in first.items()}, plain)
    else:
        done = {key: run(rank) for key, rank in first.items()}
    results = [done[key] for key in which]
    for _, target in targets:  # a call that returns the tensor it wrote to must return the same object
        held = target.ranks if isinstance(target, RankTensor) else (target,) * len(results)
        if all(result is value for result, value in zip(results, held, strict=True)):
            return target
    made = joined(results)
    if copies:
        tree_map_only(RankTensor, _note_copies, made)
    return made


def _several_groups(keys: Sequence[tuple[Hashable, ...]]) -> bool:
    """Whether ranks of several groups call, as on a sub-mesh: what they hold may be the same memory."""
    return keys[0][0] != keys[-1][0]


def _call_key(
    rank: int, func: object, many: Sequence[Any], targets: Targets, keys: Sequence[Hashable] | None
) -> Hashable:
    """The key of a rank's call: ranks with equal keys share one call."""
    if func in _IN_PLACE:
        return id(many[0].ranks[rank])  # once a value, like a write
    if keys is None:
        if not targets:
            return tuple(id(x.ranks[rank]) if isinstance(x, RankTensor) else x[rank] for x in many)
        return tuple(place(x.ranks[rank]) if isinstance(x, RankTensor) else x[rank] for x in many)
    if targets and isinstance(targets[0][1], RankTensor) and writes_first(func):
        return id(targets[0][1].ranks[rank])  # one write per value: ranks that share it agree on what is written
    return keys[rank], *(id(x.ranks[rank]) if isinstance(x, RankTensor) else x[rank] for x in many)


def _run_writes(
    func: object,
    run: Callable[[int], object],
    first: dict[Hashable, int],
    targets: Targets,
    tensors: Sequence[RankTensor],
    may_part: bool,
) -> Done:
    """Run an op that writes. Ranks that share the tensor they write to must write the same. If they do not, and nothing
    else uses that memory, each rank gets its own copy."""
    calls = {
        key: (functools.partial(run, rank), [(what, _at(t, rank)) for what, t in targets])
        for key, rank in first.items()
    }
    needs_grad = (torch.is_grad_enabled() and writes_first(func)) and any(
        t.requires_grad for x in (*tensors, *(t for _, t in targets)) for t in (getattr(x, "ranks", None) or (x,))
    )
    try:
        return run_writes(func, calls, needs_grad)
    except DifferentWritesError:
        shared = [t for _, t in targets if isinstance(t, RankTensor)]
        if not may_part or len(shared) < len(targets) or needs_grad or not all(map(_is_alone, shared)):
            raise
    for target in shared:
        target.ranks = tuple(v.clone() for v in target.ranks)
    return {key: run(rank) for key, rank in first.items()}


def _is_alone(target: RankTensor) -> bool:
    """Whether only these ranks use the memory of what they hold."""
    values = unique(target.ranks)
    return all(storage_users(v) == 1 for v in values)


def _as_copies(call: object, taken: set[int]) -> Any:
    """A call's arguments, with copies of what other calls have taken."""
    return tree_map_only(torch.Tensor, lambda v: _Copy.apply(v) if id(v) in taken else v, call) if taken else call


class _Copy(torch.autograd.Function):
    """A copy of a tensor that another call has taken already. It passes no gradient on: all copies get the same
    gradient, and one of them is enough."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Any, ...], output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> None:
        return None

    @staticmethod
    def jvp(ctx: Ctx, tangent: torch.Tensor) -> torch.Tensor:
        return tangent.view_as(tangent)


class _Recorded(torch.autograd.Function):
    """A result without a graph, recorded by autograd as if it came from the other tensor."""

    @staticmethod
    def forward(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Any, ...], output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: Ctx, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


def _note_copies(made: RankTensor) -> RankTensor:
    made.copies = True
    return made


def is_list_op(func: object) -> bool:
    """Whether it is one of torch's ops on lists of tensors."""
    return getattr(func, "__name__", "").startswith(("_foreach_", "_fused_"))


def _write_positions(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    keys: Sequence[tuple[Hashable, ...]] | None = None,
) -> None:
    """Run a list op that writes, position by position: ranks may share the tensor at one position and not at
    another."""
    count = _count_positions(args, kwargs)
    for j in range(count):
        at = lambda a, j=j: a[j : j + 1] if isinstance(a, (list, tuple)) and len(a) == count else a  # noqa: E731
        map_ranks(func, [at(a) for a in args], {k: at(v) for k, v in kwargs.items()}, keys)


def _count_positions(args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    return max(len(a) for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)))


def map_positions(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], keys: Sequence[tuple[Hashable, ...]]
) -> Any:
    """Run a list op. Each position is a call of its own, shared by the ranks that hold the same tensors there.
    Positions that are shared by the same ranks go in one call."""
    if writes_first(func) and _several_groups(keys):
        targets = [unique(target.ranks) for target in args[0]]
        if any(len(set(map(place, values))) < len(values) for values in targets):
            return _write_positions(func, args, kwargs, keys)
    count = _count_positions(args, kwargs)
    tensors = [*_many_in(args), *_many_in(kwargs)]
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple)) and len(a) == count]
    deciding = [a for a in lists if isinstance(a[0], RankTensor)][: 1 if writes_first(func) else None]
    alike: dict[Any, list[int]] = {}  # for each rank, the first that holds the same -> positions
    for j in range(count):
        first: dict[Any, int] = {}
        held = zip(*(a[j].ranks for a in deciding), strict=True)
        who = tuple(first.setdefault(tuple(map(id, mine)), rank) for rank, mine in enumerate(held))
        alike.setdefault(who, []).append(j)

    def at(value: Any, positions: list[int], rank: int) -> Any:
        long = isinstance(value, (list, tuple)) and len(value) == count
        return _at([value[j] for j in positions] if long else value, rank)

    # torch records a list op at all positions if it does at one, and so must several calls in place of one
    anchors = [v for t in tensors if isinstance(t, RankTensor) for v in t.ranks if v.requires_grad][:1]
    recorded = bool(anchors) and len(alike) > 1 and torch.is_grad_enabled() and not writes_first(func)

    def call(positions: list[int], rank: int) -> Any:
        mine = [at(a, positions, rank) for a in args], {k: at(v, positions, rank) for k, v in kwargs.items()}
        made = func(*mine[0], **mine[1])
        return [v if v.requires_grad else _Recorded.apply(v, *anchors) for v in made] if recorded else made

    results: list[Any] = [None] * count
    nothing = False
    for who, positions in alike.items():
        done = {rank: call(positions, rank) for rank in set(who)}
        nothing = done[who[0]] is None
        for n, j in enumerate(positions if not nothing else ()):
            results[j] = RankTensor([done[rank][n] for rank in who])
    return None if nothing else results


def _many_in(value: object) -> Iterator[Any]:
    """The values that differ between ranks, also inside of containers."""
    if isinstance(value, (RankTensor, PerRank)):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _many_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _many_in(item)


def _at(value: object, rank: int) -> Any:
    """What one rank has of a value."""
    if isinstance(value, RankTensor):
        return value.ranks[rank]
    if isinstance(value, PerRank):
        return value[rank]
    if isinstance(value, (list, tuple)):
        parts = [x.ranks[rank] if type(x) is RankTensor else _at(x, rank) for x in value]
        return type(value)(*parts) if hasattr(value, "_fields") else rebuild_sequence(value, parts)
    if isinstance(value, dict):
        return type(value)((k, _at(v, rank)) for k, v in value.items())
    return value


_IN_PLACE: set[Any] = {torch.Tensor.retain_grad}  # once a value, like a write


def unique(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The distinct objects, in order of first appearance."""
    return list({id(v): v for v in values}.values())
