"""Cross-entropy over cut classes equals one device's, and what moves grows with the batch, not with the classes."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import LayoutError, Partial, Replicate, Shard, debug, distribute_tensor, simulate
from shardwise.parallel import ColwiseParallel, loss_parallel, parallelize_module
from shardwise.testing.spread import spread_out
from tests.workers import device_mesh, run_ranks

R = Replicate()
BATCH, CLASSES = 6, 11  # over 2, 3 and 4 ranks: uneven
MESHES = {
    "classes": ((4,), [Shard(1)], [R]),
    "batch x classes": ((2, 2), [Shard(0), Shard(1)], [Shard(0), R]),
    "whole batch x classes": ((2, 2), [R, Shard(1)], [R, R]),
    "classes, some ranks with none": ((4,), [Shard(1, sizes=(0, 9, 0, 2))], [R]),
    "classes over two axes": ((2, 2), [Shard(1), Shard(1)], [R, R]),
    "batch x classes x classes": ((2, 2, 2), [Shard(0), Shard(1), Shard(1)], [Shard(0), R, R]),
}
OPTIONS = [
    {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored, "weight": weight}
    for reduction, smoothing, ignored, weight in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.1), (-100, 3), (False, True)
    )
]


def case(shape, dtype=torch.float64):
    """Logits of this shape with the classes second, and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator, dtype=dtype) * 3
    targets = torch.randint(CLASSES, (shape[0], *shape[2:]), generator=generator)
    targets.view(-1)[1::5] = 3
    return logits, targets, torch.rand(CLASSES, generator=generator, dtype=dtype)


def loss_and_grad(logits, targets, weight, options, plain=False):
    logits = logits.detach().requires_grad_()
    options = options | {"weight": weight if options["weight"] else None}
    if not plain:
        with loss_parallel():
            loss = F.cross_entropy(logits, targets, **options)
            loss.pow(2).sum().backward()
        return loss.full_tensor().detach(), logits.grad
    loss = F.cross_entropy(logits, targets, **options)
    loss.pow(2).sum().backward()
    return loss.detach(), logits.grad


def check_all(mesh, places, target_places, every=1):
    for shape in ((BATCH, CLASSES), (BATCH, CLASSES, 3)):
        logits, targets, weight = case(shape)
        for options in OPTIONS[::every]:
            want = loss_and_grad(logits, targets, weight, options, plain=True)
            laid = distribute_tensor(logits, mesh, places), distribute_tensor(targets, mesh, target_places)
            got = loss_and_grad(*laid, distribute_tensor(weight, mesh), options)
            torch.testing.assert_close(got[0], want[0], rtol=0, atol=1e-10, msg=lambda m, o=options: f"{o} {m}")
            assert got[1].placements == laid[0].placements, "the gradient stays cut as the logits are"
            whole = got[1].full_tensor()
            torch.testing.assert_close(whole, want[1], rtol=0, atol=1e-10, msg=lambda m, o=options: f"{o} {m}")


@pytest.mark.parametrize("name", MESHES)
def test_options_simulated(name):
    shape, places, target_places = MESHES[name]
    check_all(simulate(shape), places, target_places)


def on_ranks(rank, world_size, names):
    for name in names:
        shape, places, target_places = MESHES[name]
        check_all(device_mesh(shape), places, target_places, every=5)


def test_options_on_4_processes():
    run_ranks(on_ranks, 4, ["batch x classes", "classes, some ranks with none"])


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_each_rank_has_the_loss_of_its_samples(name, reduction):
    """`loss.to_local()` is no share of a sum over the classes."""
    shape, places, target_places = MESHES[name]
    logits, targets, _ = case((BATCH, CLASSES))
    mesh = simulate(shape)
    with loss_parallel():
        loss = F.cross_entropy(
            distribute_tensor(logits, mesh, places),
            distribute_tensor(targets, mesh, target_places),
            reduction=reduction,
        )
    assert all(loss.placements[axis] == R for axis, place in enumerate(places) if place.is_shard(1))
    want = F.cross_entropy(logits, targets, reduction=reduction)
    if not any(place.is_shard(0) for place in places):
        for local in loss.to_local().ranks:
            torch.testing.assert_close(local, want)
    torch.testing.assert_close(loss.full_tensor(), want)


def on_two(rank, world_size):
    check_all(device_mesh((2,)), [Shard(1)], [R], every=5)


def test_options_on_2_processes():
    run_ranks(on_two, 2)


def test_probabilities_as_targets():
    logits, _, weight = case((BATCH, CLASSES))
    probabilities = torch.rand(BATCH, CLASSES, dtype=torch.float64).softmax(1)
    mesh = simulate(4)
    for options in OPTIONS:
        options = options | {"ignore_index": -100}
        want = loss_and_grad(logits, probabilities, weight, options, plain=True)
        for where in ([Shard(1)], [R]):
            laid = distribute_tensor(logits, mesh, [Shard(1)]), distribute_tensor(probabilities, mesh, where)
            got = loss_and_grad(*laid, distribute_tensor(weight, mesh), options)
            torch.testing.assert_close(got[0], want[0], rtol=0, atol=1e-10)
            torch.testing.assert_close(got[1].full_tensor(), want[1], rtol=0, atol=1e-10)


def moved(classes, batch=64, **options):
    """Bytes that all ranks together receive for a loss of so many classes on 4 ranks, forward and backward."""
    mesh = simulate(4)
    logits = distribute_tensor(torch.randn(batch, classes), mesh, [Shard(1)]).requires_grad_()
    targets = distribute_tensor(torch.arange(batch) % classes, mesh)
    weight = distribute_tensor(torch.rand(classes), mesh) if options.pop("weighted", False) else None
    z_loss = options.pop("z_loss", 0.0)
    with debug.ledger() as log, loss_parallel():
        loss = F.cross_entropy(logits, targets, weight, **options)
        if z_loss:
            loss = loss.sum() + z_loss * logits.logsumexp(-1).square().sum()
        loss.sum().backward()
    return log.total_bytes, log


@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"ignore_index": 2}, {"weighted": True},
     {"label_smoothing": 0.1, "weighted": True}, {"z_loss": 1e-4}],
    ids=str,
)  # fmt: skip
def test_bytes_follow_the_batch(options):
    few, many, twice = moved(64, **options)[0], moved(4096, **options)[0], moved(64, batch=128, **options)[0]
    assert few == many, "64 times as many classes move not a byte more"
    assert 1.8 < twice / few <= 2
    # A ring all-reduce of one float32 a sample brings every one of 4 ranks 2 * 3/4 of it.
    one_number_a_sample = 64 * 4 * 4 * 2 * 3 / 4
    assert few <= 9 * one_number_a_sample + 1000
    whole = 64 * 4096 * 4 * 3  # what gathering the logits would bring
    assert many < whole / 50


def test_nothing_is_gathered():
    for options in ({}, {"label_smoothing": 0.1, "weighted": True}, {"z_loss": 1e-4}):
        _, log = moved(512, **options)
        assert {entry.kind for entry in log} == {"all_reduce"}, [(e.op, e.kind) for e in log]


def test_logsumexp_for_a_z_loss():
    logits, targets, _ = case((BATCH, CLASSES))
    mesh = simulate((2, 2))
    results = []
    for x, t in (
        (logits.clone().requires_grad_(), targets),
        (distribute_tensor(logits, mesh, [Shard(0), Shard(1)]).requires_grad_(), distribute_tensor(targets, mesh)),
    ):
        with loss_parallel():
            total = F.cross_entropy(x, t) + 1e-2 * x.logsumexp(-1).square().mean()
            total.backward()
        results.append((total, x.grad))
    torch.testing.assert_close(results[1][0].full_tensor(), results[0][0], rtol=0, atol=1e-10)
    torch.testing.assert_close(results[1][1].full_tensor(), results[0][1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    logits, targets, weight = case((BATCH, CLASSES), dtype)
    mesh = simulate(4)
    for smoothing in (0.0, 0.1):
        options = {"label_smoothing": smoothing, "weight": False}
        want = loss_and_grad(logits, targets, weight, options, plain=True)
        laid = distribute_tensor(logits, mesh, [Shard(1)]), distribute_tensor(targets, mesh)
        got = loss_and_grad(*laid, weight, options)
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
        torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got[1].full_tensor(), want[1], rtol=tolerance, atol=tolerance)


def test_all_targets_ignored_and_an_empty_batch():
    mesh = simulate(4)
    for rows in (3, 0):
        logits = torch.randn(rows, CLASSES, dtype=torch.float64)
        targets = torch.full((rows,), -100)
        for reduction in ("sum", "none", "mean"):
            want = F.cross_entropy(logits, targets, reduction=reduction)
            with loss_parallel():
                got = F.cross_entropy(
                    distribute_tensor(logits, mesh, [Shard(1)]), distribute_tensor(targets, mesh), reduction=reduction
                )
            torch.testing.assert_close(got.full_tensor(), want, equal_nan=True)


def test_what_would_move_the_logits_raises():
    mesh = simulate((2, 2))
    logits, targets, _ = case((BATCH, CLASSES))
    at = distribute_tensor(targets, mesh)
    for places, message in (
        ([R, R], r"loss_parallel\(\) requires exactly one mesh dim to shard tensor dimension 1, but got placements .* of shape \(6, 11\)"),
        ([Shard(0), R], "redistribute it to Shard\\(1\\) on an axis, or give the last layer ColwiseParallel"),
        ([Partial(), Shard(1)], "requires no mesh dim that is pending"),
    ):
        x = spread_out(logits, mesh, places)
        with pytest.raises(LayoutError, match=message), loss_parallel():
            F.cross_entropy(x, at)
        F.cross_entropy(x, at)  # outside, it moves what it must
    probabilities = distribute_tensor(logits.softmax(1), mesh, [Shard(1), R])
    with pytest.raises(LayoutError, match="loss_parallel: target, of probabilities"), loss_parallel():
        F.cross_entropy(
            distribute_tensor(logits, mesh, [R, Shard(1)]), probabilities.redistribute(placements=[R, Shard(0)])
        )
    with loss_parallel():  # a plain loss beside it is none of its business
        F.cross_entropy(logits, targets)


def test_from_a_column_parallel_head():
    torch.manual_seed(0)
    head, x, targets = nn.Linear(8, CLASSES).double(), torch.randn(BATCH, 8, dtype=torch.float64), torch.arange(BATCH)
    F.cross_entropy(head(x), targets).backward()
    want = [p.grad.clone() for p in head.parameters()]
    head.zero_grad()
    parallelize_module(head, simulate(4), ColwiseParallel(use_local_output=False))
    with loss_parallel():
        F.cross_entropy(head(x), targets).backward()
    for param, grad in zip(head.parameters(), want, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), grad, rtol=0, atol=1e-10)
