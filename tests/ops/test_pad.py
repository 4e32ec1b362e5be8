"""Padding of cut dims: nothing moves, whatever the mode, the sign and the layout."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard, debug, simulate
from shardwise.testing import check_rule, spread_out
from tests.values import compare, seeded
from tests.workers import device_mesh, run_ranks

CASES = {
    "constant": (lambda x: F.pad(x, (1, 2, 3, 0)), (2, 3, 5, 4)),
    "value": (lambda x: F.pad(x, (1, 2), value=3.0), (2, 5)),
    "all dims": (lambda x: F.pad(x, (1, 0, 0, 1, 2, 2), "constant", None), (2, 5, 4)),
    "negative": (lambda x: F.pad(x, (-2, 1, 1, -3)), (5, 6)),
    "taken away": (lambda x: F.pad(x, (-5, 3)), (2, 5)),
    "nothing there": (lambda x: F.pad(x, (2, 1)), (2, 0)),
    "reflect": (lambda x: F.pad(x, (3, 2, 1, 3), mode="reflect"), (2, 3, 4, 5)),
    "reflect negative": (lambda x: F.pad(x, (3, -2), mode="reflect"), (2, 3, 5)),
    "replicate": (lambda x: F.pad(x, (3, 2, 6, 0, 1, 1), mode="replicate"), (1, 2, 3, 4, 5)),
    "replicate negative": (lambda x: F.pad(x, (-1, 2), mode="replicate"), (2, 2, 5)),
    "circular": (lambda x: F.pad(x, (4, 5), mode="circular"), (2, 3, 5)),
    "circular negative": (lambda x: F.pad(x, (3, -2, -1, 2), mode="circular"), (2, 3, 5, 6)),
    "pieces": (lambda x: F.pad(torch.cat([x, x], -1), (3, 2), mode="reflect"), (2, 5)),
    "twice": (lambda x: F.pad(F.pad(x, (2, 2), mode="circular"), (1, -3)), (2, 5)),
    "aten": (lambda x: torch.ops.aten.reflection_pad1d(x, [2, 1]).sin(), (3, 5)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(3,), (2, 2), (2, 1, 2)], ids=str)
def test_as_plain_torch(name, shape):
    function, size = CASES[name]
    check_rule(function, [seeded(size)], [simulate(shape)], limit=12, seed=len(name), tolerance=1e-10)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("place", [Shard(2), Shard(2, sizes=(1, 0, 6)), Partial()], ids=str)
def test_nothing_moves(mode, place):
    x = spread_out(*seeded((2, 3, 7)), simulate((3,)), [place])
    with debug.ledger() as log:
        y = F.pad(x, (3, 2), mode)
    assert not log and type(y.placements[0]) is type(place)


def test_a_pending_sum_meets_a_value():
    plain = seeded((3, 4))[0]
    y = F.pad(spread_out(plain, simulate((3,)), [Partial()]), (1, 1), value=2.0)
    compare(y, F.pad(plain, (1, 1), value=2.0), "Partial", 1e-12)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float16, torch.complex64])
def test_dtypes(dtype):
    plain = (seeded((4, 5))[0] * 3).to(dtype)
    x = spread_out(plain, simulate((3,)), [Shard(1)])
    compare(F.pad(x, (1, 2), value=1), F.pad(plain, (1, 2), value=1), "value", 0)
    if dtype.is_floating_point or dtype.is_complex:
        compare(F.pad(x, (1, 2), "reflect"), F.pad(plain, (1, 2), "reflect"), "reflect", 0)


def test_torch_refuses_what_it_refuses():
    x = spread_out(*seeded((2, 3)), simulate((3,)), [Shard(1)])
    for args in [((3, 0), "reflect"), ((0, -4),), ((1, 1), "nonsense")]:
        with pytest.raises((RuntimeError, NotImplementedError)):
            F.pad(x, *args)


def on_processes(rank, world_size):
    for name in ["constant", "negative", "reflect", "circular", "twice"]:
        function, size = CASES[name]
        check_rule(function, [seeded(size)], [device_mesh((3,))], limit=5, tolerance=1e-10)
    x = spread_out(*seeded((6, 2)), device_mesh((3,)), [Replicate()])
    assert F.pad(x, (1, 1)).shape == (6, 4)


def test_on_processes():
    run_ranks(on_processes, 3)
