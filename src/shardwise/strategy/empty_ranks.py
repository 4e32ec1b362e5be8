"""Local calls of ranks that hold no elements. Such a rank must build the same graph as the other ranks and raise what
they raise. Torch's functions do not see to that: of empty tensors some gradients are constants, and a missing kernel
raises no error. So a rank without elements *imitates* one that has some: it also calls the function on made-up tensors
of that rank's sizes. Of the result it keeps nothing but the graph, through which only zeros flow.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from shardwise.comm.base import Coords
from shardwise.comm.bridge import also_of
from shardwise.comm.capturing import unwritten
from shardwise.layout import Layout
from shardwise.torch_private.autograd import comes_first, is_transforming, original_views
from shardwise.torch_private.tensors import is_abstract, storage_id

_MISSING_KERNEL = re.compile(r"not (yet )?(implemented|supported)|unsupported|does not support", re.IGNORECASE)
_MOST = 2**20  # elements: more are not computed only to find out what torch says


def in_new_memory_if_empty(dtypes: Sequence[torch.dtype], func: Callable[..., object]) -> Callable[..., object]:
    """`func` with a copy of each result without elements that shares memory with an argument: some functions return an
    empty argument as it is, and a rank that holds nothing must have what the others have, and be able to write to
    it. The results have these dtypes."""

    def call(*args: object, **kwargs: object) -> object:
        held = {storage_id(x) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)}
        following = iter(dtypes)

        def own(out: torch.Tensor) -> torch.Tensor:
            dtype = next(following)
            return out if out.numel() or storage_id(out) not in held else out.to(dtype, copy=True)

        return tree_map_only(torch.Tensor, own, func(*args, **kwargs))

    return call


def knowing_its_views(func: Callable[..., object]) -> Callable[..., object]:
    """`func`, of whose results some may be views of what it made. After a write, torch makes the node of a view anew,
    and that of its own choice drops the graph of gradients without elements; so it takes the one that it had."""

    def call(*args: object, **kwargs: object) -> object:
        with original_views():
            return func(*args, **kwargs)

    return call


def as_views_of_nothing(func: Callable[..., object]) -> Callable[..., object]:
    """`func`, whose results are views of its arguments, with nodes as of `knowing_its_views`."""
    tracked = knowing_its_views(func)

    def call(*args: object, **kwargs: object) -> object:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(x._base is not None and x._base.storage_offset() for x in given):
            # The node of such an argument says where it lies in memory, and its gradient's memory begins elsewhere.
            return tree_map_only(torch.Tensor, _nothing_of_its_base, func(*args, **kwargs))
        return tracked(*args, **kwargs)

    return call


def _nothing_of_its_base(view: torch.Tensor) -> torch.Tensor:
    """A view that has no elements, made of its base in steps that do not say where it lies in memory."""
    base = view._base
    if view.numel() or base is None or view.dtype != base.dtype or view.is_conj() != base.is_conj():
        return view
    with original_views():
        return base.view(base.shape or (1,)).narrow(0, 0, 0).view(view.shape)


def view_at(x: torch.Tensor, shape: Sequence[int], stride: Sequence[int], begin: int) -> torch.Tensor:
    """`x.as_strided(shape, stride, begin)`, whose backward pass drops the graph of gradients without elements; of a
    tensor without elements another view of this shape."""
    return x.as_strided(shape, stride, begin) if x.numel() else x.view(tuple(shape))


def turn_into(x: torch.Tensor, view: torch.Tensor) -> None:
    """Change a tensor in place into this view of its memory: `as_strided_`, but in other steps without elements, as
    in `view_at`."""
    sizes = [n for n in view.shape if n != 1]
    if x.numel() or not x.requires_grad or sorted(sizes) != sorted(n for n in x.shape if n != 1):
        x.as_strided_(view.shape, view.stride(), view.storage_offset())
        return
    for d in reversed(range(x.dim())):
        if x.shape[d] == 1:
            x.squeeze_(d)
    for d, n in enumerate(sizes):
        if x.shape[d] != n:
            x.transpose_(d, d + list(x.shape[d:]).index(n))
    for d, n in enumerate(view.shape):
        if n == 1:
            x.unsqueeze_(d)


def of_one_each(
    func: Callable[..., object], inputs: Sequence[Sequence[str | None]], outputs: Sequence[Sequence[str | None]]
) -> Callable[..., object]:
    """`func`, for a kernel that refuses tensors without elements or drops their graph. Where a factor that results have
    is empty, the kernel gets tensors that have one element along it, and what it makes of that element is cut away.

    Args:
        func: The local call.
        inputs: The factor of each dim of the tensors among its arguments; None where a dim is whole.
        outputs: The factor of each dim of the results.
    """
    kept = {factor for factors in outputs for factor in factors if factor is not None}

    def call(*args: object, **kwargs: object) -> object:
        held = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        empty = {f for factors, x in zip(inputs, held, strict=True) for f, n in zip(factors, x.shape) if not n} & kept
        if not empty:
            return func(*args, **kwargs)
        ones = iter([{d: 1 for d, f in enumerate(factors) if f in empty} for factors in inputs])
        parts = iter([tuple(slice(0) if f in empty else slice(None) for f in factors) for factors in outputs])
        filled = never_empty if any(empty.isdisjoint(factors) for factors in outputs) else _filled_beside
        args, kwargs = tree_map_only(torch.Tensor, lambda x: filled(x, next(ones)), (args, kwargs))
        return tree_map_only(torch.Tensor, lambda out: out[next(parts)], func(*args, **kwargs))

    return call


def never_empty(x: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """`x` with `sizes[d]` made-up elements along each of its empty dims d that `sizes` names; gradients reach `x`."""
    shape = [n or sizes.get(d, 0) for d, n in enumerate(x.shape)]
    if shape == list(x.shape):
        return x
    filled = F.pad(x, _to(shape, x), value=x.dtype is torch.bool)
    if is_abstract(x) or not (x.is_floating_point() or x.is_complex()):
        return filled
    return filled + _numbers(_numel(shape), x.dtype, x.device).view(shape)


def _filled_beside(x: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """`never_empty` where nothing of the results is kept: all gradients are zeros, also where the made-up elements have
    no gradient, such as the square root of a negative number."""
    filled = never_empty(x, sizes)
    return also_of(filled.detach(), x) if x.requires_grad and not is_transforming() else filled


def is_empty_here_alone(layouts: Sequence[Layout]) -> bool:
    """Whether this process is one rank, which holds nothing of a tensor that has elements."""
    if not layouts or any(0 in layout.shape for layout in layouts):
        return False
    comm = layouts[0].mesh.comm
    return not comm.simulated and not comm.outside and _is_empty_at(comm.coords_here()[0], layouts)


def rank_to_imitate(layouts: Sequence[Layout]) -> Coords | None:
    """The coordinates of the first rank that holds elements of every tensor; None if there is no such rank."""
    everyone = itertools.product(*map(range, layouts[0].mesh.shape))
    return next((coords for coords in everyone if not _is_empty_at(coords, layouts)), None)


def _is_empty_at(coords: Coords, layouts: Sequence[Layout]) -> bool:
    return any(0 in layout.local_shape_at(coords) for layout in layouts)


def imitating(
    func: Callable[..., object],
    shapes: Sequence[Sequence[int]],
    last: tuple[object, ...] = (),
    writes: bool = False,
    asked: list[bool] | None = None,
) -> Callable[..., object]:
    """`func`, for a rank without elements: it also makes the call of a rank that has some.

    Args:
        func: The local call.
        shapes: The local shapes, on the rank that is imitated, of the tensors among the arguments.
        last: The last argument on that rank, if each rank has its own.
        writes: Whether `func` writes into an argument.
        asked: Not empty if torch was asked already whether there is a kernel.
    """
    done = [] if asked is None else asked

    def call(*args: object, **kwargs: object) -> object:
        if done and writes:
            return func(*args, **kwargs)
        given = [x for x in tree_leaves((args[: len(args) - len(last)], kwargs)) if isinstance(x, torch.Tensor)]
        recorded = not writes and torch.is_grad_enabled() and any(x.requires_grad for x in given)
        known = len(given) == len(shapes) and not is_transforming() and not any(map(is_abstract, given))
        if not known or (done and not recorded):
            return func(*args, **kwargs)
        made_up = _with_sizes(func, (*args[: len(args) - len(last)], *last), kwargs, shapes, recorded)
        done.append(True)  # it did not raise
        result = func(*args, **kwargs)
        return _tied(result, made_up) if recorded and made_up is not None else result

    return call


def _with_sizes(
    func: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    shapes: Sequence[Sequence[int]],
    recorded: bool,
) -> object:
    """What `func` gives on made-up tensors of these shapes. Raise if torch has no kernel for this call: torch says so
    only for tensors with elements, so the other ranks raise, and this one would wait for them. None if it raises
    anything else, as it may because of the made-up numbers."""
    if not recorded and sum(map(_numel, shapes)) > _MOST:
        return None
    following = iter(shapes)
    tried, named = tree_map_only(torch.Tensor, lambda x: _as_large_as(next(following), x), (args, kwargs))
    devices = {x.device for x in tree_leaves(tried) if isinstance(x, torch.Tensor) and x.is_cuda}
    try:
        with torch.set_grad_enabled(recorded), torch.random.fork_rng(devices=list(devices)):
            if recorded:
                return func(*tried, **named)
            with unwritten():
                return func(*tried, **named)
    except NotImplementedError:
        raise
    except RuntimeError as error:
        if _MISSING_KERNEL.search(str(error)):
            raise
    except Exception:
        return None
    return None


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _as_large_as(shape: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape, whose gradient reaches `x` as zeros. Its numbers are in no order, so that matrices have
    inverses; indices are 0."""
    if not x.is_floating_point() and not x.is_complex():
        return x.new_zeros(tuple(shape))
    numbers = _numbers(_numel(shape), x.dtype, x.device).view(tuple(shape))
    return also_of(numbers.clone(), x) if x.requires_grad else numbers.clone()


_PERIOD = 1_000_003  # numbers, after which they repeat: a prime, so that the rows of a matrix differ
_known: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}  # as many as were needed


def _numbers(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers between 0.2 and 0.8, to be read only. They are probabilities, because CUDA ends a process that gives
    anything else to a function of probabilities. They are kept: to compute them takes longer than most functions of
    them, and the others would wait for this rank."""
    known = _known.get((dtype, device))
    if known is None or len(known) < min(n, _PERIOD):
        count = min(max(2 * n, 1024), _PERIOD)
        with unwritten(), torch.inference_mode(False):  # they outlive the call
            fresh = torch.arange(count, dtype=torch.float64, device=device).square_().sin_().mul_(0.3).add_(0.5)
            known = _known[dtype, device] = fresh.to(dtype)
    return known[:n] if n <= len(known) else known.repeat(-(-n // len(known)))[:n]


def _to(shape: Sequence[int], x: torch.Tensor) -> list[int]:
    """What F.pad adds to get from `x` to this shape."""
    return [n for d in reversed(range(x.dim())) for n in (0, shape[d] - x.shape[d])]


def _tied(result: object, made_up: object) -> object:
    """`result`, which autograd takes for a function of all that `made_up` is a function of."""
    flat, tree = tree_flatten(result)
    others, same = tree_flatten(made_up)
    if tree != same:
        return result
    return tree_unflatten([_tie(mine, other) for mine, other in zip(flat, others, strict=True)], tree)


def _tie(mine: object, other: object) -> object:
    if not isinstance(mine, torch.Tensor) or not isinstance(other, torch.Tensor):
        return mine
    if not other.requires_grad:
        return mine
    if comes_first(mine):  # it raises, before the gradients of others are moved: so it does on all ranks
        return mine
    return also_of(mine, other)
