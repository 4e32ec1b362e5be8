"""Modules with sharded parameters: plans, planners, sharders, optimizers."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwise import sharded as S
from tests.sharded.common import chunks, grid, irregular, values, whole
from tests.workers import run_ranks


class Net(nn.Module):
    """Two linears; the second's weight is tied to `head`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 4)
        self.head = nn.Linear(6, 4, bias=False)
        self.head.weight = self.two.weight
        self.register_buffer("table", values(6, 3, dtype=torch.float32))

    def forward(self, x):
        return self.two(F.gelu(self.one(x)))


def scattered(rank, world):
    value = values(6, 4) + rank  # the source's counts
    for src in range(world):
        for spec in (chunks(0, range(world)), grid((6, 4), list(range(world))), irregular((6, 4), range(world), 1)):
            st = S._shard_tensor(value, spec, src_rank=src)
            assert torch.equal(whole(st), values(6, 4) + src) and st.is_leaf and st.sharding_spec() == spec
            assert torch.equal(whole(spec.shard(value, src)), values(6, 4) + src)
    assert S._shard_tensor(value.clone().requires_grad_(), chunks(0, range(world))).requires_grad
    group = dist.new_group([1, 0])
    st = S._shard_tensor(value, chunks(0, range(2)), src_rank=0, process_group=group)  # a rank of the group
    assert torch.equal(whole(st), values(6, 4) + dist.get_process_group_ranks(group)[0])
    for call, kind, text in [
        (
            lambda: S._shard_tensor(value, chunks(0, range(world)), src_rank=rank),
            ValueError,
            "src_rank=0 on rank: 0|src_rank=1 on rank: 1",
        ),
        (lambda: S._shard_tensor(value, chunks(rank, range(world))), ValueError, "does not match with sharding_spec="),
        (lambda: S._shard_tensor(value[: 5 + rank], chunks(0, range(world))), ValueError, "size="),
        (lambda: S._shard_tensor(value, chunks(0, range(world)), src_rank=9), ValueError, "src_rank=9 is not a rank"),
        (lambda: S._shard_tensor(value.t(), chunks(0, range(world))), ValueError, "not a contiguous"),
        (lambda: S._shard_tensor(5, chunks(0, range(world))), TypeError, "got int"),
        (lambda: S.shard_parameter(Net(), "no", chunks(0, range(world))), AttributeError, "Net has no attribute `no`"),
        (lambda: S.shard_parameter(Net(), "forward", chunks(0, range(world))), ValueError, "to be a Tensor"),
    ]:
        with pytest.raises(kind, match=text):
            call()
    return True


def test_scatter():
    assert all(run_ranks(scattered, 2))


class Halver(S.Sharder):
    """Replaces a linear by one with a sharded weight."""

    def __init__(self, spec):
        self.spec = spec

    def shard(self, module):
        made = copy.deepcopy(module)
        S.shard_parameter(made, "weight", self.spec)
        return made


class Rows(S.ShardingPlanner):
    def __init__(self, world):
        self.world = world

    def build_plan(self, module):
        return S.ShardingPlan({name: chunks(0, range(self.world)) for name, _ in module.named_parameters()})


def planned(rank, world):
    x = values(3, 4, dtype=torch.float32)
    want = Net()
    spec = irregular((6, 4), range(world), 0)
    plan = S.ShardingPlan(
        {"one.weight": spec, "two.weight": chunks(1, range(world)), "table": chunks(0, range(world))},
        output_plan={"": chunks(0, range(world))},
    )
    net = Net()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(rank)  # the source rank's values count
    net.one.bias.data.copy_(want.one.bias)
    net.two.bias.data.copy_(want.two.bias)
    assert S.shard_module(net, plan) is None
    assert isinstance(net.one.weight, S.ShardedTensor) and isinstance(net.one.weight, nn.Parameter)
    assert net.head.weight is net.two.weight  # still tied, though the plan does not name it
    assert isinstance(net.table, S.ShardedTensor) and "table" in net._buffers
    out = net(x)
    assert isinstance(out, S.ShardedTensor) and out.sharding_spec() == chunks(0, range(world))
    assert torch.allclose(whole(out.detach()), want(x), atol=1e-6)
    out.square().sum().backward()
    want(x).square().sum().backward()
    assert torch.allclose(whole(net.one.weight.grad), want.one.weight.grad, atol=1e-5)
    assert torch.allclose(whole(net.two.weight.grad), want.two.weight.grad, atol=1e-5)
    assert torch.allclose(net.one.bias.grad, want.one.bias.grad, atol=1e-5)
    # planners, sharders, local tensors
    rows = Net()
    S.shard_module(rows, Rows(world).build_plan(rows))
    assert all(isinstance(p, S.ShardedTensor) for p in rows.parameters())
    assert torch.allclose(rows(x).full_tensor(), Net()(x), atol=1e-6)
    custom = Net()
    S.shard_module(custom, S.ShardingPlan({"one": Halver(spec)}, {"": chunks(0, range(world))}, [""]))
    local = custom(values(world, 4, dtype=torch.float32))
    assert type(local) is torch.Tensor and local.shape == (4,)  # one row each: the dim goes
    assert torch.allclose(local, Net()(values(world, 4, dtype=torch.float32))[rank], atol=1e-6)
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_plans(world):
    assert all(run_ranks(planned, world))


def bad_plans(rank, world):
    spec = chunks(0, range(world))

    class Wrong(S.Sharder):
        def shard(self, module):
            return 5

    for plan, kind, text in [
        (
            S.ShardingPlan({"one.weight": 5}),
            TypeError,
            "Only `ShardingSpec` and `Sharder` are supported to shard 'one.weight'",
        ),
        (S.ShardingPlan({"no.weight": spec}), AttributeError, "Net has no attribute `no`"),
        (S.ShardingPlan({"one.no": spec}), AttributeError, "Linear has no attribute `no`"),
        (S.ShardingPlan({"one.weight": spec}, {"one": 5}), TypeError, "as output_plan for 'one'"),
        (S.ShardingPlan({"one.weight": spec}, {"no": spec}), AttributeError, "no attribute `no`"),
        (S.ShardingPlan({"one.weight": spec}, None, ["no"]), AttributeError, "no attribute `no`"),
        (S.ShardingPlan({"": Wrong()}), KeyError, "Module path must not be empty"),
        (
            S.ShardingPlan({"one.weight": spec, "one": spec}),
            ValueError,
            "Expected 'one' to be a Tensor, but found Linear",
        ),
        (S.ShardingPlan({"one.weight": spec, "one.bias": Wrong()}), AttributeError, "`one.bias` is not an nn.Module"),
        (S.ShardingPlan({"": spec}), AttributeError, "'' is the module itself"),
        (
            S.ShardingPlan({"one.weight": spec, "one": Wrong()}),
            RuntimeError,
            "already a Sharder entry for module 'one'",
        ),
        (S.ShardingPlan({"one.weight": spec}, {"one.bias": spec}), ValueError, "Expected 'one.bias' to be a Module"),
        (S.ShardingPlan({"one.weight": spec}, None, ["one.bias"]), ValueError, "Expected 'one.bias' to be a Module"),
        (S.ShardingPlan({"one": Wrong()}), TypeError, "must return a torch.nn.Module, got int"),
    ]:
        net = Net()
        with pytest.raises(kind, match=text):
            S.shard_module(net, plan)
        assert not any(isinstance(p, S.ShardedTensor) for p in net.parameters())  # as it was
    return True


def test_bad_plans_are_named_and_change_nothing():
    assert all(run_ranks(bad_plans, 2))


def in_subgroup(rank, world):
    group = dist.new_group([2, 3])
    if rank >= 2:
        net = Net()
        S.shard_module(net, S.ShardingPlan({"one.weight": chunks(0, [2, 3])}), process_group=group)
        assert torch.allclose(whole(net.one.weight.detach()), Net().one.weight)
        assert torch.allclose(net(torch.ones(2, 4)).full_tensor(), Net()(torch.ones(2, 4)), atol=1e-6)
    return True


def test_a_module_on_a_subgroup():
    assert all(run_ranks(in_subgroup, 4))


# -- optimizers -------------------------------------------------------------------------------------------------------
class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.table, self.linear = (
            nn.EmbeddingBag(9, 4, mode="sum", dtype=torch.float64),
            nn.Linear(4, 1, dtype=torch.float64),
        )

    def forward(self, ids):
        return self.linear(self.table(ids)).squeeze(1)


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 9, (5, 3), generator=generator), torch.randn(5, generator=generator, dtype=torch.float64)


def reference(world, optimizer, steps=4, **options):
    """One process with everyone's batches."""
    model = Recommender()
    optim = optimizer(model.parameters(), **options)
    for step in range(steps):
        ids, want = (torch.cat(x) for x in zip(*(batch(r, step) for r in range(world))))
        optim.zero_grad()
        F.mse_loss(model(ids), want, reduction="sum").backward()
        optim.step()
    return model


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
]


def train(model, optim, rank, world, steps):
    for step in steps:
        ids, want = batch(rank, step)
        optim.zero_grad()
        F.mse_loss(model(ids), want, reduction="sum").backward()
        for p in model.linear.parameters():
            dist.all_reduce(p.grad)
        optim.step()


def optimized(rank, world):
    specs = [chunks(0, range(world)), irregular((9, 4), range(world), 1), chunks(1, range(world))]
    for i, (optimizer, options) in enumerate(OPTIMIZERS):
        want = reference(world, optimizer, **options)
        for sharded_optimizer in (True, False):
            model = Recommender()
            S.shard_parameter(model.table, "weight", specs[i % 3])
            if sharded_optimizer:
                named = dict(S.named_params_with_sharded_tensor(model))
                assert list(named) == ["table.weight", "linear.weight", "linear.bias"]
                optim = S.ShardedOptimizer(named, optimizer, **options)
            else:
                optim = optimizer(model.parameters(), **options)
            train(model, optim, rank, world, range(4))
            where = (optimizer.__name__, options, sharded_optimizer)
            assert torch.allclose(whole(model.table.weight.detach()), want.table.weight), where
            assert torch.allclose(model.linear.weight, want.linear.weight), where
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm > 0
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_optimizers(world):
    assert all(run_ranks(optimized, world))


def resumed(rank, world):
    """State by name, saved, loaded into other tiles, and trained on."""
    optimizer, options = OPTIMIZERS[2]
    want = reference(world, optimizer, **options)
    first = Recommender()
    S.shard_parameter(first.table, "weight", chunks(0, range(world)))
    optim = S.ShardedOptimizer(dict(S.named_params_with_sharded_tensor(first)), optimizer, **options)
    train(first, optim, rank, world, range(2))
    state = optim.state_dict()
    assert isinstance(state["state"]["table.weight"]["exp_avg"], S.ShardedTensor)
    assert state["param_groups"][0]["params"] == ["table.weight", "linear.weight", "linear.bias"]
    buffer = io.BytesIO()
    torch.save((first.state_dict(), state), buffer)
    buffer.seek(0)
    second = Recommender()
    S.shard_parameter(second.table, "weight", irregular((9, 4), range(world), 3))
    again = S.ShardedOptimizer(dict(S.named_params_with_sharded_tensor(second)), optimizer, lr=9.0)
    weights, state = torch.load(buffer, weights_only=False)
    second.load_state_dict(weights)
    again.load_state_dict(state)
    train(second, again, rank, world, range(2, 4))
    assert torch.allclose(whole(second.table.weight.detach()), want.table.weight)
    with pytest.raises(KeyError, match="unknown parameters"):
        again.load_state_dict({"state": {"x": {}}, "param_groups": state["param_groups"]})
    again.add_param_group({"params": {"extra": nn.Parameter(torch.ones(2))}, "lr": 1.0})
    assert len(again.param_groups) == 2
    with pytest.raises(ValueError, match=r"names \['extra'\] are in the optimizer"):
        again.add_param_group({"params": {"extra": nn.Parameter(torch.ones(2))}})
    return True


def test_optimizer_state_moves_with_the_tiles():
    assert all(run_ranks(resumed, 2))
