"""Convolutions, unfold and fold: every dim cut in every way, and a cut spatial dim moves only its borders."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, simulate
from shardwise.testing import check_rule, spread_out
from tests.values import compare, seeded
from tests.workers import device_mesh, run_ranks

CASES = {
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), [(2, 4, 7), (5, 4, 3), (5,)]),
    "far": (lambda x, w: F.conv1d(x, w, stride=5), [(2, 4, 17), (5, 4, 3)]),
    "mostly padding": (lambda x, w: F.conv1d(x, w, padding=6), [(2, 4, 5), (5, 4, 3)]),
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=(1, 2), dilation=(2, 1)),
        [(2, 4, 7, 6), (5, 4, 3, 2), (5,)],
    ),
    "named": (lambda x, w, b: F.conv2d(weight=w, input=x, bias=b, padding=1), [(2, 4, 5, 6), (3, 4, 3, 3), (3,)]),
    "same": (lambda x, w: F.conv2d(x, w, padding="same", dilation=(1, 2)), [(2, 4, 7, 6), (5, 4, 4, 2)]),
    "no batch": (lambda x, w: F.conv2d(x, w, padding=1), [(4, 7, 6), (5, 4, 3, 3)]),
    "1 x 1": (lambda x, w, b: F.conv2d(x, w, b), [(2, 4, 2, 6), (5, 4, 1, 1), (5,)]),
    "conv3d": (lambda x, w, b: F.conv3d(x, w, b, padding=1), [(2, 2, 4, 3, 5), (3, 2, 3, 2, 3), (3,)]),
    "groups": (lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=2), [(2, 4, 5, 6), (6, 2, 3, 3), (6,)]),
    "six groups": (lambda x, w, b: F.conv1d(x, w, b, groups=6), [(2, 12, 5), (6, 2, 3), (6,)]),
    "depthwise": (lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=4), [(2, 4, 5, 6), (4, 1, 3, 3), (4,)]),
    "aten": (
        lambda x, w: torch.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        [(2, 4, 5, 6), (3, 4, 3, 3)],
    ),
    "transposed 1d": (
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2, padding=1, output_padding=1),
        [(2, 4, 7), (4, 5, 3), (5,)],
    ),
    "gaps": (
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=4, output_padding=3),
        [(2, 4, 7), (4, 5, 2), (5,)],
    ),
    "transposed 2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=(2, 1), padding=1, dilation=(1, 2)),
        [(2, 4, 5, 6), (4, 5, 3, 2), (5,)],
    ),
    "transposed groups": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=(2, 1), padding=1, groups=2),
        [(2, 4, 5, 6), (4, 3, 3, 2), (6,)],
    ),
    "transposed 3d": (lambda x, w: F.conv_transpose3d(x, w, stride=(2, 1, 2)), [(2, 2, 3, 2, 4), (2, 3, 3, 2, 2)]),
    "windows": (lambda x: x.unfold(1, 3, 2), [(3, 8, 2)]),
    "windows apart": (lambda x: x.unfold(-2, 2, 3), [(3, 8, 2)]),
    "windows copied": (lambda x: torch.unfold_copy(x, 1, 3, 2), [(3, 8, 2)]),
    "windows of nothing": (lambda x: x.unfold(1, 0, 1), [(3, 8, 2)]),
    "columns": (
        lambda x: F.unfold(x, (3, 2), dilation=(1, 2), padding=(1, 0), stride=(2, 1)),
        [(2, 3, 6, 5)],
    ),
    "columns by position": (lambda x: F.unfold(x, 2, 1, 1), [(3, 6, 5)]),
    "fold": (lambda x: F.fold(x, (6, 5), 2), [(2, 12, 20)]),
    "fold no batch": (lambda x: F.fold(x, (6, 5), 2, padding=1, dilation=2, stride=2), [(12, 9)]),
    "across channels": (lambda x: F.local_response_norm(x, 3), [(2, 4, 5)]),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("mesh", [(3,), (2, 2), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case(name, mesh):
    function, shapes = CASES[name]
    check_rule(
        function, [seeded(*shapes)], [simulate(mesh)], limit=10 if len(mesh) < 3 else 4, seed=len(name), tolerance=1e-10
    )


PLACED = {  # x, weight, bias -> the result
    "rows": ([Shard(2), Replicate()], [Replicate()] * 2, [Replicate()] * 2, [Shard(2), Replicate()]),
    "rows twice": ([Shard(2), Shard(2)], [Replicate()] * 2, [Replicate()] * 2, [Shard(2), Shard(2)]),
    "rows, columns": ([Shard(2), Shard(3)], [Replicate()] * 2, [Replicate()] * 2, [Shard(2), Shard(3)]),
    "batch, rows": ([Shard(0), Shard(2)], [Replicate()] * 2, [Replicate()] * 2, [Shard(0), Shard(2)]),
    "rows, channels out": (
        [Shard(2), Replicate()],
        [Replicate(), Shard(0)],
        [Replicate(), Shard(0)],
        [Shard(2), Shard(1)],
    ),
    "rows, channels in": ([Shard(2), Shard(1)], [Replicate(), Shard(1)], [Replicate()] * 2, [Shard(2), Partial()]),
    "rows, pending": ([Shard(2), Partial()], [Replicate()] * 2, [Replicate()] * 2, [Shard(2), Partial()]),
}


@pytest.mark.parametrize("name", PLACED)
def test_only_borders_move(name):
    """One row of the neighbour's, on either side: the result is cut like the input, and nothing else moves."""
    *places, result = PLACED[name]
    mesh = simulate((2, 2))
    tensors = seeded((2, 4, 8, 8), (4, 4, 3, 3), (4,))
    mine = [spread_out(t, mesh, p) for t, p in zip(tensors, places, strict=True)]
    with shardwise.debug.ledger() as log:
        got = F.conv2d(*mine, padding=1)
    compare(got, F.conv2d(*tensors, padding=1), name, 1e-10)
    assert list(got.placements) == result
    assert {entry.kind for entry in log} <= {"all_to_all", "local"} and not any(entry.reason for entry in log)
    rows = sum(p.is_shard(2) or p.is_shard(3) for p in places[0])
    assert log.total_bytes <= rows * 4 * 2 * tensors[0][:, :, :2].numel() * 8


def test_channels_move_nothing():
    mesh = simulate((2,))
    x, w, b = seeded((2, 4, 6, 6), (4, 2, 3, 3), (4,))
    parts = [spread_out(t, mesh, [p]) for t, p in ((x, Shard(1)), (w, Shard(0)), (b, Shard(0)))]
    with shardwise.strict():
        got = F.conv2d(*parts, padding=1, groups=2)
    assert got.placements == (Shard(1),)
    compare(got, F.conv2d(x, w, b, padding=1, groups=2), "groups", 1e-10)


@pytest.mark.parametrize("transposed", [False, True])
def test_several_pieces(transposed):
    func = F.conv_transpose2d if transposed else F.conv2d
    check_rule(
        lambda x, w: func(torch.cat([x, x.flip(2)], 2), w, padding=1),
        [seeded((1, 3, 5, 4), (3, 3, 3, 3))],
        [simulate((3,))],
        limit=8,
        tolerance=1e-10,
    )


@pytest.mark.parametrize("dtype", [torch.complex128, torch.int64, torch.float32], ids=str)
def test_dtypes(dtype):
    tensors = [(t * 4).to(dtype) for t in seeded((2, 3, 5, 4), (3, 3, 3, 3), (3,))]
    tolerance = 1e-4 if dtype is torch.float32 else 1e-10
    check_rule(lambda x, w, b: F.conv2d(x, w, b, padding=1), [tensors], [simulate((3,))], tolerance=tolerance, limit=8)


def test_autocast():
    x, w = (
        spread_out(t.float(), simulate((2,)), [p])
        for t, p in zip(seeded((2, 3, 6, 6), (4, 3, 3, 3)), [Shard(2), Replicate()])
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = F.conv2d(x, w)
    assert got.dtype == got.to_local().ranks[1].dtype == torch.bfloat16


def test_second_derivative():
    def gradient(x, w):
        (first,) = torch.autograd.grad(F.conv2d(x, w, padding=1, stride=2).square().sum(), x, create_graph=True)
        return first

    samples = [seeded((2, 3, 5, 4), (3, 3, 3, 3))]
    check_rule(gradient, samples, [simulate((3,))], limit=8, tolerance=1e-10, partial=("sum",))


@pytest.mark.parametrize("step", [1, 2])
def test_copied_windows_share_no_memory(step):
    x = torch.arange(8.0)
    copied = torch.unfold_copy(distribute_tensor(x, simulate(3), [Shard(0)]), 0, 3, step)
    assert torch.equal(copied.add_(1).full_tensor(), torch.unfold_copy(x, 0, 3, step).add_(1))


def test_written_windows():
    """Halos make a copy; its base sees what is written to it all the same, unless windows overlap."""
    (plain,) = seeded((2, 6))
    mine = spread_out(plain, simulate((3,)), [Shard(1)])
    for x in (mine, plain):
        x.unfold(1, 3, 3)[:, 1].zero_()
    assert torch.equal(mine.full_tensor(), plain)
    with pytest.raises(RuntimeError, match="more than one element"):
        mine.unfold(1, 3, 1).zero_()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: F.conv2d(x, w, stride=2, padding="same"),
        lambda x, w: F.conv2d(x, w, padding="other"),
        lambda x, w: F.conv2d(x, w, stride=0),
        lambda x, w: F.conv2d(x[:, :, :2], w),
        lambda x, w: F.conv1d(x, w),
        lambda x, w: F.conv_transpose2d(x, w, output_padding=(3, 0)),
        lambda x, w: x.unfold(2, 20, 1),
    ],
)
def test_errors(call):
    """What torch refuses is refused in its words."""
    tensors = seeded((2, 4, 6, 6), (4, 4, 3, 3))
    with pytest.raises(RuntimeError) as plain:
        call(*tensors)
    with pytest.raises(RuntimeError) as got:
        call(*(spread_out(t, simulate((2,)), [p]) for t, p in zip(tensors, [Shard(2), Replicate()], strict=True)))
    assert str(got.value)[:40] == str(plain.value)[:40]


def on_processes(rank, world_size):
    for name in ("far", "conv2d", "depthwise", "gaps", "transposed 2d", "windows", "columns", "fold"):
        function, shapes = CASES[name]
        check_rule(function, [seeded(*shapes)], [device_mesh((world_size,))], limit=3, seed=len(name), tolerance=1e-10)


def test_processes():
    run_ranks(on_processes, 3)


def test_a_bias_of_another_size_is_refused_as_on_one_device():
    """It would be added to every channel if it had one element, or if a rank had one channel."""
    mesh = simulate((3,))
    for conv, size in ((F.conv1d, (1, 4, 2)), (F.conv1d, (3, 4, 2)), (F.conv_transpose1d, (4, 3, 2))):
        for count in (1, 2):
            x, weight, bias = torch.ones(2, 4, 5), torch.ones(size), torch.ones(count)
            if count == size[1 if conv is F.conv_transpose1d else 0]:
                continue
            with pytest.raises(RuntimeError, match="expected bias"):
                conv(x, weight, bias)
            for places in itertools.product((Shard(0), Shard(2), Replicate()), (Shard(0), Replicate()), (Shard(0), Replicate())):
                given = (distribute_tensor(t, mesh, [p]) for t, p in zip((x, weight, bias), places, strict=True))
                with pytest.raises(RuntimeError, match="expected bias"):
                    conv(*given)


def of_other_channels(rank, world_size):
    mesh = device_mesh((world_size,))
    x = DTensor.from_local(torch.ones(1, 3), mesh, [Partial("max")])
    weight = distribute_tensor(torch.ones(3, 2, 2), mesh, [Shard(0, sizes=(2, 1, 0))])
    bias = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="channels"):
        F.conv_transpose1d(x, weight, bias, stride=2)


def test_channels_that_do_not_fit_raise_on_ranks_without_channels_too():
    run_ranks(of_other_channels, 3)
