"""What autograd knows of results: whether they require grad, whether they are leaves, what may be written into them.
It depends on the call, never on what a rank holds."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import DTensor, Replicate, Shard, distribute_tensor, simulate
from tests.values import seeded
from tests.workers import device_mesh, run_ranks


def x(*shape, seed=0):
    return seeded(shape, seed=seed)[0].double()


A, IMAGE = x(8, 6), x(2, 3, 8, 8)
ONES = torch.ones(6, dtype=torch.float64)

FACTS = {
    "native_layer_norm": lambda a: torch.native_layer_norm(a, (6,), None, None, 1e-5),
    "native_layer_norm, weights": lambda a: torch.native_layer_norm(a, (6,), a[0], a[1], 1e-5),
    "native_batch_norm": lambda a: torch.native_batch_norm(a, None, None, None, None, True, 0.1, 1e-5),
    "native_batch_norm, eval": lambda a: torch.native_batch_norm(a, None, None, ONES, ONES, False, 0.1, 1e-5),
    "group_norm": lambda a: torch.native_group_norm(a, None, None, 8, 6, 1, 2, 1e-5)[0],
    "bernoulli": lambda a: torch.bernoulli(a.sigmoid()),
    "bernoulli_": lambda a: torch.zeros_like(a).bernoulli_(a.sigmoid()),
    "bernoulli_ of a number": lambda a: (a * 1).bernoulli_(0.5),
    "normal": lambda a: torch.normal(a, a.abs()),
    "normal of a number": lambda a: torch.normal(a, 2.0),
    "normal_": lambda a: (a * 1).normal_(),
    "poisson": lambda a: torch.poisson(a.abs()),
    "multinomial": lambda a: torch.multinomial(a.sigmoid(), 2),
    "dropout": lambda a: F.dropout(a, 0.5),
    "places": lambda a: (a.argmax(0), a.sort(0)[1], a > 0, a.isnan(), a.max(0)[1], a.sign(), a.long()),
    "unique": lambda a: torch.unique(a, return_counts=True),
    "unique rows": lambda a: torch.unique(a, dim=0),
    "unique_consecutive": lambda a: torch.unique_consecutive(a),
    "conj": lambda a: (a.conj(), a.real, a.resolve_neg()),
}  # fmt: skip


def facts(func, leaf):
    """For each result whether it requires grad and is a leaf, and how its gradient ends."""
    results = func(leaf)
    found = []
    for result in results if isinstance(results, tuple) else (results,):
        ending = None
        if result.requires_grad and not result.is_leaf:
            try:
                (grad,) = torch.autograd.grad((result**3).sum(), leaf, allow_unused=True, retain_graph=True)
                ending = grad is not None and bool(grad.any())  # none, or zeros
            except NotImplementedError as error:
                ending = str(error)
        found.append((result.dtype, result.requires_grad, result.is_leaf, ending))
    return found


@pytest.mark.parametrize("places", [Shard(0), Shard(1), Shard(0, sizes=(5, 0, 2, 1)), Replicate()], ids=str)
@pytest.mark.parametrize("name", FACTS)
def test_autograd_knows_what_torch_knows(name, places):
    func, mesh = FACTS[name], simulate(4)
    mine = lambda leaf: func(leaf)
    assert facts(mine, distribute_tensor(A, mesh, [places]).requires_grad_()) == facts(func, A.clone().requires_grad_())


def test_random_numbers_have_gradients_of_zeros():
    leaf = distribute_tensor(A, simulate(4), [Shard(0)]).requires_grad_()
    (torch.bernoulli(leaf.sigmoid()) * 3 + torch.normal(leaf, leaf.abs())).sum().backward()
    assert not leaf.grad.full_tensor().any()


# -- ranks without elements --------------------------------------------------------------------------------
EMPTY = {
    "max_pool": lambda t: F.max_pool2d(t, 2),
    "max_pool of one": lambda t: F.max_pool2d(t, 1),
    "avg_pool": lambda t: F.avg_pool2d(t, 2),
    "adaptive_avg_pool": lambda t: F.adaptive_avg_pool2d(t, 8),
    "adaptive_max_pool": lambda t: F.adaptive_max_pool2d(t, 2),
    "fractional_max_pool": lambda t: F.fractional_max_pool2d(t, 2, output_size=4, _random_samples=torch.full((2, 3, 2), 0.4, dtype=t.dtype)),
    "lp_pool": lambda t: F.lp_pool2d(t, 2, 2),
    "nearest": lambda t: F.interpolate(t, scale_factor=2.0),
    "bilinear": lambda t: F.interpolate(t, scale_factor=2.0, mode="bilinear"),
    "bicubic, corners": lambda t: F.interpolate(t, size=(5, 5), mode="bicubic", align_corners=True),
    "local_response_norm": lambda t: F.local_response_norm(t, 2),
    "instance_norm": lambda t: F.instance_norm(t),
    "grid_sample": lambda t: F.grid_sample(t, t[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False),
    "cummax": lambda t: t.cummax(2)[0],
    "conv": lambda t: F.conv2d(t, torch.ones(2, 3, 3, 3, dtype=t.dtype)),
    "pixel_shuffle": lambda t: F.pixel_shuffle(t, 1),
}  # fmt: skip


def written_after(name, mesh, dims=(0, 1, 2)):
    """The result may be written into on every rank, and so may a gradient that requires none."""
    plain = IMAGE.clone().requires_grad_()
    (EMPTY[name](plain).mul_(2) ** 2).sum().backward()
    for dim in dims:
        leaf = distribute_tensor(IMAGE, mesh, [Shard(dim)]).requires_grad_()
        (EMPTY[name](leaf).mul_(2) ** 2).sum().backward()
        torch.testing.assert_close(
            leaf.grad.full_tensor(), plain.grad, msg=lambda m, dim=dim: f"{m}\n{name}, dim {dim}"
        )
        assert not leaf.grad.requires_grad
        leaf.grad.add_(1)


@pytest.mark.parametrize("name", EMPTY)
def test_a_rank_without_elements_takes_part_in_writes(name):
    written_after(name, simulate(4))


def looked_up_twice(mesh, cut):
    """Second derivatives of a look-up where some ranks have no ids."""
    results = []
    for made in (lambda t, p: t.clone(), lambda t, p: distribute_tensor(t, mesh, [p])):
        table, ids = made(A, Shard(0) if cut else Replicate()).requires_grad_(), made(torch.tensor([3, 1]), Shard(0))
        for look_up in (F.embedding, lambda ids, table: table[ids]):
            found = look_up(ids, table)
            (grad,) = torch.autograd.grad((found**3).sum(), table, create_graph=True)
            (second,) = torch.autograd.grad((grad**2).sum(), table)
            results.append(second.full_tensor() if isinstance(second, DTensor) else second)
    torch.testing.assert_close(results[2:], results[:2])


@pytest.mark.parametrize("cut", [False, True])
def test_second_derivatives_of_look_ups(cut):
    looked_up_twice(simulate(4), cut)


def one_module_twice(mesh):
    for places in (Shard(0), Shard(1), Replicate()):
        results = []
        for value in (A.clone(), distribute_tensor(A, mesh, [places])):
            norm, leaf = nn.BatchNorm1d(6, dtype=torch.float64), value.requires_grad_()
            (norm(norm(leaf) * 2) ** 3).sum().backward()
            found = [norm.running_mean, norm.running_var, leaf.grad]
            results.append([(t.full_tensor() if isinstance(t, DTensor) else t).clone() for t in found])
            (norm.eval()(leaf) + norm.train()(leaf)).sum().backward()  # the first has saved what the second writes
        torch.testing.assert_close(results[1], results[0])


def test_a_batch_norm_used_twice_in_one_pass():
    one_module_twice(simulate(4))


def on_processes(rank, world_size):
    mesh = device_mesh((4,))
    for name in ("max_pool", "bilinear", "local_response_norm", "cummax"):
        written_after(name, mesh, (0,))
    for cut in (False, True):
        looked_up_twice(mesh, cut)
    one_module_twice(mesh)


def test_on_processes():
    run_ranks(on_processes, 4)


def test_a_mean_takes_a_second_backward_pass():
    """It keeps nothing for its gradient, so that a graph which was freed once gives it again, as on one device."""
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        for dims in (None, 0, (0, 1)):
            plain, ours = A.clone().requires_grad_(), distribute_tensor(A, simulate(3), placements).requires_grad_()
            for leaf in (plain, ours):
                mean = leaf.mean(dims)
                for weight in (1.0, 2.0):
                    (mean * weight).sum().backward()
            torch.testing.assert_close(ours.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)
