"""Simulated sub-meshes whose groups hold different values: nobody's is lost, and no layout is taken from one of them."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, LayoutError, Partial, RankTensor, Replicate, Shard, distribute_tensor, simulate
from shardwise.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from tests.workers import device_mesh, run_ranks

WORLD = simulate((2, 2), axis_names=("dp", "tp"))
TP = WORLD["tp"]


def per_rank(*values):
    return RankTensor([torch.tensor(value, dtype=torch.float64) for value in values])


def mixed():
    """Group 0 holds [0, 1, 2, 3], group 1 [10, 20, 30, 40]."""
    return DTensor.from_local(per_rank([0, 1], [2, 3], [10, 20], [30, 40]), TP, [Shard(0)])


def test_full_tensor_is_each_groups_own():
    got = mixed().full_tensor()
    assert isinstance(got, RankTensor)
    assert [value.tolist() for value in got.ranks] == [[0, 1, 2, 3]] * 2 + [[10, 20, 30, 40]] * 2
    assert [value.item() for value in mixed().sum().full_tensor().ranks] == [6, 6, 100, 100]


def test_it_is_plain_where_groups_hold_the_same():
    same = per_rank([0, float("nan")], [2, 3], [0, float("nan")], [2, 3])
    assert type(DTensor.from_local(same, TP, [Shard(0)]).full_tensor()) is torch.Tensor
    assert type(distribute_tensor(torch.arange(5.0), TP, [Shard(0)]).full_tensor()) is torch.Tensor


def test_gradients_go_back_to_their_own_group():
    weight = distribute_tensor(torch.ones(4, dtype=torch.float64), TP, [Shard(0)]).requires_grad_()
    whole = (weight * mixed()).full_tensor()
    (whole * whole).sum().backward()
    found = [value.tolist() for value in weight.grad.to_local().ranks]
    assert found == [[0, 2], [8, 18], [200, 800], [1800, 3200]]


def test_one_answer_for_python_is_refused():
    for ask in (float, bool, lambda x: x > 50 and True):
        with pytest.raises(LayoutError, match="the ranks differ"):
            ask(mixed().sum() - 6)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
@pytest.mark.parametrize(
    "op", [lambda x: x[x > 1.5], torch.nonzero, torch.unique, lambda x: torch.repeat_interleave(x, x.long())]
)
def test_sizes_that_differ_are_refused(op, placement):
    x = DTensor.from_local(per_rank([1, 1, 0, 2], [1, 1, 0, 2], [1, 2, 3, 4], [1, 2, 3, 4]), TP, [Replicate()])
    with pytest.raises(LayoutError, match=r"groups of the simulated sub-mesh \['tp'\] have .* Lay it out on the whole mesh"):
        op(x.redistribute(placements=[placement]))


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
@pytest.mark.parametrize("shape", [None, (4,)])
def test_local_tensors_of_other_shapes_are_refused(placement, shape):
    uneven = RankTensor([torch.ones(2), torch.ones(2), torch.ones(3), torch.ones(3)])
    with pytest.raises(LayoutError, match=r"ranks at \(0,\).*\(2,\).*\(3,\)"):
        DTensor.from_local(uneven, TP, [placement], shape=shape, stride=shape and (1,))


@pytest.mark.parametrize("placement", [Shard(0), Partial(), Partial("max")])
def test_only_what_all_groups_hold_moves_to_another_mesh(placement):
    groups = ([1, 2], [2, 5]), ([2, 3], [1, 4])  # the same sums, other greatest values
    local = per_rank(*groups[0], *groups[1])
    x = DTensor.from_local(local, TP, [placement])
    for mesh, placements in ((WORLD, [Replicate(), Shard(0)]), (WORLD["dp"], [Shard(0)])):
        if placement == Partial():
            assert x.redistribute(mesh, placements).full_tensor().tolist() == [3, 7]
            continue
        with pytest.raises(LayoutError, match=r"redistribute to another mesh: .* different values at \(0,\)"):
            x.redistribute(mesh, placements)


def test_formats():
    assert f"{mixed().sum():.1f}" == "[6.0, 6.0, 100.0, 100.0]"
    assert f"{distribute_tensor(torch.ones(3), TP, [Shard(0)]).sum():.1f}" == "3.0"


# -- the same on processes, where every group has a tensor of its own ----------------------------------------------
OPS = [
    lambda x: x @ x.T,
    lambda x: x.sum().full_tensor() * x,
    lambda x: x.softmax(0),
    lambda x: x.cumsum(0),
    lambda x: x.sort(0)[0],
    lambda x: x.std(0),
    lambda x: x.reshape(-1),
    lambda x: torch.cat([x, x.flip(0)]),
    lambda x: x.roll(1, 0)[1:, :2],
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: F.dropout(x, 0.5),
    lambda x: x.topk(2, 0)[0],
    lambda x: x.full_tensor().square(),
]


def own(rank, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def results(world, each):
    """Results and gradients of ops, and a step of tensor parallelism with fully_shard, from values that `each` makes."""
    found = []
    for placement in (Shard(0), Shard(1), Partial()):
        for op in OPS:
            x = DTensor.from_local(each(lambda rank: own(rank, 4, 3)), world["tp"], [placement]).detach().requires_grad_()
            y = op(x)
            (y * y.detach()).sum().backward()
            found += [y.to_local() if isinstance(y, DTensor) else y, x.grad.to_local()]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5)).double()
    parallelize_module(model, world["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=world["dp"])
    model(each(lambda rank: own(rank // 2, 3, 6))).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return [*found, norm.full_tensor(), *(parameter.grad.to_local() for parameter in model.parameters())]


def on_a_rank(rank, world_size):
    found = results(device_mesh((2, 2), ("dp", "tp")), lambda make: make(rank))
    return [value.detach() for value in found]


def test_as_on_processes():
    mine = results(WORLD, lambda make: RankTensor([make(rank) for rank in range(4)]))
    for rank, theirs in enumerate(run_ranks(on_a_rank, 4)):
        for value, expected in zip(mine, theirs, strict=True):
            value = value.ranks[rank] if isinstance(value, RankTensor) else value
            torch.testing.assert_close(value.detach(), expected)
