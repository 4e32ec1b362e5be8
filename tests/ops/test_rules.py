"""Every rule of the transformer set, forward and backward, on random layouts of 1-D to 3-D simulated meshes."""

import math

import pytest

from shardwise import simulate
from shardwise.testing import check_rule
from tests.ops.cases import CASES
from tests.workers import device_mesh, run_ranks

MESHES = [(3,), (2, 2), (2, 1, 3)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_simulated(name, mesh):
    function, tensors = CASES[name]
    check_rule(function, [tensors], [simulate(mesh)], limit=8, seed=len(name), tolerance=1e-10)


def on_gloo(rank, world_size, names, shape):
    for name in names:
        function, tensors = CASES[name]
        try:
            check_rule(function, [tensors], [device_mesh(shape)], limit=3, seed=len(name) + 1, tolerance=1e-10)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


REAL = [(2,), (4,), (2, 2)]


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_gloo(part, shape):
    """Every case on one real mesh: what is new there is only how the ranks talk."""
    names = list(CASES)[REAL.index(shape) :: len(REAL)][part::2]
    run_ranks(on_gloo, math.prod(shape), names, shape)
