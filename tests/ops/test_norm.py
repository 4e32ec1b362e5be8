"""Norms by statistics: values, gradients and buffers on every layout, with only statistics on the wire."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import Partial, Replicate, Shard, distribute_tensor, simulate
from shardwise.testing import check_rule, spread_out
from tests.values import compare, seeded
from tests.workers import device_mesh, run_ranks

MESHES = [(3,), (2, 2), (2, 1, 3)]
aten = torch.ops.aten

CASES = {
    "layer norm": (lambda x, w, b: F.layer_norm(x, (5, 4), w, b), [(3, 5, 4), (5, 4), (5, 4)]),
    "layer norm plain": (lambda x: F.layer_norm(x, (7,), eps=0.1), [(2, 7)]),
    "native layer norm": (lambda x, w: torch.native_layer_norm(x, [4], w, None, 1e-5), [(3, 5, 4), (4,)]),
    "rms norm": (lambda x, w: F.rms_norm(x, (5,), w), [(3, 5), (5,)]),
    "rms norm eps": (lambda x: F.rms_norm(x, (3, 5), eps=0.1), [(3, 5)]),
    "group norm": (lambda x, w, b: F.group_norm(x, 3, w, b), [(2, 6, 5), (6,), (6,)]),
    "group norm 2d": (lambda x, w: F.group_norm(x, 2, w), [(4, 4, 3, 2), (4,)]),
    "group norm flat": (lambda x: F.group_norm(x, 2), [(4, 6)]),
    "group norm of nothing": (lambda x, w: F.group_norm(x, 2, w), [(0, 4, 3), (4,)]),
    "native group norm": (lambda x, w: torch.native_group_norm(x, w, None, 4, 6, 3, 2, 1e-5), [(4, 6, 3), (6,)]),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(5, 4, 3), (4,), (4,)]),
    "batch norm flat": (lambda x: F.batch_norm(x, None, None, training=True), [(4, 3)]),
    "batch norm eval": (lambda x, m, v: F.batch_norm(x, m.detach(), v.detach().abs()), [(2, 4, 3), (4,), (4,)]),
    "batch norm 3d": (lambda x, w: F.batch_norm(x, None, None, w, training=True), [(2, 3, 2, 2, 4), (3,)]),
    "instance norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), [(2, 3, 5), (3,), (3,)]),
    "no statistics": (lambda x, w: aten._native_batch_norm_legit(x, w, None, True, 0.1, 1e-5), [(5, 4), (4,)]),
    "normalize": (lambda x: F.normalize(x, dim=1), [(3, 5)]),
    "normalize by 3": (lambda x: F.normalize(x, 3.0, -1), [(2, 3, 4)]),
    "cosine similarity": (F.cosine_similarity, [(5, 4), (5, 4)]),
    "pairwise distance": (lambda x, y: F.pairwise_distance(x, y, 3.0), [(5, 4), (5, 4)]),
    "weight norm": (torch._weight_norm, [(4, 3, 2), (4, 1, 1)]),
    "weight norm of all": (lambda v, g: torch._weight_norm(v, g, -1), [(4, 3), ()]),
    "local response": (lambda x: F.local_response_norm(x, 2), [(2, 4, 3)]),
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_simulated(name, mesh):
    function, shapes = CASES[name]
    check_rule(function, [seeded(*shapes)], [simulate(mesh)], limit=6, seed=len(name), tolerance=1e-10)


FORMS = {
    "native": lambda x, w, m, v: torch.native_batch_norm(x, w, None, m, v, True, 0.3, 1e-5),
    "legit": lambda x, w, m, v: aten._native_batch_norm_legit(x, w, None, m, v, True, 0.3, 1e-5),
    "functional": lambda x, w, m, v: aten._native_batch_norm_legit_functional(x, w, None, m, v, True, 0.3, 1e-5),
    "update": lambda x, w, m, v: aten._batch_norm_with_update(x, w, None, m, v, 0.3, 1e-5)[:3],
    "update functional": lambda x, w, m, v: aten._batch_norm_with_update_functional(x, w, None, m, v, 0.3, 1e-5)[4:],
    "no update": lambda x, w, m, v: aten._batch_norm_no_update(x, w, None, m, v, 0.3, 1e-5)[0],
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("places", [Shard(0), Shard(1), Shard(1, sizes=(0, 4, 0)), Replicate(), Partial()], ids=str)
def test_batch_norm_forms_and_running_statistics(name, places):
    mesh = simulate((3,))
    x, w = seeded((5, 4, 2), (4,))
    statistics = [torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)]
    mine = [spread_out(s, mesh, [p]) for s, p in zip(statistics, (Replicate(), Shard(0)), strict=True)]
    want = FORMS[name](x, w, *statistics)
    got = FORMS[name](spread_out(x, mesh, [places]), spread_out(w, mesh, [Shard(0)]), *mine)
    pairs = zip(got, want, strict=True) if isinstance(want, (tuple, list)) else [(got, want)]
    for g, wanted in [*pairs, *zip(mine, statistics, strict=True)]:
        compare(g, wanted, f"{name} {places}", 1e-10)


def test_synchronised_batch_norm_trains_and_evaluates_as_on_one_device():
    mesh = simulate((2, 2))
    module = nn.BatchNorm2d(4, momentum=None).double()
    mine = copy.deepcopy(module)
    for step in range(3):
        (x,) = seeded((5, 4, 3, 3), seed=step)
        module.train(step < 2), mine.train(step < 2)
        given = distribute_tensor(x, mesh, [Shard(0), Shard(3)])
        compare(mine(given), module(x), f"step {step}", 1e-10)
    for got, want in zip(mine.buffers(), module.buffers(), strict=True):
        compare(got, want, "buffers", 1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_have_float_statistics(dtype):
    x, w = (t.to(dtype) for t in seeded((6, 8), (8,)))
    x = x + 20
    for dim, function in [
        (1, lambda x, w: F.layer_norm(x, (8,), w)),
        (1, lambda x, w: F.rms_norm(x, (8,), w)),
        (1, lambda x, w: F.group_norm(x, 2, w)),
        (0, lambda x, w: F.batch_norm(x, None, None, w, training=True)),
    ]:
        got = function(distribute_tensor(x, simulate((3,)), [Shard(dim)]), w)
        assert got.dtype == dtype
        compare(got.to(torch.float64), function(x.double(), w.double()), str(dtype), 2e-2)


def test_a_large_mean_costs_no_digits():
    (x,) = seeded((9, 6))
    x = x + 1e6
    mine = distribute_tensor(x, simulate((3,)), [Shard(0)])
    compare(F.batch_norm(mine, None, None, training=True), F.batch_norm(x, None, None, training=True), "shift", 1e-8)


@pytest.mark.parametrize(
    "function, dim, most",
    [
        (lambda x: F.layer_norm(x, (64,)), 2, 400),
        (lambda x: F.rms_norm(x, (64,)), 2, 400),
        (lambda x: F.batch_norm(x, None, None, training=True), 0, 400),
        (lambda x: F.batch_norm(x, None, None, training=True), 2, 400),
        (lambda x: F.group_norm(x, 2), 2, 1000),
        (lambda x: F.group_norm(x, 2), 1, 1000),
        (lambda x: F.normalize(x, dim=2), 2, 800),
    ],
)
def test_only_statistics_travel(function, dim, most):
    (x,) = seeded((6, 6, 64))
    mine = distribute_tensor(x, simulate((3,)), [Shard(dim)])
    with shardwise.debug.ledger() as log:
        out = function(mine)
    assert sum(entry.bytes for entry in log) <= 3 * most * 8, [str(e) for e in log]
    assert out.placements == (Shard(dim),)


def test_whole_statistics_move_nothing():
    x, w = seeded((6, 6, 4), (6,))
    mesh = simulate((3,))
    rows, scale = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Shard(0)])
    with shardwise.strict():
        F.layer_norm(rows, (6, 4)), F.group_norm(rows, 2), F.instance_norm(rows), F.local_response_norm(rows, 2)
        channels = F.batch_norm(distribute_tensor(x, mesh, [Shard(1)]), None, None, scale, training=True)
    assert channels.placements == (Shard(1),)


def on_gloo(rank, world_size):
    for name in ["layer norm", "group norm", "batch norm", "batch norm eval", "instance norm", "normalize"]:
        function, shapes = CASES[name]
        check_rule(function, [seeded(*shapes)], [device_mesh((2, 2))], limit=3, tolerance=1e-10)
        check_rule(function, [seeded(*shapes)], [device_mesh((4,))], limit=2, tolerance=1e-10)


def test_processes():
    run_ranks(on_gloo, 4)


def recomputed_batch_norm(placement, mesh):
    x = torch.randn(5, 6, 4, 7, generator=torch.Generator().manual_seed(0))
    plain, mine = torch.nn.BatchNorm2d(6), shardwise.distribute_module(torch.nn.BatchNorm2d(6), mesh)
    for model, given in ((plain, x), (mine, shardwise.distribute_tensor(x, mesh, [placement]))):
        torch.utils.checkpoint.checkpoint(model, given, use_reentrant=False).sin().sum().backward()
    for name, want in plain.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name].full_tensor(), want, msg=name)
    torch.testing.assert_close(mine.weight.grad.full_tensor(), plain.weight.grad)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(3), Replicate()], ids=str)
def test_a_checkpointed_batch_norm_keeps_the_statistics_of_plain_torch(placement):
    """The recomputation writes them once more, though it ends as soon as it has what the backward pass needs."""
    recomputed_batch_norm(placement, simulate((3,)))


def recomputed_on_gloo(rank, world_size):
    for placement in (Shard(0), Shard(1), Shard(3)):
        recomputed_batch_norm(placement, device_mesh((world_size,)))


def test_a_checkpointed_batch_norm_on_processes():
    run_ranks(recomputed_on_gloo, 3)
