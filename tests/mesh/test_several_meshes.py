"""Calls on tensors of several meshes: lists, numbers, and tensors on parts of one mesh."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import DTensor, MeshError, Partial, Replicate, Shard, distribute_tensor, implicit_replication, simulate
from tests.tensor.common import same, x
from tests.workers import device_mesh, run_ranks

R = Replicate()


def several(grid, other):
    """Parameters with gradients on a mesh, on both of its parts and on a mesh of another shape; and plain ones."""
    values = [x(4, 3), x(5), x(3, 3), x(2), x(1, 2)]
    places = [
        (grid, [Shard(0), Shard(1)]),
        (grid["tp"], [Shard(0)]),
        (grid["dp"], [R]),
        (other, [Shard(0)]),
        (grid, [R, R]),
    ]
    plain, ours = [nn.Parameter(v) for v in values], []
    for value, (mesh, placements) in zip(plain, places, strict=True):
        value.grad = x(*value.shape, seed=5)
        mine = nn.Parameter(distribute_tensor(value.detach(), mesh, placements))
        mine.grad = distribute_tensor(value.grad, mesh, placements)
        ours.append(mine)
    return plain, ours


def grads(params):
    return [p.grad for p in params]


def all_same(ours, plain, where=""):
    for i, (mine, value) in enumerate(zip(ours, plain, strict=True)):
        same(mine, value, f"{where} {i}")


def lists(grid, other):
    plain, ours = several(grid, other)
    for op in (torch._foreach_abs, torch._foreach_norm, lambda t: torch._foreach_add(t, 2.0)):
        all_same(op(ours), op(plain), str(op))
    with torch.no_grad():
        for params in (plain, ours):
            torch._foreach_add_(grads(params), params, alpha=2)
            torch._foreach_mul_(grads(params), [1.0, 2.0, 3.0, 4.0, 5.0])
            torch._foreach_mul_(grads(params), torch.tensor(0.5, dtype=torch.float64))
    all_same(grads(ours), grads(plain))
    scale = DTensor.from_local(torch.tensor(0.5, dtype=torch.float64), grid["tp"], [Partial()])  # a number, pending
    torch._foreach_mul_(grads(ours), scale)
    torch._foreach_mul_(grads(plain), torch.tensor(0.5, dtype=torch.float64) * grid["tp"].size())
    all_same(grads(ours), grads(plain))


def lists_with_some_gradients(grid, other):
    """One call has one node: where one of its results requires grad, all do."""
    plain, ours = several(grid, other)
    for op in (torch._foreach_neg, torch._foreach_norm, lambda t: torch._foreach_mul(t, 2.0)):
        some = [op([t if i == 1 else t.detach() for i, t in enumerate(ts)]) for ts in (plain, ours)]
        all_same(some[1], some[0])
        assert [y.requires_grad for y in some[1]] == [y.requires_grad for y in some[0]] == [True] * 5
        with torch.no_grad():
            assert not any(y.requires_grad for y in op(ours))


def positions_must_agree(grid, other):
    _, ours = several(grid, other)
    with pytest.raises(MeshError, match=r"_foreach_add: a tensor of shape \(5,\) is on .* the same mesh"):
        torch._foreach_add(ours[:2], ours[1::-1])


def clipping(grid, other):
    for norm_type in (2.0, 1.0, float("inf")):
        for foreach in (None, False):
            plain, ours = several(grid, other)
            totals = [nn.utils.clip_grad_norm_(p, 0.5, norm_type, foreach=foreach) for p in (plain, ours)]
            same(totals[1], totals[0])
            all_same(grads(ours), grads(plain), f"{norm_type} {foreach}")


def optimizers(grid, other):
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        for way in ({"foreach": True}, {"fused": True}, {}):
            plain, ours = several(grid, other)
            steps = [kind(params, lr=0.1, **way) for params in (plain, ours)]
            for _ in range(2):
                for optimizer in steps:
                    optimizer.step()
            all_same(ours, plain, f"{kind} {way}")


def unscaling(grid, other):
    for bad in (0.0, float("inf")):
        plain, ours = several(grid, other)
        found, inverse = torch.zeros(()), torch.tensor(0.25)
        with torch.no_grad():
            ours[1].grad[3] += bad
        torch._amp_foreach_non_finite_check_and_unscale_(grads(ours), found, inverse)
        assert found.item() == (bad > 0)
        if not bad:
            all_same(grads(ours), [g * 0.25 for g in grads(plain)])


def numbers(grid, other):
    """Of a mesh and its part the result is on the part; of meshes that are no parts of each other it is plain."""
    parts = [distribute_tensor(x(), mesh, [R] * mesh.ndim) for mesh in (grid, grid["tp"], grid["dp"], other)]
    nested = torch.stack(parts[:2])
    assert nested.device_mesh == grid["tp"] and nested.placements == (R,)
    same(nested, x().expand(2))
    pending = DTensor.from_local(x(), grid, [Partial(), Partial()])
    same(pending + parts[1], x() * (grid.size() + 1))
    for some in (parts, parts[1:3], parts[2:]):
        made = torch.stack(some)
        assert type(made) is torch.Tensor
        same(made, x().expand(len(some)))


def a_part_of_a_mesh_is_taken_where_the_rest_is_whole(grid, other):
    value, weight = x(4, 6), x(9, 6, seed=2)
    a, b = value.clone().requires_grad_(), weight.clone().requires_grad_()
    F.linear(a, b).square().sum().backward()
    ours = distribute_tensor(value, grid, [R, R]).requires_grad_()
    rows = distribute_tensor(weight, grid["tp"], [Shard(0)]).requires_grad_()
    made = F.linear(ours, rows)
    assert made.device_mesh == grid["tp"] and made.placements == (Shard(1),)
    made.square().sum().backward()
    same(ours.grad, a.grad)
    same(rows.grad, b.grad)
    target = rows.detach().clone()
    target.add_(distribute_tensor(weight, grid, [R, Shard(1)]))
    same(target, weight * 2)


def a_part_counts_as_replicated_where_that_is_promised(grid, other):
    value, weight = x(4, 6), x(9, 6, seed=2)
    a, b = value.clone().requires_grad_(), weight.clone().requires_grad_()
    F.linear(a, b).square().sum().backward()
    cases = [((grid, [Shard(0), R]), (grid["tp"], [Shard(0)])), ((grid["dp"], [Shard(0)]), (grid, [R, Shard(0)])),
             ((grid["dp"], [Shard(0)]), (grid["tp"], [Shard(0)])), ((grid, [Shard(0), Shard(1)]), (grid["tp"], [Shard(1)]))]  # fmt: skip
    for first, second in cases:
        ours, rows = (
            distribute_tensor(value, *first).requires_grad_(),
            distribute_tensor(weight, *second).requires_grad_(),
        )
        with pytest.raises(
            MeshError, match=r"is the same along .* not known: say so by x\.redistribute\(mesh, placements\)"
        ):
            F.linear(ours, rows)
        with implicit_replication():
            made = F.linear(ours, rows)
            made.square().sum().backward()
        assert made.device_mesh == grid and made.placements[0] == Shard(0)
        same(ours.grad, a.grad, str(first))
        same(rows.grad, b.grad, str(second))
        with pytest.raises(MeshError, match="not known"):  # a plan that was made does not keep the promise
            F.linear(ours, rows)
        with implicit_replication(), pytest.raises(MeshError, match=r"writes into argument 0.*bring the others there"):
            distribute_tensor(value, grid["tp"], [R]).add_(distribute_tensor(value, grid, [Shard(0), R]))


def unrelated_meshes(grid, other):
    with (
        implicit_replication(),
        pytest.raises(MeshError, match=r"on different meshes.*x\.redistribute\(mesh, placements\)"),
    ):
        distribute_tensor(x(4), grid, [R, R]) + distribute_tensor(x(4), other, [R])


CHECKS = [
    lists, lists_with_some_gradients, positions_must_agree, clipping, optimizers, unscaling, numbers,
    a_part_of_a_mesh_is_taken_where_the_rest_is_whole,
    a_part_counts_as_replicated_where_that_is_promised, unrelated_meshes,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("shape", [(2, 2), (2, 3)], ids=str)
def test_simulated(check, shape):
    check(simulate(shape, axis_names=("dp", "tp")), simulate(3))


def on_ranks(rank, world_size):
    grid, other = device_mesh((2, 2), ("dp", "tp")), DeviceMesh("cpu", [3, 1, 0, 2])
    for check in CHECKS:
        check(grid, other)


def test_processes():
    run_ranks(on_ranks, 4)
