"""Pooling and resampling: batch and channels pass, cut spatial dims stay cut and fetch only edges."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Partial, RankTensor, Replicate, Shard, debug, simulate
from shardwise.testing import check_rule, spread_out
from tests.values import compare, seeded
from tests.workers import device_mesh, run_ranks

aten = torch.ops.aten
POOLS = {
    "max1": (lambda x: F.max_pool1d(x, 3, 2, 1), (2, 2, 9)),
    "max2": (
        lambda x: F.max_pool2d(x, (3, 2), stride=(2, 1), padding=1, dilation=(1, 2), ceil_mode=True),
        (2, 2, 8, 7),
    ),
    "max2 indices": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (2, 3, 8, 7)),
    "max2 stride over kernel": (lambda x: F.max_pool2d(x, 1, 3, return_indices=True), (3, 10, 8)),
    "max3": (lambda x: F.max_pool3d(x, (2, 3, 2), 2, (0, 1, 0), return_indices=True), (1, 2, 6, 5, 4)),
    "unbatched": (lambda x: F.max_pool2d(x, 2), (3, 7, 6)),
    "ties": (lambda x: F.max_pool2d(x.sign(), 3, 1, 1, return_indices=True), (1, 2, 7, 6)),
    "low": (lambda x: F.max_pool2d(x.sign() / 0, 2, 2, 1, return_indices=True)[1], (1, 2, 7, 6)),
    "avg1": (lambda x: F.avg_pool1d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), (2, 2, 9)),
    "avg2": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (2, 3, 8, 7)),
    "avg2 divisor": (lambda x: F.avg_pool2d(x, kernel_size=(2, 3), divisor_override=5), (2, 3, 8, 7)),
    "avg3": (lambda x: F.avg_pool3d(x, 4, 1, 2, False, False), (1, 2, 5, 5, 4)),
    "lp": (lambda x: F.lp_pool2d(x.abs() + 1, 2.0, 3, 2), (2, 2, 8, 7)),
    "adaptive avg1": (lambda x: F.adaptive_avg_pool1d(x, 4), (2, 3, 10)),
    "adaptive avg2": (lambda x: F.adaptive_avg_pool2d(x, (4, None)), (2, 3, 8, 5)),
    "global": (lambda x: F.adaptive_avg_pool2d(x, 1), (2, 3, 8, 5)),
    "adaptive avg3": (lambda x: F.adaptive_avg_pool3d(x, (2, 5, 1)), (2, 2, 4, 3, 3)),
    "adaptive max2": (lambda x: F.adaptive_max_pool2d(x, (6, 3), return_indices=True), (2, 3, 8, 5)),
    "adaptive to nothing": (lambda x: F.adaptive_avg_pool2d(x.detach(), (0, 3)), (2, 3, 8, 5)),
    "no batch at all": (lambda x: F.max_pool2d(x, 2), (0, 3, 6, 6)),
    "pieces": (lambda x: F.max_pool2d(torch.cat([x, x], 2), 3, 2, 1, return_indices=True), (2, 2, 5, 6)),
    "unpool": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (2, 3, 6, 4)),
}
IMAGES = {
    "nearest": (lambda x: F.interpolate(x, scale_factor=1.7), (2, 3, 7, 6)),
    "nearest down": (lambda x: F.interpolate(x, (5, 4), mode="nearest-exact"), (2, 2, 8, 6)),
    "linear": (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), (2, 3, 9)),
    "bilinear": (lambda x: F.interpolate(x, (6, 12), mode="bilinear"), (2, 3, 9, 6)),
    "corners": (lambda x: F.interpolate(x, (6, 12), mode="bilinear", align_corners=True), (2, 3, 9, 6)),
    "uneven scale": (lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear"), (2, 3, 9, 6)),
    "antialias": (lambda x: F.interpolate(x, (4, 12), mode="bicubic", antialias=True), (1, 2, 16, 6)),
    "bicubic": (lambda x: F.interpolate(x, (18, 4), mode="bicubic"), (1, 2, 9, 6)),
    "trilinear": (lambda x: F.interpolate(x, scale_factor=2.0, mode="trilinear"), (1, 2, 4, 3, 5)),
    "area": (lambda x: F.interpolate(x, (4, 3), mode="area"), (2, 2, 8, 5)),
    "affine": (lambda x: F.affine_grid(x, (4, 2, 3, 5), align_corners=False), (4, 2, 3)),
    "shuffle": (lambda x: F.pixel_shuffle(x, 2), (2, 8, 3, 4)),
    "unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (3, 6, 4)),
    "channels": (lambda x: F.channel_shuffle(x, 3), (2, 6, 3, 2)),
}
CASES = POOLS | IMAGES


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(3,), (2, 2), (2, 1, 2)], ids=str)
def test_as_plain_torch(name, shape):
    function, size = CASES[name]
    check_rule(function, [seeded(size)], [simulate(shape)], limit=5, seed=len(name), tolerance=1e-10)


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
def test_grid_sample(shape):
    x, grid = seeded((3, 2, 4, 5), (3, 6, 4, 2))
    check_rule(
        lambda x, g: F.grid_sample(x, g, align_corners=False), [[x, grid]], [simulate(shape)], limit=12, tolerance=1e-10
    )


def test_the_same_random_regions():
    def pool(x):
        torch.manual_seed(3)
        return F.fractional_max_pool2d(x, 2, output_ratio=(0.6, 0.5), return_indices=True)

    check_rule(pool, [seeded((4, 3, 7, 6))], [simulate((3,))], limit=8, tolerance=1e-10)


def test_backward_op():
    x, g = seeded((3, 4, 6, 6), (3, 4, 3, 3))
    _, where = F.max_pool2d(x, 2, return_indices=True)
    op = lambda g, x: aten.max_pool2d_with_indices_backward(g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, where)  # noqa: E731
    check_rule(op, [[g, x]], [simulate((3,))], limit=8, grad=False, tolerance=1e-10)


EDGES = ["max2", "max2 indices", "avg2", "adaptive avg1", "linear"]


@pytest.mark.parametrize("name", EDGES)
def test_only_edges_travel(name):
    function, (*size, _) = CASES[name]
    x = spread_out(*seeded((*size, 120)), simulate((3,)), [Shard(len(size))])
    with debug.ledger() as log:
        y = function(x) if name != "adaptive avg1" else F.adaptive_avg_pool1d(x, 45)
    assert all((t if t.ndim else x).placements[0].is_shard(len(size)) for t in (y if isinstance(y, tuple) else (y,)))
    assert all(entry.kind == "all_to_all" and not entry.reason for entry in log)
    row = 8 * torch.Size(size).numel()
    assert sum(entry.bytes for entry in log) <= 4 * 3 * row  # a few rows a rank


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("global", "adaptive to nothing", "affine")])
def test_batches_and_channels_pass(name):
    function, size = CASES[name]
    size = (3, *size[1:]) if size[0] else size
    x = spread_out(*seeded(size), simulate((3,)), [Shard(0)])
    with debug.ledger() as log:
        function(x)
    assert not log


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_dtypes(dtype):
    plain = (seeded((2, 3, 8, 6))[0] * 5).to(dtype)
    x = spread_out(plain, simulate((3,)), [Shard(2)])
    for got, want in zip(
        F.max_pool2d(x, 3, 2, 1, 1, False, True), F.max_pool2d(plain, 3, 2, 1, 1, False, True), strict=True
    ):
        compare(got, want, "max", 0)
    if dtype.is_floating_point:
        compare(F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(plain, 3, 2, 1), "avg", 0)
        compare(F.interpolate(x, scale_factor=49), F.interpolate(plain, scale_factor=49), "nearest", 0)


def test_averages_of_integers_round_after_the_sum():
    plain = torch.arange(36).view(1, 1, 6, 6)
    local = RankTensor([plain // 2, plain - plain // 2 - 1, torch.ones_like(plain)])
    x = DTensor.from_local(local, simulate((3,)), [Partial()])
    compare(F.avg_pool2d(x, 3), F.avg_pool2d(plain, 3), "int64", 0)


def test_torch_refuses_what_it_refuses():
    x = spread_out(*seeded((2, 3, 4, 4)), simulate((3,)), [Shard(2)])
    for bad in [
        lambda: F.max_pool2d(x, 9),
        lambda: F.avg_pool2d(x, 2, padding=2),
        lambda: F.pixel_shuffle(x, 2),
        lambda: F.channel_shuffle(x, 0),
        lambda: F.interpolate(x, (0, 3)),
    ]:
        with pytest.raises(RuntimeError):
            bad()


def on_processes(rank, world_size):
    for name in ["max2 indices", "avg2", "adaptive avg2", "pieces", "nearest", "bilinear", "shuffle"]:
        function, size = CASES[name]
        check_rule(function, [seeded(size)], [device_mesh((3,))], limit=6, tolerance=1e-10)
    x = spread_out(*seeded((1, 1, 2, 4)), device_mesh((3,)), [Shard(2)], requires_grad=True)  # a rank without rows
    F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 2).sum().redistribute(placements=[Replicate()]).backward()
    assert x.grad.shape == x.shape


def test_on_processes():
    run_ranks(on_processes, 3)
