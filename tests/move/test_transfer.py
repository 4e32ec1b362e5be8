"""What travels on processes against what happens where all ranks are at hand: the same numbers, bit by bit."""

import random

import pytest
import torch

from shardwise import simulate
from shardwise.layout.split import normalize
from shardwise.mesh import as_mesh
from shardwise.move.exchange import Exchange
from shardwise.move.planner import plan_steps
from shardwise.move.window import Windows
from tests.layout.brute import deal, grid
from tests.move.cases import source
from tests.move.postbox import transfer_all

MESHES = ((3,), (5,), (2, 3), (2, 2, 2))


def groups(step, mesh_shape):
    """The coordinates that take part together."""
    return {tuple(step.others(coords)) for coords in grid(mesh_shape)}


def check(step, held, mesh_shape):
    """One step both ways; what every rank holds afterwards."""
    after = {}
    for group in groups(step, mesh_shape):
        expected = dict(zip(group, step._among([held[c] for c in group], list(group)), strict=True))
        crossed = {tuple(step.peers(c)) if isinstance(step, Exchange) else group for c in group}
        for peers in crossed:
            found = transfer_all(step, {c: [held[c]] for c in peers}, peers)
            for coords in peers:
                assert torch.equal(found[coords][0], expected[coords]), (step, coords)
        after |= expected
    return after


@pytest.mark.parametrize("block", range(8))
def test_exchanges(block):
    for seed in range(block * 60, block * 60 + 60):
        rng = random.Random(seed)
        mesh_shape = rng.choice(MESHES)
        shape = tuple(rng.choice((0, 1, 2, 3, 5, 8, 13)) for _ in range(rng.choice((0, 1, 2, 2, 3))))
        src, dst = deal(rng, mesh_shape, shape, partial_ops=("sum",)), deal(rng, mesh_shape, shape)
        held = {c: v.clone() for c, v in source(src, seed=seed).local.items()}
        if seed % 3 == 0:  # memory with holes
            held = {c: v.mT.contiguous().mT if v.ndim > 1 else v for c, v in held.items()}
        mesh = as_mesh(simulate(mesh_shape))
        layouts = [dealt.layout().replace(mesh=mesh) for dealt in (src, dst)]
        for step in plan_steps(*layouts):
            if isinstance(step, Exchange):
                rounds = rng.choice((1, 1, 2, 3))
                held = check(step.with_(rounds=rounds) if rounds > 1 else step, held, mesh_shape)
            else:
                held = {c: step.run(mesh.comm, held_by(mesh, held)).ranks[i] for i, c in enumerate(grid(mesh_shape))}


def held_by(mesh, held):
    return mesh.comm.assemble(range(len(mesh.comm.grid)), [held[c] for c in mesh.comm.grid])


@pytest.mark.parametrize("seed", range(40))
def test_windows_there_and_back(seed):
    rng = random.Random(seed)
    mesh_shape = rng.choice(MESHES)
    shape = tuple(rng.randint(1, 9) for _ in range(rng.choice((1, 2, 3))))
    dealt = deal(rng, mesh_shape, shape)
    layout = dealt.layout()
    cut = [dim for dim in range(len(shape)) if layout.axes_of(dim)]
    table = {}

    def needs(dim):
        def of(coords):
            key = dim, tuple(coords[axis] for axis in layout.axes_of(dim))
            if key not in table:
                ends = [sorted(rng.randint(0, shape[dim]) for _ in range(2)) for _ in range(2)]
                table[key] = normalize(ends)
            return table[key]

        return of

    held = {c: v.clone() for c, v in source(dealt, seed=seed).local.items()}
    steps = Windows(layout, {dim: needs(dim) for dim in cut}).steps
    for step in (*steps, *(step.partner for step in reversed(steps))):
        held = check(step, held, mesh_shape)
