"""New tensors that are distributed from the start: zeros, ones, empty, full, linspace, logspace, rand, randn, randint,
randperm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from shardwise.api import check_strided
from shardwise.argument_types import MeshArgument, Placements
from shardwise.comm.outside import held_of
from shardwise.errors import LayoutError, check_type
from shardwise.layout import Layout
from shardwise.layout.placement import check_reductions, placements_on
from shardwise.mesh import as_mesh
from shardwise.random import distributions as draws
from shardwise.random.draw import drawn
from shardwise.random.values import permuted
from shardwise.tensor import DTensor
from shardwise.wrapper import wrap


def zeros(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: MeshArgument | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Like torch.zeros, but distributed from the start: each rank makes only its own part.

    Args:
        *size: The global shape, as ints or as one sequence.
        dtype: By default torch's default dtype.
        layout: torch.strided; no other kind of memory can be distributed.
        requires_grad: Whether autograd records what is done with the tensor.
        device_mesh: The mesh; by default that of the enclosing `with mesh:`.
        placements: One per mesh axis; by default Replicate. Only `zeros` and `empty` accept Partial.

    Returns:
        The tensor.

    Raises:
        LayoutError: Arguments are wrong or do not fit each other.

    >>> import shardwise
    >>> x = shardwise.zeros(8, 4, device_mesh=shardwise.simulate(4), placements=[shardwise.Shard(0)])
    >>> x.shape, x.to_local().shape
    (torch.Size([8, 4]), torch.Size([2, 4]))
    """
    target = _layout_for(size, dtype, layout, device_mesh, placements, parts=True)
    return _filled(torch.zeros, target, requires_grad)


def ones(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: MeshArgument | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return a tensor of ones, like torch.ones, but distributed: each rank makes only its own part.

    Args:
        *size, dtype, layout, requires_grad, device_mesh, placements: As for `zeros`.

    Raises:
        LayoutError: Arguments are wrong or do not fit each other.
    """
    return _filled(torch.ones, _layout_for(size, dtype, layout, device_mesh, placements), requires_grad)


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: MeshArgument | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return a tensor with undefined values, like torch.empty, but distributed: each rank makes only its own part.

    Args:
        *size, dtype, layout, requires_grad, device_mesh, placements: As for `zeros`.

    Raises:
        LayoutError: Arguments are wrong or do not fit each other.
    """
    target = _layout_for(size, dtype, layout, device_mesh, placements, parts=True)
    return _filled(torch.empty, target, requires_grad)


def full(
    size: int | Sequence[int],
    fill_value: bool | int | float | complex,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: MeshArgument | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return a tensor of one value, like torch.full, but distributed: each rank makes only its own part.

    Args:
        size: The global shape.
        fill_value: The value of every element.
        dtype: By default that which torch.full gives this value.
        layout, requires_grad, device_mesh, placements: As for `zeros`.

    Raises:
        LayoutError: Arguments are wrong or do not fit each other.
    """
    check_type(fill_value, (bool, int, float, complex), "full: fill_value", "give a number")
    check_type(dtype, (torch.dtype, type(None)), "full: dtype")
    target = _layout_for((size,), dtype or torch.full((), fill_value).dtype, layout, device_mesh, placements)
    return _filled(lambda shape, **more: torch.full(shape, fill_value, **more), target, requires_grad)


def linspace(
    start: float | torch.Tensor,
    end: float | torch.Tensor,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: MeshArgument | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return evenly spaced numbers, like torch.linspace: every rank makes all of them and keeps its own part.

    Args:
        start, end: The first number and the last, or distributed tensors without dims that hold them.
        steps: How many numbers there are.
        dtype: By default that which torch.linspace gives them.
        layout, requires_grad, device_mesh, placements: As for `zeros`.

    Raises:
        LayoutError: Arguments are wrong or do not fit each other.

    >>> import shardwise
    >>> x = shardwise.linspace(0, 1, 5, device_mesh=shardwise.simulate(2), placements=[shardwise.Shard(0)])
    >>> x.full_tensor()
    tensor([0.0000, 0.2500, 0.5000, 0.7500, 1.0000])
    """
    spaced = functools.partial(torch.linspace, _whole(start, "start"), _whole(end, "end"))
    return _spaced(spaced, steps, dtype, layout, requires_grad, device_mesh, placements)


def logspace(
    start: float | torch.Tensor,
    end: float | torch.Tensor,
    steps: int,
    base: float = 10.0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: MeshArgument | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return numbers spaced evenly on a logarithmic scale, like torch.logspace: every rank makes all of them and keeps
    its own part.

    Args:
        start, end: The logarithms of the first number and the last, or distributed tensors without dims that hold them.
        steps: How many numbers there are.
        base: The base of the logarithms.
        dtype, layout, requires_grad, device_mesh, placements: As for `linspace`.

    Raises:
        LayoutError: Arguments are wrong or do not fit each other.
    """
    check_type(base, (int, float), "base")
    spaced = functools.partial(torch.logspace, _whole(start, "start"), _whole(end, "end"), base=base)
    return _spaced(spaced, steps, dtype, layout, requires_grad, device_mesh, placements)


def rand(
    *size: int | Sequence[int],
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: MeshArgument | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return uniform random numbers in [0, 1), like torch.rand. Each rank draws only its own part; the numbers are the
    same whatever the layout.

    Args:
        *size: The global shape, as ints or as one sequence.
        generator: Where keys of random numbers come from; by default torch's default generator.
        dtype, layout, requires_grad, device_mesh, placements: As for `zeros`.

    Raises:
        LayoutError: Arguments are wrong or do not fit each other.
    """
    return _drawn(draws.uniform(), _layout_for(size, dtype, layout, device_mesh, placements), generator, requires_grad)


def randn(
    *size: int | Sequence[int],
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: MeshArgument | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return normal random numbers, like torch.randn. Each rank draws only its own part; the numbers are the same
    whatever the layout.

    Args:
        *size, generator, dtype, layout, requires_grad, device_mesh, placements: As for `rand`.

    Raises:
        LayoutError: Arguments are wrong or do not fit each other.
    """
    return _drawn(draws.normal(), _layout_for(size, dtype, layout, device_mesh, placements), generator, requires_grad)


def randint(
    *bounds_and_size: int | Sequence[int],
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.int64,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: MeshArgument | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return random integers, like torch.randint. Each rank draws only its own part; the numbers are the same whatever
    the layout.

    Args:
        *bounds_and_size: ``[low,] high, size``: the least number (0 without), the first that is too large, and the
            global shape.
        generator, dtype, layout, requires_grad, device_mesh, placements: As for `rand`.

    Raises:
        TypeError: There are not two or three of `bounds_and_size`.
        LayoutError: Arguments are wrong or do not fit each other.
    """
    if not 2 <= len(bounds_and_size) <= 3:
        raise TypeError(f"randint: expected ([low,] high, size), got {bounds_and_size!r}")
    *bounds, size = bounds_and_size
    target = _layout_for((size,), dtype, layout, device_mesh, placements)
    what = draws.integer(dtype, *bounds)  # type: ignore[arg-type]
    return _drawn(what, target, generator, requires_grad)


def randperm(
    n: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.int64,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: MeshArgument | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return a random permutation, like torch.randperm: every rank makes all of it and keeps its own part.

    Args:
        n: How many numbers there are, from 0 on.
        generator, dtype, layout, requires_grad, device_mesh, placements: As for `rand`.

    Raises:
        LayoutError: Arguments are wrong or do not fit each other.
    """
    made = permuted(_layout_for((n,), dtype, layout, device_mesh, placements), generator=generator)
    return made.requires_grad_() if requires_grad else made


def _layout_for(
    size: Sequence[int | Sequence[int]],
    dtype: torch.dtype | None,
    layout: torch.layout,
    device_mesh: MeshArgument | None,
    placements: Placements | None,
    parts: bool = False,
) -> Layout:
    """The layout of a new tensor. `parts` says that its parts may be made as its values are, whatever reduces them."""
    check_strided(layout)
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else tuple(size)
    for n in shape:
        if not isinstance(n, int) or n < 0:
            raise LayoutError(f"size: must be ints >= 0, got {shape}")
    mesh = as_mesh(device_mesh, outside=True)
    places = placements_on(mesh, placements)
    dtype = dtype or torch.get_default_dtype()
    if parts:
        check_reductions(places, dtype)
    elif any(p.is_partial() for p in places):
        raise LayoutError(
            f"placements: this factory makes whole values, not parts; got {list(places)}; use zeros or empty, or "
            f"redistribute the result"
        )
    return Layout.make(mesh, places, shape, dtype)  # type: ignore[arg-type]


def _filled(fill: Callable[..., torch.Tensor], layout: Layout, requires_grad: bool) -> DTensor:
    """A tensor of which each rank makes its part, by a factory of torch's."""
    comm = layout.mesh.comm
    if comm.outside:
        made = wrap(held_of(layout), layout)
        return made.requires_grad_() if requires_grad else made
    split = tuple(axis for axis, p in enumerate(layout.placements) if not p.is_replicate())
    make = comm.bind(lambda shape: fill(shape, dtype=layout.dtype, device=layout.device), split)
    made = wrap(make(comm.per_rank(layout.local_shape_at)), layout)
    return made.requires_grad_() if requires_grad else made


def _spaced(
    spaced: Callable[..., torch.Tensor],
    steps: int,
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: MeshArgument | None,
    placements: Placements | None,
) -> DTensor:
    """A tensor of `steps` numbers, of which each rank makes all and keeps its part."""
    check_type(steps, int, "steps")
    dtype = spaced(steps=0, dtype=dtype).dtype  # torch's own default, and its errors
    target = _layout_for((steps,), dtype, layout, device_mesh, placements)
    made = _filled(lambda _, **more: spaced(steps=steps, **more), target.replicated(), False)
    made = made.redistribute(placements=target.placements)
    return made.requires_grad_() if requires_grad else made


def _whole(number: float | torch.Tensor, name: str) -> float | torch.Tensor:
    check_type(number, (bool, int, float, complex, torch.Tensor), name, "give a number")
    return number.full_tensor() if isinstance(number, DTensor) else number


def _drawn(
    distribution: draws.Distribution, layout: Layout, generator: torch.Generator | None, requires_grad: bool
) -> DTensor:
    """A tensor of which each rank draws the numbers of its own elements."""
    distribution.check(layout.dtype)
    made = drawn(layout, distribution, generator)
    return made.requires_grad_() if requires_grad else made
