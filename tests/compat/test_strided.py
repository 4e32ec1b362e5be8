"""_StridedShard: the placement whose parts depend on the tensor, resolved when the tensor is known."""

import itertools
import pickle

import pytest
import torch
import torch.distributed.tensor as theirs
from torch.distributed.tensor.placement_types import _StridedShard as Theirs

import shardwise
from shardwise import DTensor, LayoutError, Partial, Replicate, Shard, distribute_tensor, simulate
from shardwise.comm.rank_tensor import RankTensor
from shardwise.placement_types import _StridedShard
from tests.compat.common import grid, line
from tests.workers import device_mesh, run_ranks

SHAPES = ((8, 3), (7, 3), (5, 2), (2, 2), (12, 2), (0, 2), (1, 5))


def held_as_torch_holds_it(rank, world_size):
    """The local tensors are torch's, even and uneven: on a line, over two axes that cut the same dim, over three."""
    r, cube = theirs.Replicate(), device_mesh((2, 1, 2), ("a", "b", "c"))
    seen = 0
    for shape, factor in itertools.product(SHAPES, (1, 2, 3)):
        value = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        s, plain = Theirs(0, split_factor=factor), theirs.Shard(0)
        cases = [(line(), [s]), (line(), [Theirs(-1, split_factor=factor)]), (grid(), [s, r]), (grid(), [r, s])]
        cases += [(grid(), [s, plain]), (grid(), [theirs.Shard(1), s]), (cube, [s, r, plain]), (cube, [plain, r, s])]
        for mesh, places in cases:
            ours = distribute_tensor(value, mesh, places)
            assert torch.equal(ours.full_tensor(), value)
            try:
                want = theirs.distribute_tensor(value, mesh, places, src_data_rank=None)
            except Exception:  # torch refuses some uneven ones, on some ranks
                continue
            assert torch.equal(ours.to_local(), want.to_local()), (shape, factor, places)
            seen += 1
    return seen


def on_processes(rank, world_size):
    mine, plain = _StridedShard(0, split_factor=2), torch.arange(14.0).reshape(7, 2)
    for mesh, places in ((line(), [mine]), (grid(), [mine, Shard(0)])):
        x = distribute_tensor(plain, mesh, places)
        again = DTensor.from_local(x.to_local(), mesh, places)
        assert torch.equal(again.full_tensor(), plain) and again.placements == x.placements
        y = distribute_tensor(plain, mesh, [Replicate()] * len(places)).redistribute(placements=places)
        assert torch.equal(y.to_local(), x.to_local())


def test_as_torch_holds_it():
    assert min(run_ranks(held_as_torch_holds_it, 4)) > 100


def test_on_processes():
    run_ranks(on_processes, 4)


def brute(n, parts, factor):
    """Which indices each rank holds: those of its part of every chunk, by torch.chunk."""
    pad = lambda pieces, count: [*pieces, *[torch.arange(0)] * (count - len(pieces))]
    cut = [pad(chunk.chunk(parts), parts) for chunk in torch.arange(n).chunk(factor)] if n else []
    return [torch.cat([torch.arange(0), *(row[i] for row in cut)]).tolist() for i in range(parts)]


@pytest.mark.parametrize(
    "n, parts, factor", [(8, 2, 2), (7, 2, 2), (9, 3, 2), (5, 4, 3), (1, 2, 2), (0, 2, 2), (12, 2, 3)]
)
def test_which_indices(n, parts, factor):
    x = distribute_tensor(torch.arange(n), simulate(parts), [_StridedShard(0, split_factor=factor)])
    assert [local.tolist() for local in x.to_local().ranks] == brute(n, parts, factor)
    assert torch.equal(x.full_tensor(), torch.arange(n))


def test_everywhere_a_placement_is_taken():
    mesh, value = simulate((2, 2)), torch.arange(28.0).reshape(14, 2)
    places = [_StridedShard(0, split_factor=2), Shard(0)]
    x = distribute_tensor(value, mesh, places)
    made = {
        "from_local": DTensor.from_local(x.to_local(), mesh, places),
        "redistribute": distribute_tensor(value, mesh, [Replicate(), Shard(1)]).redistribute(placements=places),
        "zeros": shardwise.zeros(14, 2, device_mesh=mesh, placements=places) + value,
        "again": distribute_tensor(x, mesh, places),
        "torch's": distribute_tensor(value, mesh, [Theirs(0, split_factor=2), theirs.Shard(0)]),
    }
    for name, other in made.items():
        assert other.placements == x.placements, name
        assert torch.equal(other.full_tensor(), value), name
    x.requires_grad_()
    (x.to_local(grad_placements=places) * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full_like(value, 2))
    y = torch.nn.functional.linear(distribute_tensor(torch.ones(3, 2), mesh), x.detach())
    torch.testing.assert_close(y.full_tensor(), torch.ones(3, 2) @ value.T)
    shape, _ = shardwise._utils.compute_local_shape_and_global_offset(
        (4, 2), mesh, [_StridedShard(0, split_factor=2), Shard(0)]
    )
    assert tuple(shape) == (1, 2)


def test_locals_that_do_not_fit():
    parts = RankTensor([torch.ones(n, 2) for n in (4, 3)])
    with pytest.raises(LayoutError, match="its local tensor is"):
        DTensor.from_local(parts, simulate(2), [_StridedShard(0, split_factor=3)])
    with pytest.raises(IndexError, match=r"out of range \(expected to be in range of \[-2, 1\], but got 2\)"):
        distribute_tensor(torch.ones(2, 2), simulate(2), [_StridedShard(2, split_factor=2)])
    for wrong in (0, 1.5, True):
        with pytest.raises(LayoutError, match="split_factor must be an int"):
            _StridedShard(0, split_factor=wrong)


# -- placements are torch's, as far as values go ------------------------------------------------------------
PAIRS = [
    (Shard(0), theirs.Shard(0)),
    (Shard(-1), theirs.Shard(-1)),
    (Replicate(), theirs.Replicate()),
    (Partial(), theirs.Partial()),
    (Partial("avg"), theirs.Partial("avg")),
    (_StridedShard(1, split_factor=3), Theirs(1, split_factor=3)),
]


def test_placements_equal_torchs():
    for (i, (ours, _)), (j, (_, other)) in itertools.product(enumerate(PAIRS), repeat=2):
        assert (ours == other) is (i == j), (ours, other)
        if not isinstance(other, Theirs):  # torch's own says of any other class that it differs
            assert (other == ours) is (i == j), (ours, other)
    for ours, other in PAIRS[:-1]:
        assert hash(ours) == hash(other) and len({ours, other}) == 1 and ours in [other] and other in {ours: 1}
    assert Shard(0, sizes=(1, 3)) != theirs.Shard(0) and theirs.Shard(0) != Shard(0, sizes=(1, 3))
    assert Shard(0) != 0 and Replicate() != "R" and Partial() != theirs.Shard and Shard(0) != None  # noqa: E711
    assert (Shard(0), Replicate()) == (theirs.Shard(0), theirs.Replicate())


def test_strided_is_a_value():
    a, b = _StridedShard(0, split_factor=2), Theirs(0, split_factor=2)
    assert (repr(a), str(a), a.is_shard(), a.is_replicate(), a.is_partial()) == (
        repr(b),
        str(b),
        b.is_shard(),
        False,
        False,
    )
    assert (
        pickle.loads(pickle.dumps(a)) == a != _StridedShard(0, split_factor=3)
        and len({a, _StridedShard(0, split_factor=2)}) == 1
    )


def test_partial_has_torchs_names():
    assert Partial.LINEAR_REDUCE_OPS == theirs.Partial.LINEAR_REDUCE_OPS
    assert set(Partial.ALL_REDUCE_OPS) >= set(getattr(theirs.Partial, "ALL_REDUCE_OPS", ()))  # new in torch 2.13
    assert Partial("prod") == Partial("product") and Partial("prod").is_partial("prod")
    x = DTensor.from_local(RankTensor([torch.tensor([2.0]), torch.tensor([3.0])]), simulate(2), [Partial("prod")])
    assert x.full_tensor().item() == 6
    with pytest.raises(LayoutError, match="reduce_op must be one of"):
        Partial("multiply")
