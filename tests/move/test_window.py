"""Windows of a cut dim: every rank sees the indices it asked for, and their gradients find the way back."""

import random

import pytest
import torch

from shardwise import Partial, Shard, simulate
from shardwise.debug import ledger
from shardwise.layout.split import count, intersect, normalize
from shardwise.strategy.program import Windowed, run_local
from shardwise.testing import spread_out
from tests.values import layouts_of, seeded


def needs_of(layout, dim, generator):
    """Random windows; ranks that differ only on axes that do not cut `dim` get the same."""
    table = {}

    def needs(coords):
        key = tuple(coords[axis] for axis in layout.axes_of(dim))
        if key not in table:
            cuts = [generator.randint(0, layout.shape[dim]) for _ in range(4)]
            table[key] = normalize([sorted(cuts[:2]), sorted(cuts[2:])])
        return table[key]

    for rank in layout.mesh.ranks:  # the order of asking must not matter
        needs(layout.mesh.coords(rank))
    return needs


def windows_back_together(x, needs):
    """Each rank puts its windows where they came from; a sum of it all, so overlaps count several times."""

    def put_back(v, at):
        out = v.new_zeros(x.shape)
        index = torch.meshgrid(
            *(torch.tensor([i for a, b in held for i in range(a, b)], dtype=torch.long) for held in at), indexing="ij"
        )
        return out.index_put(tuple(index), v, accumulate=True)

    layout = x._layout
    sum_of_all = layout.replace(placements=[Partial() if p.is_shard() else p for p in layout.placements])
    every = {d: needs.get(d, lambda coords, d=d: layout.held(d, coords)) for d in range(layout.ndim)}
    at = lambda coords: tuple(every[d](coords) for d in range(layout.ndim))  # noqa: E731
    return run_local(put_back, [Windowed(x, needs)], sum_of_all, at)


@pytest.mark.parametrize("shape", [(3,), (4,), (2, 3), (3, 2), (2, 2, 2)])
@pytest.mark.parametrize("seed", range(12))
def test_values_and_gradients(shape, seed):
    generator = random.Random(seed)
    mesh = simulate(shape)
    (full,) = seeded((7, 6), seed=seed)
    x = spread_out(full, mesh, layouts_of(full, shape, generator, partial=False), requires_grad=True)
    layout = x._layout
    needs = {d: needs_of(layout, d, generator) for d in range(2)}
    split = [a for a, p in enumerate(layout.placements) if p.is_shard()]
    times = torch.zeros(7, 6, dtype=torch.float64)
    for coords in {
        tuple(c if a in split else 0 for a, c in enumerate(layout.mesh.coords(r))) for r in layout.mesh.ranks
    }:
        rows, columns = ([i for a, b in needs[d](coords) for i in range(a, b)] for d in range(2))
        for i in rows:
            times[i, columns] += 1
    with ledger() as log:
        got = windows_back_together(x, needs)
    torch.testing.assert_close(got.full_tensor().detach(), full * times)
    weight = torch.randn(7, 6, dtype=torch.float64)
    (got.full_tensor() * weight).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), weight * times)
    if len(shape) == 1 and split:
        dim = layout.placements[0].dim
        missing = 0
        for coords in ((i,) for i in range(shape[0])):
            asked, have = needs[dim](coords), layout.held(dim, coords)
            missing += count(asked) - count(intersect(asked, have))
        assert log.total_bytes == missing * 8 * count(needs[1 - dim]((0,)))


def test_second_derivative():
    mesh = simulate((3,))
    (full,) = seeded((7, 2))
    x = spread_out(full, mesh, [Shard(0)], requires_grad=True)
    needs = {0: lambda coords: ((max(2 * coords[0] - 1, 0), min(3 * coords[0] + 3, 7)),)}
    y = windows_back_together(x, needs)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    times = torch.zeros(7).double()
    for c in range(3):
        times[max(2 * c - 1, 0) : min(3 * c + 3, 7)] += 1
    torch.testing.assert_close(second.full_tensor(), 6 * full * times[:, None] ** 3)
