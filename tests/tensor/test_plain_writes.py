"""A plain tensor that simulated ranks write into takes one write, or the call says why it cannot."""

import functools
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise import DTensor, LayoutError, RankTensor, Replicate, Shard, distribute_tensor, simulate
from shardwise.experimental import local_map
from shardwise.testing.seeding import database_samples

DIFFERENT = "simulated ranks all write into"
WORLD = simulate((2, 2), axis_names=("dp", "tp"))


def shards(size=8):
    return distribute_tensor(torch.arange(float(size)), simulate(4), [Shard(0)])


def per_group():
    """A tensor on a sub-mesh that holds other values in each group."""
    scale = RankTensor([torch.tensor(1.0 + rank // 2) for rank in range(4)])
    whole = DTensor.from_local(scale, WORLD["tp"], [Replicate()])
    return distribute_tensor(torch.arange(8.0), WORLD["tp"], [Shard(0)]) * whole


# -- the family: every in-place method and every out= that torch's own tests know ----------------------------------
@functools.cache
def samples():
    return list(found_samples())


def found_samples():
    for op in op_db:
        if torch.float32 not in op.supported_dtypes("cpu") or op.name == "normal":  # each rank draws its own
            continue
        for sample in islice(database_samples(op, "cpu", torch.float32), 4):
            tensors = [t for t in tree_flatten((sample.args, sample.kwargs))[0] if isinstance(t, torch.Tensor)]
            if tensors and all(type(t) is torch.Tensor and t.layout is torch.strided for t in (sample.input, *tensors)):
                yield op, sample
                break


def another(t):
    if t.dtype == torch.bool:
        return ~t
    return t.flip(0) if t.dim() and not t.is_floating_point() else t + 0.5 if t.is_floating_point() else t.clone()


def writer(op, sample, form):
    """A function of a plain target and of the other arguments, and a target."""
    if form == "out":
        shape = op(sample.input, *sample.args, **sample.kwargs)
        if not isinstance(shape, torch.Tensor):
            return None
        return lambda target, args, kwargs: op(sample.input, *args, out=target, **kwargs), torch.zeros_like(shape)
    return lambda target, args, kwargs: op.inplace_variant(target, *args, **kwargs), sample.input


def written(write, target, args, kwargs):
    own = target.clone()
    write(own, args, kwargs)
    return own


def same(one, other):
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", ["in place", "out"])
def test_every_write(form):
    tried = refused = 0
    for op, sample in samples():
        if not (op.supports_out if form == "out" else op.inplace_variant):
            continue
        try:
            found = writer(op, sample, form)
            if found is None:
                continue
            write, target = found
            given = (sample.args, sample.kwargs)
            want = written(write, target, *given)
            given2 = tree_map_only(torch.Tensor, another, given)
            want2 = written(write, target, *given2)
        except (RuntimeError, TypeError, ValueError, IndexError):
            continue  # torch has no such form, or refuses the other values
        name = f"{op.name} {op.variant_test_name}"
        equal = tree_map_only(torch.Tensor, lambda t: RankTensor([t, t.clone()]), given)
        assert same(written(write, target, *equal), want), f"{name}: equal values, one write"
        replicated = tree_map_only(
            torch.Tensor, lambda t: distribute_tensor(t, WORLD["tp"], [Replicate()]).to_local(), given
        )
        assert same(written(write, target, *replicated), want), f"{name}: what a Replicate tensor holds"
        own = target.clone()
        at = iter([t for t in tree_flatten(given2)[0] if isinstance(t, torch.Tensor)])
        both = tree_map_only(torch.Tensor, lambda t, at=at: RankTensor([t, next(at)]), given)
        tried += 1
        try:
            write(own, *both)
        except LayoutError as error:
            assert DIFFERENT in str(error), f"{name}: {error}"
            assert same(own, target) and not same(want, want2), f"{name}: refused, but written or equal"
            refused += 1
        else:
            assert same(want, want2) and same(own, want), f"{name}: different writes into one tensor"
    assert tried > (50 if form == "in place" else 80) and refused > tried // 2, (tried, refused)


# -- forms of writes ------------------------------------------------------------------------------------------------
def iadd(target, value):
    target += value


def set_row(target, value):
    target[1] = value


WRITES = {
    "+=": (iadd, (2,)),
    "copy_": (lambda t, v: t.copy_(v), (2,)),
    "a row": (set_row, (3, 2)),
    "index_put_": (lambda t, v: t.index_put_((torch.tensor([1]),), v), (3, 2)),
    "index_copy_": (lambda t, v: t.index_copy_(0, torch.tensor([2]), v[None]), (3, 2)),
    "scatter_": (lambda t, v: t.scatter_(0, torch.tensor([2, 1]), v), (3,)),
    "out": (lambda t, v: torch.mul(v, 2, out=t), (2,)),
    "list": (lambda t, v: torch._foreach_add_([t], [v]), (2,)),
    "view": (lambda t, v: t.view(-1)[:2].add_(v), (2, 1)),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_ranks_hold(name):
    write, shape = WRITES[name]
    target = torch.full(shape, 0.25)
    before = target.clone()
    with pytest.raises(LayoutError, match=DIFFERENT):
        write(target, shards().to_local())
    assert torch.equal(target, before)
    whole = distribute_tensor(torch.tensor([3.0, 5.0]), simulate(4), [Replicate()])
    write(target, whole.to_local())
    want = before.clone()
    write(want, torch.tensor([3.0, 5.0]))
    assert torch.equal(target, want)
    ranks = RankTensor([torch.full(shape, 0.25) for _ in range(4)])  # one tensor per rank: each takes its own
    write(ranks, shards().to_local())
    for rank, value in enumerate(ranks.ranks):
        want = before.clone()
        write(want, torch.arange(8.0)[2 * rank : 2 * rank + 2])
        assert torch.equal(value, want)


@pytest.mark.parametrize("name", WRITES)
def test_distributed_on_a_sub_mesh(name):
    write, shape = WRITES[name]
    for placements in ([Shard(0)], [Replicate()]):
        value = torch.tensor([3.0, 5.0])
        target, want = torch.full(shape, 0.25), torch.full(shape, 0.25)
        for _ in range(2):
            write(target, distribute_tensor(value, WORLD["tp"], placements))
            write(want, value)
        assert torch.equal(target, want), placements
    target = torch.full(shape, 0.25)
    with pytest.raises(LayoutError, match=DIFFERENT):
        write(target, per_group()[:2])
    assert torch.equal(target, torch.full(shape, 0.25))


def test_a_sum_of_losses():
    for mesh in (simulate(4), WORLD["tp"], WORLD):
        total = torch.zeros(())
        plain = total
        for _ in range(3):
            x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)] * mesh.ndim).requires_grad_()
            loss = x.square().sum()
            total += loss.detach()
        assert plain.item() == total.item() == 3 * 140


def test_gradients_of_a_write():
    x = distribute_tensor(torch.arange(8.0), simulate(4), [Replicate()]).requires_grad_()
    total = torch.zeros(8)
    total += x.to_local()
    total.square().sum().backward()
    assert torch.equal(total, torch.arange(8.0)) and torch.equal(x.grad.full_tensor(), 2 * torch.arange(8.0))
    y = shards().requires_grad_()
    with pytest.raises(LayoutError, match="its gradient could only go to one of them"):
        torch.zeros(2).add_(y.to_local())


def test_an_in_place_call_returns_its_target():
    shared = distribute_tensor(torch.ones(2), simulate(4), [Replicate()]).to_local()
    plain, ranks = torch.zeros(2), shards().to_local()
    assert plain.add_(shared) is plain and ranks.add_(shared) is ranks
    assert torch.add(plain, 1, out=ranks) is ranks


# -- ranks that share a tensor and then differ ------------------------------------------------------------------------
def test_ranks_that_share_a_tensor_part():
    whole = distribute_tensor(torch.ones(2), simulate(4), [Replicate()]).to_local()
    total, other = torch.zeros_like(whole), torch.zeros_like(whole)
    total += shards().to_local()
    assert [v.tolist() for v in total.ranks] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    torch._foreach_add_([total, other], [whole, shards().to_local()])
    assert [v.tolist() for v in total.ranks] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert [v.tolist() for v in other.ranks] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_they_may_not_where_the_memory_is_in_use():
    x = distribute_tensor(torch.ones(2), simulate(4), [Replicate()])
    with pytest.raises(LayoutError, match=DIFFERENT):
        x.to_local().add_(shards().to_local())
    assert torch.equal(x.full_tensor(), torch.ones(2))
    total = torch.zeros_like(x.to_local())
    view = total[:1]
    with pytest.raises(LayoutError, match=DIFFERENT):
        total += shards().to_local()
    assert torch.equal(view.ranks[1], torch.zeros(1))


# -- functions that write what they do not say --------------------------------------------------------------------------
def test_running_statistics():
    x = distribute_tensor(torch.arange(16.0).view(8, 2), simulate(4), [Shard(0)])
    norm = nn.BatchNorm1d(2)
    with pytest.raises(LayoutError, match=r"batch_norm.*running_mean"):
        norm(x.to_local())
    with pytest.raises(LayoutError, match=DIFFERENT):
        local_map(norm.forward, [Shard(0)])(x)
    assert torch.equal(norm.running_mean, torch.zeros(2))
    whole = distribute_tensor(torch.arange(16.0).view(8, 2), simulate(4), [Replicate()])
    norm.num_batches_tracked.zero_()
    local_map(norm.forward, [Replicate()])(whole)
    norm(whole.to_local())
    want = nn.BatchNorm1d(2)
    want(torch.arange(16.0).view(8, 2)), want(torch.arange(16.0).view(8, 2))
    assert torch.equal(norm.running_mean, want.running_mean) and norm.num_batches_tracked == 2
    norm.eval()
    norm(x.to_local())


@pytest.mark.parametrize("placements", [[Replicate()], [Shard(0)], [Shard(1)]], ids=str)
def test_running_statistics_on_a_sub_mesh(placements):
    norm, want = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    x = torch.randn(8, 2)
    out = norm(distribute_tensor(x, WORLD["tp"], placements))
    torch.testing.assert_close(out.full_tensor(), want(x))
    torch.testing.assert_close(norm.running_var, want.running_var)
    out.full_tensor().sum().backward()


def test_look_ups_that_rescale():
    table = torch.randn(4, 3) * 10
    before, ids = table.clone(), RankTensor([torch.tensor([0]), torch.tensor([1])])
    with pytest.raises(LayoutError, match=r"embedding.*weight"):
        F.embedding(ids, table, max_norm=1.0)
    assert torch.equal(table, before)
    F.embedding(ids, nn.Parameter(table))


class Doubled(torch.autograd.Function):
    """Writes into an argument that it was given, and counts its calls in one that it was not."""

    calls = torch.zeros(())

    @staticmethod
    def forward(ctx, x, scratch):
        Doubled.calls += 1
        scratch.copy_(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


def test_functions_of_the_program():
    Doubled.calls.zero_()
    scratch = torch.zeros(2)
    with pytest.raises(LayoutError, match=DIFFERENT):
        Doubled.apply(shards().to_local(), scratch)
    assert torch.equal(scratch, torch.zeros(2)) and Doubled.calls == 0
    Doubled.apply(shards().to_local(), shards().to_local())
    assert Doubled.calls == 1
    log = torch.zeros(3)

    def counting(x):
        log[0].add_(1)
        log.data[1:] += 2
        own = torch.zeros(2)
        own += x
        return own

    out = local_map(counting, [Shard(0)])(shards())
    assert torch.equal(out.full_tensor(), torch.arange(8.0)) and log.tolist() == [1, 2, 2]

    def failing(x):
        log.add_(1)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        local_map(failing, [Shard(0)])(shards())
    assert log.tolist() == [1, 2, 2]


def test_memory_with_nans_and_no_elements():
    equal = RankTensor([torch.tensor([float("nan"), 1.0]) for _ in range(2)])
    target = torch.zeros(2)
    target += equal
    assert target.isnan().tolist() == [True, False] and target[1] == 1
    empty = torch.zeros(0)
    empty += RankTensor([torch.zeros(0), torch.zeros(0)])
