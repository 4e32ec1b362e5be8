"""Tokens travel to their experts and back, and only those that change rank; training equals one device."""

import argparse
import copy
import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
from shardwise import LayoutError, MeshError, Partial, Replicate, Shard, distribute_tensor, simulate
from shardwise.parallel import MixtureOfExperts, balance_loss, combine, dispatch, grouped_linear, top_k, zigzag
from tests.workers import device_mesh, run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import moe  # noqa: E402

R = Replicate()


def spread(x, mesh, places):
    return distribute_tensor(x, mesh, places, src_data_rank=None)


def close(got, want):
    torch.testing.assert_close(got.detach().full_tensor(), want.detach(), rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------- dispatch and combine

TOKENS, WIDTH = 13, 6


def tokens_and_choices(experts, k=2, seed=0, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    chosen = torch.rand(tokens, experts, generator=generator).topk(k).indices
    return x, chosen, torch.rand(tokens, k, generator=generator, dtype=torch.float64)


def test_plain_rows_are_sorted_by_expert_in_the_order_of_their_tokens():
    x, chosen, weights = tokens_and_choices(5)
    routed = dispatch(x, chosen, 5)
    flat = chosen.flatten()
    order = [i for e in range(5) for i in range(len(flat)) if flat[i] == e]
    assert torch.equal(routed.rows, x[[i // 2 for i in order]])
    assert routed.sizes == tuple(flat.bincount(minlength=5).tolist())
    assert torch.allclose(combine(routed, routed.rows, weights), x * weights.sum(1, keepdim=True))
    assert torch.equal(combine(routed, routed.rows), 2 * x)


def test_plain_capacity_keeps_the_first_tokens():
    x, chosen, _ = tokens_and_choices(3)
    routed = dispatch(x, chosen, 3, capacity=4)
    assert routed.sizes == tuple(min(4, n) for n in chosen.flatten().bincount(minlength=3).tolist())
    firsts = [[t for t in range(TOKENS) if e in chosen[t]][:4] for e in range(3)]
    assert torch.equal(routed.rows, x[[t for some in firsts for t in some]])
    counts = torch.tensor([sum(t in some for some in firsts) for t in range(TOKENS)]).unsqueeze(1)
    assert torch.equal(combine(routed, routed.rows), x * counts)


LAYOUTS = [  # mesh, tokens, experts
    ((4,), [Shard(0)], [Shard(0)]),
    ((4,), [Shard(0, sizes=(0, 9, 1, 3))], [Shard(0)]),
    ((4,), [zigzag(0, TOKENS, 4)], [Shard(0)]),  # several runs of tokens a rank
    ((4,), [Shard(1)], [Shard(0)]),
    ((4,), [R], [Shard(0)]),
    ((4,), [Shard(0)], [R]),
    ((2, 2), [Shard(0), Shard(0)], [R, Shard(0)]),
    ((2, 2), [Shard(0), Shard(0)], [Shard(0), R]),
    ((2, 2), [Shard(0), Shard(0)], [Shard(0), Shard(0)]),
    ((2, 2), [Shard(0), R], [R, Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)], [Shard(0), R]),
    ((2, 2), [Shard(0), Partial()], [R, Shard(0)]),
    ((2, 2), [R, R], [R, Shard(0)]),
]


def trips(mesh_of, layouts, numbers=(1, 3, 6)):
    """dispatch, a product with each expert's matrix, combine: all values and gradients, and where the rows are."""
    for (shape, places, holders), experts, capacity in itertools.product(layouts, numbers, (None, 3)):
        mesh = mesh_of(shape)
        x, chosen, weights = tokens_and_choices(experts, k=min(2, experts))
        matrices, bias = (
            torch.randn(experts, *s, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
            for s in ((5, WIDTH), (5,))
        )

        def run(x, chosen, weights, matrices, bias, capacity=capacity):
            routed = dispatch(x, chosen, matrices, capacity=capacity)
            return routed, combine(routed, grouped_linear(routed, routed.rows, matrices, bias).tanh(), weights)

        plain = [t.clone().requires_grad_() for t in (x, weights, matrices, bias)]
        plain_routed, want = run(plain[0], chosen, *plain[1:])
        want.square().sum().backward()
        rows = [p if p.is_shard(0) else R for p in places]
        mine = [
            spread(t, mesh, p).requires_grad_()
            for t, p in ((x, places), (weights, rows), (matrices, holders), (bias, holders))
        ]
        routed, out = run(mine[0], spread(chosen, mesh, rows), *mine[1:])
        assert routed.sizes == plain_routed.sizes
        close(routed.rows, plain_routed.rows)
        close(out, want)
        out.square().sum().backward()
        for a, b in zip(mine, plain, strict=True):
            close(a.grad, b.grad)
        assert out.placements == tuple(p if p.is_shard(0) else R for p in mine[0].placements)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_round_trip(layout):
    trips(simulate, [layout])


def on_gloo_trips(rank, world_size):
    trips(device_mesh, LAYOUTS, [3])


def test_round_trip_on_processes():
    run_ranks(on_gloo_trips, 4)


def test_each_rank_holds_the_rows_of_its_experts():
    x, chosen, _ = tokens_and_choices(5)
    mesh = simulate(4)  # experts 2 2 1 0
    matrices = spread(torch.zeros(5, 2, WIDTH, dtype=torch.float64), mesh, [Shard(0)])
    routed = dispatch(spread(x, mesh, [Shard(0)]), spread(chosen, mesh, [Shard(0)]), matrices)
    sizes = routed.sizes
    assert [len(part) for part in routed.rows.to_local().ranks] == [
        sizes[0] + sizes[1],
        sizes[2] + sizes[3],
        sizes[4],
        0,
    ]
    assert routed.rows.placements == (Shard(0, sizes=(sizes[0] + sizes[1], sizes[2] + sizes[3], sizes[4], 0)),)


def test_no_tokens_at_all():
    mesh = simulate(2)
    x, chosen, weights = (t[:0] for t in tokens_and_choices(3))
    matrices = spread(torch.ones(3, 4, WIDTH, dtype=torch.float64), mesh, [Shard(0)]).requires_grad_()
    routed = dispatch(spread(x, mesh, [Shard(0)]), spread(chosen, mesh, [Shard(0)]), matrices)
    out = combine(routed, grouped_linear(routed, routed.rows, matrices), spread(weights, mesh, [Shard(0)]))
    assert out.shape == (0, 4)
    out.sum().backward()
    assert not matrices.grad.full_tensor().any()


def check_bytes(rank, world_size):
    """The ledger has the rows whose token and expert live on different ranks, there and back, in both passes."""
    mesh = simulate(4) if rank is None else device_mesh((4,))
    experts = 6
    x, chosen, weights = tokens_and_choices(experts, tokens=16)
    matrices = spread(torch.randn(experts, 5, WIDTH, dtype=torch.float64), mesh, [Shard(0)]).requires_grad_()
    mine = spread(x, mesh, [Shard(0)]).requires_grad_()
    with shardwise.debug.ledger() as log:
        routed = dispatch(mine, spread(chosen, mesh, [Shard(0)]), matrices)
        out = combine(routed, grouped_linear(routed, routed.rows, matrices), spread(weights, mesh, [Shard(0)]))
        out.sum().backward()
    trips = [(t // 4, e // 2) for t in range(16) for e in chosen[t].tolist()]
    to = [(a, b) for a, b in trips if a != b and rank in (None, b)]
    back = [(a, b) for a, b in trips if a != b and rank in (None, a)]
    wide = lambda rows, width: len(rows) * width * 8
    sent = {
        ("dispatch", False, ""): wide(to, WIDTH), ("combine", False, ""): wide(back, 5),
        ("dispatch", True, ""): wide(back, WIDTH), ("combine", True, ""): wide(to, 5),
    }  # fmt: skip
    sizes = 3 * experts * 8 * (4 if rank is None else 1)  # how many rows each expert gets of each other rank
    assert {(e.op, e.backward, e.reason): e.bytes for e in log if e.op in ("dispatch", "combine")} == {
        **sent,
        ("dispatch", False, "sizes"): sizes,
    }


def test_only_tokens_that_change_rank_travel():
    check_bytes(None, None)


def test_only_tokens_that_change_rank_travel_between_processes():
    run_ranks(check_bytes, 4)


def test_nothing_travels_where_every_rank_has_all_experts():
    mesh = simulate(4)
    x, chosen, weights = (spread(t, mesh, [Shard(0)]) for t in tokens_and_choices(3))
    with shardwise.debug.ledger() as log:
        routed = dispatch(x, chosen, 3)
        combine(routed, routed.rows, weights)
    assert [e.reason for e in log] == ["sizes"]


@pytest.mark.parametrize("cut", [(1, 1), (2, 1)])
def test_experts_cut_inside(cut):
    """Tensor parallel within experts: up cut along its outputs, down along its inputs."""
    mesh, experts = simulate((2, 2), axis_names=("ep", "tp")), 3
    x, chosen, weights = tokens_and_choices(experts)
    one = {
        "up": torch.randn(experts, 8, WIDTH),
        "up_bias": torch.randn(experts, 8),
        "down": torch.randn(experts, WIDTH, 8),
        "down_bias": torch.randn(experts, WIDTH),
    }
    one = {name: t.double().requires_grad_() for name, t in one.items()}
    inner = {"up": Shard(1), "up_bias": Shard(1), "down": Shard(2) if cut == (1, 1) else Shard(1), "down_bias": R}
    mine = {name: spread(t.detach(), mesh, [Shard(0), inner[name]]).requires_grad_() for name, t in one.items()}

    def run(x, chosen, weights, p):
        routed = dispatch(x, chosen, p["up"])
        y = grouped_linear(routed, routed.rows, p["up"], p["up_bias"]).relu()
        return combine(routed, grouped_linear(routed, y, p["down"], p["down_bias"]), weights)

    want = run(x, chosen, weights, one)
    out = run(*(spread(t, mesh, [Shard(0), R]) for t in (x, chosen, weights)), mine)
    close(out, want)
    want.square().sum().backward()
    out.square().sum().backward()
    for name in one:
        close(mine[name].grad, one[name].grad)


def test_router():
    logits = torch.randn(7, 5, dtype=torch.float64)
    weights, chosen = top_k(logits, 2)
    assert torch.allclose(weights.sum(1), torch.ones(7, dtype=torch.float64))
    assert torch.equal(chosen, logits.topk(2).indices)
    mine = top_k(spread(logits, simulate(3), [Shard(0)]), 2)
    close(mine[0], weights)
    assert torch.equal(mine[1].full_tensor(), chosen)
    close(balance_loss(spread(logits, simulate(3), [Shard(0)]), mine[1]), balance_loss(logits, chosen))
    assert balance_loss(torch.zeros(4, 2), torch.tensor([[0], [1], [0], [1]])) == 1


def one_rank_is_wrong(rank, world_size):
    mesh = device_mesh((world_size,))
    x, chosen, _ = tokens_and_choices(3)
    chosen[-1, 0] = 7  # a token of the last rank
    with pytest.raises(LayoutError, match="chosen has 7, but there are 3 experts"):
        dispatch(spread(x, mesh, [Shard(0)]), spread(chosen, mesh, [Shard(0)]), 3)


def test_an_expert_that_there_is_not_raises_on_all_ranks():
    run_ranks(one_rank_is_wrong, 2)


def test_errors_say_what_to_do():
    x, chosen, weights = tokens_and_choices(3)
    mesh = simulate(2)
    mine, mine_chosen = spread(x, mesh, [Shard(0)]), spread(chosen, mesh, [Shard(0)])
    for message, call in {
        "flatten the dims before the last": lambda: dispatch(x.view(1, TOKENS, WIDTH), chosen, 3),
        "chosen must be int64": lambda: dispatch(x, chosen.int(), 3),
        "both be DTensors, or both plain": lambda: dispatch(mine, chosen, 3),
        "capacity must be an int >= 0, the rows an expert takes, got -1": lambda: dispatch(x, chosen, 3, capacity=-1),
        "experts must be their number": lambda: dispatch(x, chosen, 0),
        "chosen has 2, but there are 2 experts": lambda: dispatch(mine, mine_chosen, 2),
        "must have the 26 rows dispatch gave": lambda: combine(dispatch(x, chosen, 3), x),
        "weights must be a DTensor": lambda: combine(r := dispatch(mine, mine_chosen, 3), r.rows, weights),
        "weight must be": lambda: grouped_linear(dispatch(x, chosen, 3), x, torch.zeros(3, 2, 2)),
        "give dispatch this weight": lambda: grouped_linear(
            r := dispatch(mine, mine_chosen, 3),
            r.rows,
            spread(torch.zeros(3, 2, WIDTH, dtype=torch.float64), mesh, [Shard(0)]),
        ),
        "k must be an int from 1": lambda: top_k(torch.zeros(2, 3), 4),
    }.items():
        with pytest.raises(LayoutError, match=message):
            call()
    with pytest.raises(MeshError, match="use one mesh"):
        dispatch(mine, mine_chosen, spread(torch.zeros(3, 2), simulate(3), [Shard(0)]))


# ---------------------------------------------------------------- the layer and the example


def test_the_layer_on_a_cut_batch_and_sequence():
    torch.manual_seed(0)
    mesh = simulate((2, 2))
    one = MixtureOfExperts(WIDTH, 8, experts=5, k=2, capacity_factor=1.0).double()
    many = copy.deepcopy(one)
    for name, p in list(many.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(many.get_submodule(owner), leaf, nn.Parameter(spread(p.detach(), mesh, [R, R if owner else Shard(0)])))
    x = torch.randn(4, 7, WIDTH, dtype=torch.float64)
    mine = spread(x, mesh, [Shard(0), zigzag(1, 7, 2)])
    want, balance = one(x)
    out, mine_balance = many(mine)
    close(out, want)
    close(mine_balance, balance)
    assert out.placements == mine.placements
    (want.square().sum() + balance).backward()
    (out.square().sum() + mine_balance).backward()
    for p, q in zip(many.parameters(), one.parameters(), strict=True):
        close(p.grad, q.grad)


SMALL = {"steps": 3, "batch": 6, "context": 8, "width": 8, "heads": 2, "layers": 2, "seed": 0, "lr": 3e-3}


def train_small(mesh, experts, capacity):
    apart = moe.train(argparse.Namespace(**SMALL, experts=experts, capacity=capacity), mesh, say=lambda line: None)
    assert set(apart) == {"losses", "gradients", "parameters"} and max(apart.values()) < 1e-10, apart


@pytest.mark.parametrize(
    "shape, experts, capacity",
    [((2, 2), 6, None), ((1, 4), 3, None), ((2, 2), 5, 1.0), ((4, 1), 4, None), ((2, 4), 6, 0.5)],
)
def test_training_equals_one_device(shape, experts, capacity):
    train_small(simulate(shape, axis_names=("dp", "ep")), experts, capacity)


def on_gloo_training(rank, world_size, shape, experts, capacity):
    train_small(device_mesh(shape, ("dp", "ep")), experts, capacity)


@pytest.mark.parametrize(
    "shape, experts, capacity", [((1, 2), 3, None), ((2, 2), 6, None), ((2, 2), 5, 1.0), ((1, 4), 3, None)]
)
def test_training_on_processes_equals_one_device(shape, experts, capacity):
    run_ranks(on_gloo_training, shape[0] * shape[1], shape, experts, capacity)


def test_the_example_is_short():
    assert len(Path(moe.__file__).read_text().splitlines()) < 150
