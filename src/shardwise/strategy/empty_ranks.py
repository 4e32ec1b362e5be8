"""Local calls of ranks that hold nothing. They must build the same graph as the other ranks and raise what these raise,
and torch's own functions take short cuts for empty tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch.utils._pytree import tree_map_only

from shardwise.comm.capturing import unwritten
from shardwise.layout import Layout
from shardwise.torch_private import is_abstract, storage_id

_MISSING_KERNEL = re.compile(r"not (yet )?(implemented|supported)|unsupported|does not support", re.IGNORECASE)
_MOST = 2**20  # elements: more are not computed to find out what torch says


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


def is_empty_here_alone(layouts: Sequence[Layout]) -> bool:
    """Whether this process is one rank, which holds nothing of a tensor that has elements."""
    if not layouts or any(0 in layout.shape for layout in layouts):
        return False
    comm = layouts[0].mesh.comm
    if comm.simulated or comm.outside:
        return False
    (me,) = comm.coords_here()
    return any(0 in layout.local_shape_at(me) for layout in layouts)


def refuse_as_others_do(func: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> None:
    """Raise if torch has no kernel for this call: it says so of tensors with elements only, which other ranks hold, and
    a rank that went on would wait for them. The call is tried with one element where this rank has none."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if sum(x.numel() for x in given) > _MOST or any(map(is_abstract, given)):
        return
    one = lambda x: torch.zeros([max(n, 1) for n in x.shape], dtype=x.dtype, device=x.device)  # noqa: E731
    tried, named = tree_map_only(torch.Tensor, one, (tuple(args), kwargs))
    devices = [x.device for x in given[:1] if x.is_cuda]
    try:
        with unwritten(), torch.no_grad(), torch.random.fork_rng(devices=devices):
            func(*tried, **named)
    except NotImplementedError:
        raise
    except RuntimeError as error:
        if _MISSING_KERNEL.search(str(error)):
            raise
    except Exception:  # of what the zeros are; the call itself says what is wrong with its own arguments
        return


def refusing_as_others_do(func: Callable[..., object]) -> Callable[..., object]:
    """`func`, which at its first call looks whether torch has a kernel for it."""
    is_first = [True]

    def call(*args: object, **kwargs: object) -> object:
        if is_first[0]:
            refuse_as_others_do(func, args, kwargs)
            is_first[0] = False
        return func(*args, **kwargs)

    return call
