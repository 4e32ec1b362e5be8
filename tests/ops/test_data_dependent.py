"""Results whose sizes only the data knows: every rank keeps what it found, after one exchange of counts."""

import pytest
import torch

from shardwise import Partial, Replicate, Shard, distribute_tensor, simulate, strict
from shardwise.debug import ledger
from shardwise.testing import check_rule
from tests.values import seeded
from tests.workers import device_mesh, run_ranks

A, B, CUBE = seeded((7, 5), (7, 5), (4, 6, 3))
FLAT = seeded((1, 9))[0]
COUNTS = torch.tensor([2, 0, 3, 1, 0, 0, 4])
IDS = torch.tensor([4, 0, 1, 4, 4, 7, 1, 1, 3])
ROWS = torch.tensor([[1, 2], [1, 2], [0, 5], [1, 2], [0, 5], [0, 5], [3, 3]])
NONE = torch.zeros(7, 5, dtype=torch.float64)


def halves(a):
    """The same rows, twice: a rank holds several intervals."""
    return torch.cat([a, a * -2])


def everything(x, **kwargs):
    return torch.unique(x, return_inverse=True, return_counts=True, **kwargs)


def consecutive(x, **kwargs):
    return torch.unique_consecutive(x, return_inverse=True, return_counts=True, **kwargs)


CASES = {
    "nonzero": (lambda a: torch.nonzero(a > 0), [A]),
    "nonzero of numbers": (lambda a: (torch.nonzero(a.clamp(min=0.3) - 0.3), torch.argwhere(a * 0)), [A]),
    "nonzero pieces": (lambda a: torch.nonzero(halves(a) > 0), [A]),
    "nonzero one row": (lambda a: torch.nonzero(a > 0), [FLAT]),
    "nonzero tuple": (lambda a: (torch.nonzero(a > 0.5, as_tuple=True), torch.where(a > 0)), [CUBE]),
    "nonzero 0-d": (lambda a: (torch.nonzero(a[0, 0]), torch.nonzero(a[0, 0], as_tuple=True)), [A]),
    "nonzero nothing": (lambda a: (torch.nonzero(a), torch.nonzero(a[:0])), [NONE]),
    "nonzero_static": (
        lambda a: (torch.nonzero_static(a > 0, size=4), torch.nonzero_static(a > 0, size=40, fill_value=9)),
        [A],
    ),
    "masked_select": (lambda a, b: torch.masked_select(a, b > 0), [A, B]),
    "masked_select broadcast": (lambda a, b: (a[:, :1].masked_select(b > 0), a.masked_select(b[0] > 0)), [A, B]),
    "masked_select none": (lambda a, b: torch.masked_select(a, b > 100), [A, B]),
    "mask": (lambda a, b: a[b > 0], [A, B]),
    "mask itself": (lambda a: a[a > 0], [A]),
    "mask pieces": (lambda a: halves(a)[halves(a) > 0.5], [A]),
    "mask rows": (lambda a, b: a[b[:, 1] > 0], [A, B]),
    "mask columns": (lambda a, b: a[:, b[0] > 0], [A, B]),
    "mask first two": (lambda a: a[a.sum(-1) > 0], [CUBE]),
    "mask last two": (lambda a: a[:, a.sum(0) > 0], [CUBE]),
    "mask and index": (lambda a, b: a[b[:, 0] > 0, 2], [A, B]),
    "mask and tensor": (lambda a, b: a[b[:, 0] > 0, torch.tensor([1])], [A, B]),
    "mask and slice": (lambda a: a[1:3, a[0, :, 0] > 0, 1:], [CUBE]),
    "two masks": (lambda a: a[torch.tensor([True, False, True, False]), :, torch.tensor([True, False, True])], [CUBE]),
    "uint8 mask": (lambda a, b: a[(b > 0).to(torch.uint8)], [A, B]),
    "found, then used": (lambda a, b: (a[b > 0].exp().sum(), a[b[:, 0] > 0] @ b.T), [A, B]),
    "repeat_interleave": (lambda a, n: a.repeat_interleave(n, 0), [A, COUNTS]),
    "repeat_interleave columns": (lambda a, n: torch.repeat_interleave(a, n[:5], dim=-1), [A, COUNTS]),
    "repeat_interleave flat": (lambda a, n: a[:, 0].repeat_interleave(n), [A, COUNTS]),
    "repeat_interleave number": (lambda a, n: (a.repeat_interleave(3), a.repeat_interleave(2, 1)), [A, COUNTS]),
    "repeat_interleave one": (lambda a, n: a.repeat_interleave(n[:1], 0), [A, COUNTS]),
    "repeat_interleave alone": (lambda n: torch.repeat_interleave(n), [COUNTS]),
    "bincount": (lambda i: (torch.bincount(i), i.bincount(minlength=12), torch.bincount(i[:0], minlength=2)), [IDS]),
    "bincount weights": (
        lambda i, w: (torch.bincount(i, w.detach()[0]), torch.bincount(i[:0], w.detach()[0, :0])),
        [IDS, FLAT],
    ),
    "unique": (lambda i: (torch.unique(i), *everything(i)), [IDS]),
    "unique 2-d": (lambda i: everything(i), [ROWS]),
    "unique rows": (lambda i: (torch.unique(i, dim=0), *everything(i, dim=0), *everything(i, dim=-1)), [ROWS]),
    "unique nothing": (lambda i: everything(i[:0]), [IDS]),
    "unique pieces": (lambda i: everything(torch.cat([i, i])), [IDS]),
    "consecutive": (lambda i: (i.unique_consecutive(), *consecutive(i)), [IDS]),
    "consecutive rows": (lambda i: (*consecutive(i, dim=0), *consecutive(i.T, dim=1)), [ROWS]),
    "consecutive 2-d": (lambda i: consecutive(i), [ROWS]),
    "consecutive pieces": (lambda i: consecutive(torch.cat([i, i])), [IDS]),
}


@pytest.mark.parametrize("mesh", [(3,), (2, 2), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_simulated(name, mesh):
    function, tensors = CASES[name]
    check_rule(function, [tensors], [simulate(mesh)], limit=6 if len(mesh) < 3 else 3, seed=len(name), tolerance=1e-10)


def on_gloo(rank, world_size, shape):
    for name, (function, tensors) in CASES.items():
        try:
            check_rule(function, [tensors], [device_mesh(shape)], limit=1, seed=len(name) + 1, tolerance=1e-10)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_gloo():
    run_ranks(on_gloo, 2, (2,))


FINDS = {
    "nonzero": lambda a: torch.nonzero(a > 0),
    "masked_select": lambda a: a.masked_select(a > 0),
    "mask": lambda a: a[a > 0],
    "mask rows": lambda a: a[a[:, 0] > 0],
}


@pytest.mark.parametrize("name", FINDS)
def test_only_counts_travel(name):
    x = distribute_tensor(A, simulate((3,)), [Shard(0, sizes=(2, 0, 5))])
    with ledger() as log, strict():
        out = FINDS[name](x)
    assert log.total_bytes == 3 * 2 * 8, log
    assert out.placements[0].is_shard(0)
    assert sum(out.placements[0].sizes) == out.shape[0] == FINDS[name](A).shape[0]
    assert out.tolist() == FINDS[name](A).tolist()


def test_columns_pass():
    """A mask of the rows does not care how columns are cut."""
    x = distribute_tensor(A, simulate((2, 2)), [Shard(1), Shard(0)])
    mask = distribute_tensor(B[:, 0] > 0, x.device_mesh, [Replicate(), Shard(0)])
    with strict():
        out = x[mask]
    assert out.placements[0] == Shard(1) and out.placements[1].is_shard(0)


def test_counts_add_up():
    x = distribute_tensor(IDS, simulate((3,)), [Shard(0)])
    out = torch.bincount(x)
    assert out.placements == (Partial(),)
    assert out.tolist() == torch.bincount(IDS).tolist()
    with pytest.raises(RuntimeError, match="non-negative"):
        torch.bincount(x - 1)
    for bad in (x, x[:0]):
        with pytest.raises(RuntimeError, match="minlength should be >= 0"):
            torch.bincount(bad, minlength=-1)


def same_everywhere(rank, world_size):
    x = distribute_tensor(A, device_mesh((world_size,)), [Shard(0)])
    found = x[x > 0]
    return found.tolist(), bool(found.sum() > 0), len(torch.nonzero(x > 0)), found.max().item()


def test_plain_values_agree_on_every_rank():
    first, second = run_ranks(same_everywhere, 2)
    assert first == second == (A[A > 0].tolist(), True, int((A > 0).sum()), A.max().item())
