"""Every random op on every layout gives, bit by bit, what it gives on one rank, and the stream goes on alike."""

import pytest
import torch

import shardwise
from shardwise import Replicate, RuleError, Shard, distribute_tensor, simulate, strict
from tests.random.cases import ALONE, DROPS, LAYOUTS, OPS, laid_out, values
from tests.workers import device_mesh, run_ranks


def drawn(name, mesh, placements, seed=7):
    """The numbers, and the next number of the stream."""
    torch.manual_seed(seed)
    result = OPS[name](mesh, placements)
    return result.detach().full_tensor(), torch.rand(1)


@pytest.fixture(scope="module")
def alone():
    found = {}
    return lambda name: found.setdefault(name, drawn(name, simulate(ALONE[0]), ALONE[1]))


@pytest.mark.parametrize("name", OPS)
def test_on_every_layout(name, alone):
    want, after = alone(name)
    if "all" not in name:
        assert not (want == want.flatten()[0]).all()
    for where, (shape, placements) in LAYOUTS.items():
        got, then = drawn(name, simulate(shape), placements)
        exact = not (
            where == "replicated and pending" and name in ("alpha_dropout", "feature_alpha_dropout", "attention")
        )
        if exact and name != "attention":
            assert torch.equal(got, want), f"{name}, {where}"
        else:  # sums of parts, and matrix products of other sizes, round differently
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert torch.equal(then, after), f"{name}, {where}: the stream went on differently"


@pytest.mark.parametrize("name", OPS)
def test_another_seed_gives_other_numbers(name, alone):
    if name in ("dropout all", "random_ bool"):
        return
    assert not torch.equal(drawn(name, simulate((4,)), [Shard(0)], seed=8)[0], alone(name)[0])


ON_PROCESSES = "normal_", "random_ to", "bernoulli_ of a tensor", "randn", "multinomial", "poisson", "dropout", "rrelu"


def on_processes(rank, world_size):
    mesh = device_mesh((2, 2))
    for name in ON_PROCESSES:
        want, _ = drawn(name, simulate(ALONE[0]), ALONE[1])
        for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)]):
            got, _ = drawn(name, mesh, placements)
            assert torch.equal(got, want), (name, placements)


def test_on_processes():
    run_ranks(on_processes, 4)


def gradient(name, mesh, placements):
    """Of the sum of what a case gives, by its tensor."""
    x = laid_out(values(), mesh, placements, requires_grad=True)
    torch.manual_seed(3)
    function_of(name)(x).sum().backward()
    return x.grad.full_tensor()


def function_of(name):
    """The function of a tensor inside of a case."""
    return DROPS[name].__closure__[0].cell_contents


@pytest.mark.parametrize("name", DROPS)
def test_gradients_use_the_same_mask(name):
    """The gradient is the slope of the function with the numbers it drew, on every layout."""
    alone = simulate(ALONE[0])
    want = gradient(name, alone, ALONE[1])
    for where, (shape, placements) in LAYOUTS.items():
        torch.testing.assert_close(gradient(name, simulate(shape), placements), want, rtol=1e-12, atol=1e-12, msg=where)
    sides = []
    for step in (1e-6, -1e-6):
        torch.manual_seed(3)
        sides.append(function_of(name)(distribute_tensor(values() + step, alone)).sum().item())
    assert want.sum().item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-6, abs=1e-6)


def test_replicas_hold_the_same():
    mesh = simulate((2, 2))
    x = shardwise.randn(5, 3, device_mesh=mesh, placements=[Replicate(), Shard(0)])
    local = x.to_local().ranks
    assert (
        torch.equal(local[0], local[2]) and torch.equal(local[1], local[3]) and not torch.equal(local[0], local[1][:3])
    )


def test_ranks_of_a_submesh_agree():
    mesh = simulate((2, 3), axis_names=("dp", "tp"))
    torch.manual_seed(1)
    x = shardwise.randn(6, 4, device_mesh=mesh["tp"], placements=[Shard(0)])
    torch.manual_seed(1)
    want = shardwise.randn(6, 4, device_mesh=simulate((1,)))
    ranks = x.to_local().ranks
    for dp in range(2):
        assert torch.equal(torch.cat(ranks[3 * dp : 3 * dp + 3]), want.full_tensor())


def test_no_communication():
    x = shardwise.randn(8, 6, device_mesh=simulate((4,)), placements=[Shard(1)])
    with shardwise.strict(), shardwise.debug.ledger() as log:
        x.normal_(), torch.rand_like(x), torch.nn.functional.dropout(x, 0.5), x.bernoulli_(0.5), x.random_(4)
    assert not list(log)


def test_writing_counts_as_writing():
    x = shardwise.zeros(4, 3, device_mesh=simulate((2,)), placements=[Shard(0)])
    y = shardwise.ones(4, 3, device_mesh=simulate((2,)), placements=[Shard(0)], requires_grad=True)
    z = y * x
    x.normal_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_filling_ends_the_gradient():
    x = shardwise.ones(4, 3, device_mesh=simulate((2,)), placements=[Shard(0)], requires_grad=True)
    y = x * 2
    y.normal_()
    y.sum().backward()
    assert (x.grad.full_tensor() == 0).all()
    with pytest.raises(RuntimeError, match="leaf"):
        x.normal_()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.normal_(0, -1),
        lambda x: x.uniform_(2, 1),
        lambda x: x.exponential_(-1),
        lambda x: x.geometric_(2),
        lambda x: x.bernoulli_(1.5),
        lambda x: x.random_(5, 5),
        lambda x: x.long().normal_(),
        lambda x: x.bernoulli_(x + 3),
        lambda x: torch.bernoulli(x + 3),
        lambda x: torch.normal(x, -1.0),
        lambda x: torch.normal(x, x - 5),
        lambda x: torch.multinomial(x - 9, 2),
        lambda x: torch.multinomial(x, 9),
        lambda x: torch.multinomial(x * 0, 2),
        lambda x: torch.nn.functional.dropout(x, 1.5),
        lambda x: torch.rand_like(x, dtype=torch.int64),
        lambda x: torch.randint_like(x, 5, 3),
    ],
)
def test_bad_arguments_raise_as_torch_does(call):
    plain = torch.linspace(0.1, 0.9, 12).view(4, 3)
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        call(plain)
    state = torch.get_rng_state()
    with pytest.raises((RuntimeError, ValueError)) as ours:
        call(distribute_tensor(plain, simulate((2,)), [Shard(0)]))
    assert isinstance(ours.value, theirs.type)
    assert torch.equal(torch.get_rng_state(), state)


DRAWS = {
    "normal_": lambda t: t.normal_(),
    "uniform_": lambda t: t.uniform_(),
    "bernoulli_": lambda t: t.bernoulli_(0.5),
    "random_": lambda t: t.random_(),
    "init": lambda t: torch.nn.init.normal_(t, 5.0),
}
VIEWS = {
    "view": lambda t: t.view(3, 4),
    "part": lambda t: t.view(3, 4)[1:],
    "windows": lambda t: t.unfold(0, 2, 2)[..., 0],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("draw", DRAWS)
def test_numbers_drawn_into_a_view_that_had_to_be_a_copy_reach_its_base(draw, view):
    drawn_into_view(simulate(2), draw, view)


def drawn_into_view(mesh, draw, view):
    value = torch.arange(12.0).view(4, 3) - 50
    base = distribute_tensor(value, mesh, [Shard(0)])
    part = VIEWS[view](base)
    DRAWS[draw](part)
    got = base.full_tensor()
    torch.testing.assert_close(part.full_tensor(), VIEWS[view](got))
    written = torch.zeros_like(value, dtype=torch.bool)
    VIEWS[view](written).fill_(True)
    assert torch.equal(got[~written], value[~written]) and not torch.equal(got[written], value[written])
    DRAWS[draw](base)  # and the other way round
    torch.testing.assert_close(part.full_tensor(), VIEWS[view](base.full_tensor()))
    with strict(), pytest.raises(RuleError, match="strict"):
        DRAWS[draw](part)


def drawn_on_processes(rank, world_size):
    for draw in DRAWS:
        for view in VIEWS:
            drawn_into_view(device_mesh((world_size,)), draw, view)


def test_numbers_drawn_into_such_a_view_on_processes():
    run_ranks(drawn_on_processes, 2)
