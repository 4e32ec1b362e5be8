"""Our tensors where torch's own are expected, and the other way: converted, or an error that names what to use."""

import itertools

import pytest
import torch
import torch.distributed.tensor as theirs
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _foreach_supported_types as of_optim
from torch.utils._foreach_utils import _foreach_supported_types as of_utils

import shardwise
from shardwise import DTensor, LayoutError, Replicate, RuleError, Shard, distribute_module, distribute_tensor, simulate
from shardwise.comm.rank_tensor import RankTensor
from tests.compat.common import grid, line, seeded
from tests.workers import run_ranks


def distribute_what_is_distributed(rank, world_size):
    value = seeded(5, 4)
    x = theirs.distribute_tensor(value, line(), [theirs.Shard(0)])
    ours = distribute_tensor(x, line(), [Shard(0)])
    assert type(ours) is DTensor and ours.to_local().data_ptr() == x.to_local().data_ptr()
    with pytest.raises(LayoutError, match=r"to a different placements .*; use tensor.redistribute"):
        distribute_tensor(x, line(), [Shard(1)])
    module = distribute_module(theirs.distribute_module(nn.Linear(3, 2), line()), line())
    assert all(type(p) is DTensor and isinstance(p, nn.Parameter) for p in module.parameters())


def they_meet_in_an_op(rank, world_size):
    a, b = (n.distribute_tensor(seeded(5, 4), line(), [n.Shard(0)]) for n in (shardwise, theirs))
    calls = [lambda: a + b, lambda: b + a, lambda: a.copy_(b), lambda: torch.cat([b, a]), lambda: torch.mm(a, b.t())]
    for call in calls:
        with pytest.raises(LayoutError, match=r"meets a shardwise.DTensor; convert it: shardwise.interop.from_torch"):
            call()
    with pytest.raises(LayoutError, match="distributed already; convert it"):
        DTensor.from_local(b, line(), [Shard(0)])
    with pytest.raises(RuleError, match="use those of shardwise"):
        theirs.distribute_tensor(a, line(), [theirs.Shard(0)])


def wrappers_refuse_ours(rank, world_size):
    for mesh in (line(), grid()["tp"]):
        model = lambda mesh=mesh: distribute_module(nn.Sequential(nn.Linear(4, 4)), mesh)
        calls = [lambda m=model: DistributedDataParallel(m()), lambda m=model: DistributedDataParallel(module=m())]
        calls += [
            lambda m=model: fully_shard(m(), mesh=grid()["dp"]),
            lambda m=model: FullyShardedDataParallel(m(), device_id="cpu"),
        ]
        for call in calls:
            with pytest.raises(RuleError, match=r"is a shardwise.DTensor.*use shardwise.parallel.data_parallel"):
                call()
    plain = DistributedDataParallel(nn.Linear(4, 4))  # plain ones go on as before
    plain(torch.ones(2, 4)).sum().backward()
    fully_shard(nn.Linear(4, 4), mesh=line())(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("check", [distribute_what_is_distributed, they_meet_in_an_op, wrappers_refuse_ours])
def test_on_processes(check):
    run_ranks(check, 4)


def flags_that_differ(rank, world_size):
    for mesh, requires in ((line(), rank == 1), (grid(), rank == 3)):
        local = torch.ones(2, requires_grad=requires)
        with pytest.raises(LayoutError, match=r"differ in requires_grad.*do not require grad, the others do"):
            DTensor.from_local(local, mesh, [Shard(0)] * len(mesh.shape), run_check=True)
        everywhere = DTensor.from_local(
            local.detach().requires_grad_(), mesh, [Replicate()] * len(mesh.shape), run_check=True
        )
        assert everywhere.requires_grad


def test_run_check_compares_requires_grad():
    run_ranks(flags_that_differ, 4)
    parts = [torch.ones(2, requires_grad=flag) for flag in (True, False)]
    with pytest.raises(LayoutError, match=r"the local tensors at \[\(1,\)\] do not"):
        DTensor.from_local(RankTensor(parts), simulate(2), [Shard(0)], run_check=True)


# -- torch's helpers know our class -------------------------------------------------------------------------
def close_on_all_ranks(rank, world_size):
    """A difference on one rank is seen on all."""
    x = distribute_tensor(torch.arange(5.0), line(), [Shard(0)])
    with torch.no_grad():
        y = x.clone()
        y.to_local().add_(1.0 if rank == 1 else 0.0)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        torch.testing.assert_close(x, y)
    torch.testing.assert_close(x, x.clone())


def test_assert_close():
    run_ranks(close_on_all_ranks, 4)
    value, mesh = torch.arange(10.0).reshape(5, 2), simulate(3)
    laid = [distribute_tensor(value, mesh, [p]) for p in (Shard(0), Shard(1), Replicate(), shardwise.Partial())]
    for a, b in itertools.product(laid, [*laid, value]):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close({"x": [b]}, {"x": [a]})
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            torch.testing.assert_close(a, b + 1)
    with pytest.raises(AssertionError, match="shape"):
        torch.testing.assert_close(laid[0], value[:4])
    with pytest.raises(AssertionError, match="dtype"):
        torch.testing.assert_close(laid[0], value.double())


def test_lists_of_types_for_list_ops():
    for types in (of_utils, of_optim):
        assert types.count(DTensor) == 1
    value = seeded(6, 4)
    got = []
    for make in (lambda v: v.clone(), lambda v: distribute_tensor(v, simulate(3), [Shard(0)])):
        param = nn.Parameter(make(value))
        optimizer = torch.optim.AdamW([param], foreach=True)
        param.grad = make(value)
        optimizer.step()
        got.append(param.full_tensor().detach() if isinstance(param, DTensor) else param.detach())
    torch.testing.assert_close(*got)


# -- torch's words ------------------------------------------------------------------------------------------
WRONG = {
    "softmax": lambda x: torch.softmax(x, 7),
    "sort": lambda x: x.sort(5),
    "size": lambda x: x.size(9),
    "sum": lambda x: x.sum(-4),
    "transpose": lambda x: x.transpose(0, 9),
    "cat": lambda x: torch.cat([x, x], 4),
    "backward of no scalar": lambda x: x.clone().requires_grad_().mul(2).backward(),
    "backward without grad": lambda x: x.backward(),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_in_torchs_words(name):
    value, said = torch.ones(4, 6), []
    for x in (value, *(distribute_tensor(value, simulate(2), [p]) for p in (Shard(0), Shard(1)))):
        with pytest.raises((IndexError, RuntimeError)) as error:
            WRONG[name](x)
        said.append((type(error.value), str(error.value)))
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("dim", [2, -3])
def test_placements_out_of_range_in_torchs_words(dim):
    words = rf"Dimension out of range \(expected to be in range of \[-2, 1\], but got {dim}\)"
    for call in (distribute_tensor, DTensor.from_local):
        with pytest.raises(IndexError, match=words):
            call(torch.ones(2, 3), simulate(2), [Shard(dim)])
