"""Leaves that enter by from_local and are written; gradients that are asked for, or given, as parts of a sum."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import AutogradError, DTensor, Partial, RankTensor, Shard, debug, distribute_tensor, simulate
from tests.tensor.common import R, checked_on, is_simulated, laid_out, layouts, on_one_axis, same, x


def own_copies(value, mesh):
    """A leaf on every rank, each with memory of its own."""
    if is_simulated(mesh):
        return RankTensor([value.clone().requires_grad_() for _ in range(mesh.size())])
    return value.clone().requires_grad_()


def each_its_own(mesh, of):
    """What `of(rank)` gives on each rank."""
    return RankTensor([of(r) for r in range(mesh.size())]) if is_simulated(mesh) else of(torch.distributed.get_rank())


def a_leaf_that_entered_is_written(mesh):
    value = x(5, 4)
    for places in layouts(mesh, value):
        for theirs in (None, places):
            if theirs and any(p.is_partial() for p in places):
                continue
            leaf = laid_out(value, mesh, places)._local.detach().requires_grad_()
            made = DTensor.from_local(leaf, mesh, places, shape=value.shape, grad_placements=theirs)
            assert made.requires_grad and not made.is_leaf
            made.mul_(3)
            same(made, value * 3, f"{places}")
            made.square().sum().backward()
            grads = [R if p.is_partial() else p for p in places]
            same(DTensor.from_local(leaf.grad, mesh, grads, shape=value.shape), value * 18, f"{places}")


def a_saved_leaf_that_is_written_raises(mesh):
    leaf = own_copies(x(3), mesh)
    saved = leaf * leaf
    DTensor.from_local(leaf, mesh, [R] * mesh.ndim).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def a_write_to_what_entered_is_one_to_a_view(mesh):
    """What is no leaf is seen by torch as the base of the distributed tensor."""
    leaf = own_copies(x(6), mesh)
    between = leaf * 1
    made = DTensor.from_local(between, mesh, [Shard(0)] * mesh.ndim)
    made.mul_(2)
    between.sum().backward()
    for grad in leaf.grad.ranks if is_simulated(mesh) else [leaf.grad]:
        assert grad.tolist() == [2.0] * 6


def gathered_and_given_back_as_parts(mesh):
    """The tensor-parallel idiom: a gather forward, a reduce-scatter back, nothing else."""
    value = x(7, 4)
    k = mesh.shape[-1]
    for places in (on_one_axis(mesh, Shard(0), -1), [Shard(1)] * (mesh.ndim - 1) + [Shard(0)]):
        leaf = distribute_tensor(value, mesh, places).requires_grad_()
        target = [*places[:-1], R]
        with debug.ledger() as log:
            local = leaf.redistribute(placements=target).to_local(grad_placements=[*places[:-1], Partial()])
            (local * each_its_own(mesh, lambda rank: torch.tensor(rank % k + 1.0))).sum().backward()
        same(leaf.grad, torch.full_like(value, sum(range(1, k + 1))), str(places))
        assert leaf.grad.placements == leaf.placements
        if k > 1:
            forward, backward = log
            assert (forward.kind, backward.kind) == ("all_gather", "reduce_scatter") and backward.backward
            if is_simulated(mesh):
                assert forward.bytes == backward.bytes


def the_whole_given_back_as_parts(mesh):
    value, weight = x(5, 4), x(5, 4, seed=3)
    for places in layouts(mesh, value):
        leaf = laid_out(value, mesh, places, requires_grad=True)
        theirs = on_one_axis(mesh, Partial(), -1)
        (leaf.full_tensor(grad_placements=theirs) * weight).sum().backward()
        same(leaf.grad, weight * mesh.shape[-1], str(places))


def given_parts_stay_parts(mesh):
    """Each rank keeps the gradient of what it computed; where ranks compute the same, one has it all."""
    value, weight = x(3, 4), x(6, 4, seed=3)
    leaf = own_copies(value, mesh)
    theirs = on_one_axis(mesh, Partial())
    with debug.ledger() as log:
        made = DTensor.from_local(leaf, mesh, [R] * mesh.ndim, grad_placements=theirs)
        rows = distribute_tensor(weight, mesh, on_one_axis(mesh, Shard(0)))
        F.linear(made, rows).sum().backward()
    assert not [entry for entry in log if entry.backward]
    same(DTensor.from_local(leaf.grad, mesh, theirs), weight.sum(0).expand(3, 4))
    leaf.grad = None
    made = DTensor.from_local(leaf, mesh, [R] * mesh.ndim, grad_placements=theirs)
    (F.linear(made, rows).sum() + made.sum()).backward()
    same(DTensor.from_local(leaf.grad, mesh, theirs), weight.sum(0).expand(3, 4) + 1)


def a_written_tensor_is_not_its_parts(mesh):
    leaf = distribute_tensor(x(6, 2), mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
    whole = leaf.redistribute(placements=[R] * mesh.ndim)
    whole.mul_(3)
    whole.to_local(grad_placements=on_one_axis(mesh, Partial())).sum().backward()
    same(leaf.grad, torch.full((6, 2), 3.0 * mesh.shape[0], dtype=torch.float64))


def a_gradient_somebody_watches_is_computed(mesh):
    leaf = distribute_tensor(x(6, 2), mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
    whole = leaf.redistribute(placements=[R] * mesh.ndim)
    whole.retain_grad()
    whole.to_local(grad_placements=on_one_axis(mesh, Partial())).sum().backward()
    same(whole.grad, torch.full((6, 2), float(mesh.shape[0]), dtype=torch.float64))
    late = leaf.redistribute(placements=[R] * mesh.ndim)
    late.to_local(grad_placements=on_one_axis(mesh, Partial()))
    with pytest.raises(AutogradError, match="before its first use"):
        late.retain_grad()
    asked = leaf.redistribute(placements=[R] * mesh.ndim)  # calls do not take what the program gathered from its parts
    rows = distribute_tensor(x(4, 2), mesh, on_one_axis(mesh, Shard(0)))
    (grad,) = torch.autograd.grad(F.linear(asked, rows).sum(), asked)
    same(grad, x(4, 2).sum(0).expand(6, 2))


def what_enters_begins_where_it_did(mesh):
    """storage_offset() is the local tensor's, and views count from there; new tensors begin at 0."""
    memory = torch.arange(12.0, dtype=torch.float64)
    for place in (R, Shard(0), Partial()):
        made = DTensor.from_local(memory[3:7], mesh, [place] * mesh.ndim)
        assert [t.storage_offset() for t in (made, made.detach(), made.view(made.shape), made + 1)] == [3, 3, 3, 0]
        assert made.to_local().storage_offset() == 3 or is_simulated(mesh)
    whole = DTensor.from_local(memory[3:7], mesh, [R] * mesh.ndim)
    assert whole[1:].storage_offset() == 4
    same(whole.as_strided((2,), (2,)), memory[3:7:2])
    same(whole.as_strided((2,), (2,), whole.storage_offset() + 1), memory[4:8:2])
    same(DTensor.from_local(memory[3:7], mesh, [Shard(0)] * mesh.ndim)[1:3], memory[4:6])


CHECKS = [
    what_enters_begins_where_it_did,
    a_leaf_that_entered_is_written, a_saved_leaf_that_is_written_raises, a_write_to_what_entered_is_one_to_a_view,
    gathered_and_given_back_as_parts, the_whole_given_back_as_parts, given_parts_stay_parts, a_written_tensor_is_not_its_parts,
    a_gradient_somebody_watches_is_computed,
]  # fmt: skip
test_simulated, test_processes = checked_on(__name__, CHECKS)


def test_half_the_bytes_of_an_all_reduce():
    mesh, value = simulate(4), torch.ones(8, 16)
    leaf = distribute_tensor(value, mesh, [Shard(0)]).requires_grad_()
    with debug.ledger() as log:
        leaf.redistribute(placements=[R]).to_local(grad_placements=[Partial()]).sum().backward()
    assert [entry.bytes for entry in log] == [3 * value.nbytes] * 2  # an all-reduce alone is twice that
