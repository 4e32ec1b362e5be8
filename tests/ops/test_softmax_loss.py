"""softmax and losses over cut dims: values and gradients as plain torch's, and logits are never gathered."""

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import Replicate, Shard, simulate
from shardwise.testing import check_rule, spread_out
from tests.ops.cases import x
from tests.random.common import as_torch_draws
from tests.workers import device_mesh, run_ranks

INF = float("inf")
aten = torch.ops.aten
A, B, CUBE, ROW, ONE = x(5, 7), x(5, 7, seed=1), x(4, 5, 3), x(7, seed=2), x()
IDS = torch.tensor([3, -100, 6, 0, 2])
PIXELS = torch.tensor([[1, 4, -100], [0, 0, 2], [3, 3, 3], [2, -100, 1]])
WEIGHT = ROW.abs()
MASKED = A.masked_fill(A > 0.8, -INF)
MASKED[1] = -INF
LABELS = torch.tensor(
    [[1, 3, -1, 0, 0, 0, 0], [2, -1, 0, 0, 0, 0, 0], [-1] * 7, [6, 5, 4, 3, 2, 1, 0], [0, 1, -1, 2, 3, 4, 5]]
)


def each_reduction(loss, *args, **kwargs):
    return tuple(loss(*args, reduction=reduction, **kwargs) for reduction in ("none", "mean", "sum"))


SOFTMAX = {
    "softmax": (lambda a: (a.softmax(0), torch.softmax(a, dim=-1), F.softmax(a, 1)), [CUBE]),
    "log_softmax": (lambda a: (a.log_softmax(0), torch.log_softmax(input=a, dim=1), F.log_softmax(a, -1)), [A]),
    "softmin": (lambda a: (F.softmin(a, 0), F.softmin(a, 1)), [A]),
    "softmax of 0-d": (lambda a: (a.softmax(0), a.log_softmax(-1), a.logsumexp(0)), [ONE]),
    "softmax of nothing": (lambda a: (a.softmax(0), a.log_softmax(1), a.logsumexp(0)), [x(0, 3)]),
    "softmax of pieces": (lambda a: torch.cat([a, a * 2]).softmax(0), [A]),
    "softmax as": (lambda a: (a.int().softmax(0, dtype=a.dtype), F.log_softmax(a.float(), 1, dtype=a.dtype)), [A]),
    "softmax inside": (lambda a: (aten._softmax(a, 0, False), aten._log_softmax(a, 1, False)), [A]),
    "safe softmax": (lambda a: (aten._safe_softmax(a, 0), aten._safe_softmax(a, 1)), [A]),
    "logsumexp": (lambda a: (a.logsumexp(0), a.logsumexp((0, 2), keepdim=True), a.logsumexp(-1)), [CUBE]),
    "gradients": (
        lambda a, g: [f(g, a, d, a.dtype) for f in (aten._softmax_backward_data, aten._log_softmax_backward_data) for d in (0, 1)],
        [A, B],
    ),
    "second derivatives": (
        lambda a: torch.autograd.grad((a.softmax(0) * a.log_softmax(0) * a.logsumexp(0)).sum(), a, create_graph=True)[0].cos(),
        [A],
    ),
}  # fmt: skip
LOSSES = {
    "cross_entropy": (lambda a, t: each_reduction(F.cross_entropy, a, t), [A, IDS]),
    "cross_entropy of pixels": (lambda a, t: each_reduction(F.cross_entropy, a, t), [CUBE, PIXELS]),
    "cross_entropy of a vector": (lambda a, t: each_reduction(F.cross_entropy, a, t), [ROW, IDS[0]]),
    "cross_entropy weight": (lambda a, t, w: each_reduction(F.cross_entropy, a, t, w.detach()), [A, IDS, WEIGHT]),
    "cross_entropy smooth": (
        lambda a, t, w: (
            *each_reduction(F.cross_entropy, a, t, w.detach(), label_smoothing=0.1, ignore_index=6),
            *each_reduction(F.cross_entropy, a, t, label_smoothing=0.3, ignore_index=6),
        ),
        [A, IDS.clamp(min=0), WEIGHT],
    ),
    "cross_entropy probabilities": (
        lambda a, b, w: (
            *each_reduction(F.cross_entropy, a, b, w.detach(), label_smoothing=0.2),
            *each_reduction(F.cross_entropy, a, b),
        ),
        [A, B.softmax(-1), WEIGHT],
    ),
    "cross_entropy of pieces": (lambda a, t: each_reduction(F.cross_entropy, torch.cat([a, a * 2], 1), t + (t > 1) * 5), [A, IDS]),
    "nll_loss": (lambda a, t, w: each_reduction(F.nll_loss, a, t, w.detach()), [A, IDS, WEIGHT]),
    "nll_loss of pixels": (lambda a, t: each_reduction(F.nll_loss, a, t), [CUBE, PIXELS]),
    "nll_loss inside": (
        lambda a, t, w: (aten.nll_loss_forward(a, t, w.detach(), 1, -100), aten.nll_loss_nd(a, t, None, 0), aten.nll_loss(a, t)),
        [A, IDS, WEIGHT],
    ),
    "linear_cross_entropy": (
        lambda a, m, b, t: each_reduction(F.linear_cross_entropy, a, m, t, linear_bias=b),
        [A, x(9, 7), x(9), IDS],
    ),
    "legacy": (lambda a, t: (F.cross_entropy(a, t, size_average=False), F.nll_loss(a, t, reduce=False)), [A, IDS]),
    "multi_margin_loss": (
        lambda a, t, w: (*each_reduction(F.multi_margin_loss, a, t, p=2, weight=w.detach()), F.multi_margin_loss(a[0], t[0])),
        [A, IDS.clamp(min=0), WEIGHT],
    ),
    "multilabel_margin_loss": (lambda a, t: each_reduction(F.multilabel_margin_loss, a, t), [A, LABELS]),
    "multilabel_soft_margin_loss": (lambda a, b: each_reduction(F.multilabel_soft_margin_loss, a, b), [A, B.sigmoid()]),
    "by numbers": (
        lambda a, b: (
            *(f(a, b.detach(), n) for f in (aten.mse_loss, aten.soft_margin_loss, torch.kl_div) for n in (0, 1, 2)),
            aten.huber_loss(a, b, 1, 0.5), aten.smooth_l1_loss(a, b, 2, 0.5), aten.binary_cross_entropy(a.sigmoid(), b.sigmoid()),
            torch.binary_cross_entropy_with_logits(a, b, None, WEIGHT, 1), torch.poisson_nll_loss(a, b, True, False, 1e-8, 1),
        ),
        [A, B],
    ),
    "weighted": (
        lambda a, b, w: (F.mse_loss(a, b, weight=w), F.huber_loss(a, b, weight=w), F.mse_loss(a, b, weight=w, reduction="sum")),
        [A, B, x(5, 7, seed=4).abs()],
    ),
    "of pairs": (
        lambda a, b, y: (
            *each_reduction(F.cosine_embedding_loss, a, b, y[:, 0].sign()), *each_reduction(F.margin_ranking_loss, a, b, y.sign()),
            *each_reduction(F.triplet_margin_loss, a, b, y), *each_reduction(F.gaussian_nll_loss, a, b, y.exp()),
            *each_reduction(F.hinge_embedding_loss, a, y.sign()),
        ),
        [A, B, x(5, 7, seed=3)],
    ),
    "ctc_loss": (
        lambda a, t, n, m: each_reduction(F.ctc_loss, a.log_softmax(-1), t, n, m, zero_infinity=True),
        [x(6, 4, 5), torch.tensor([[1, 2, 3], [4, 4, 1], [2, 1, 2], [3, 1, 1]]), torch.tensor([6, 5, 6, 4]), torch.tensor([3, 2, 0, 3])],
    ),
    "ctc_loss in one row": (
        lambda a, t: each_reduction(F.ctc_loss, a.log_softmax(-1), t, (6, 5, 6, 4), (3, 2, 1, 1)),
        [x(6, 4, 5), torch.tensor([1, 2, 3, 4, 4, 1, 2])],
    ),
}  # fmt: skip
CASES = SOFTMAX | LOSSES
if not hasattr(F, "linear_cross_entropy"):  # new in torch 2.13
    del CASES["linear_cross_entropy"]


def partial(name):
    """The reductions of Partial layouts to try: parts of other ones have gradients of their own."""
    return ("sum",) if name == "second derivatives" else True


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize("mesh", [(3,), (2, 2), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_simulated(name, mesh):
    function, tensors = CASES[name]
    check_rule(function, [tensors], [simulate(mesh)], limit=6, seed=len(name), tolerance=1e-10, partial=partial(name))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("values", [MASKED, -MASKED, A.masked_fill(A > 1, float("nan"))], ids=["-inf", "inf", "nan"])
@pytest.mark.parametrize("op", [torch.softmax, torch.log_softmax, torch.logsumexp, aten._safe_softmax])
def test_not_finite(op, values, dim):
    check_rule(lambda a: op(a, dim), [[values]], [simulate((3,))], limit=8, partial=False, tolerance=1e-10)


@pytest.mark.parametrize("op", [torch.softmax, torch.log_softmax, torch.logsumexp])
def test_half_is_summed_in_float32(op):
    a = spread_out(x(64, 3).to(torch.bfloat16), simulate((4,)), [Shard(0)])
    got, want = op(a, 0), op(a.full_tensor(), 0)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.full_tensor(), want, rtol=8e-3, atol=1e-6)
    assert torch.softmax(a, 0, dtype=torch.float32).dtype == torch.float32


@as_torch_draws
def test_gumbel_softmax():
    mesh = simulate((3,))
    for hard in (False, True):
        torch.manual_seed(0)
        want = F.gumbel_softmax(A, hard=hard, dim=1)
        torch.manual_seed(0)
        torch.testing.assert_close(
            F.gumbel_softmax(spread_out(A, mesh, [Shard(1)]), hard=hard, dim=1).full_tensor(), want
        )


BIG = x(40, 300)
TARGET = torch.arange(40) * 7
SMALL_TRAFFIC = {
    "softmax": lambda a, t: a.softmax(1).sum(),
    "log_softmax": lambda a, t: a.log_softmax(1).sum(),
    "logsumexp": lambda a, t: a.logsumexp(1).sum(),
    "cross_entropy": lambda a, t: F.cross_entropy(a, t),
    "cross_entropy smooth": lambda a, t: F.cross_entropy(a, t, label_smoothing=0.1),
    "nll_loss": lambda a, t: F.nll_loss(a, t),
    "probabilities": lambda a, t: F.cross_entropy(a, a.detach()),
}


@pytest.mark.parametrize("name", SMALL_TRAFFIC)
def test_classes_are_not_gathered(name):
    a = spread_out(BIG, simulate((3,)), [Shard(1)], requires_grad=True)
    t = spread_out(TARGET, simulate((3,)), [Replicate()])
    with shardwise.debug.ledger() as log:
        SMALL_TRAFFIC[name](a, t).backward()
    row = 40 * 8
    assert all(entry.bytes <= 3 * 2 * 2 * row and not entry.reason for entry in log), list(log)
    assert a.grad.placements == (Shard(1),)


def test_target_out_of_bounds():
    a = spread_out(A, simulate((3,)), [Shard(1)])
    with pytest.raises(IndexError, match="out of bounds: there are 7 classes"):  # torch's kind of error
        F.cross_entropy(a, torch.tensor([0, 1, 2, 7, 0]))


def test_torch_is_told_that_memory_is_strided():
    a = spread_out(A, simulate((3,)), [Shard(0)])
    assert a.layout.placements == a.placements and a.layout != torch.strided
    mask = A > 0
    check_rule(
        lambda a: (torch.masked.sum(a, 0, mask=mask), torch.masked.softmax(a, 1, mask=mask)),
        [[A]],
        [simulate((3,))],
        limit=8,
        tolerance=1e-10,
    )
    check_rule(
        lambda a: (torch.masked.mean(a, 0, mask=mask), torch.masked.cumprod(a, 0, mask=mask)),
        [[A]],
        [simulate((2, 2))],
        limit=8,
        tolerance=1e-10,
    )


ON_PROCESSES = [
    "softmax",
    "logsumexp",
    "second derivatives",
    "cross_entropy",
    "cross_entropy smooth",
    "nll_loss",
    "ctc_loss",
]


def on_processes(rank, world_size):
    for name in ON_PROCESSES:
        function, tensors = CASES[name]
        mesh = device_mesh((world_size,))
        check_rule(function, [tensors], [mesh], limit=3, seed=len(name), tolerance=1e-10, partial=partial(name))


def test_processes():
    run_ranks(on_processes, 2)
