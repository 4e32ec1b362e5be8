"""A tensor class of somebody's as what the ranks hold: the op that the program calls reaches it, and no other."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, RankTensor, Replicate, Shard, distribute_tensor
from tests.tensor.common import checked_on, is_simulated, on_one_axis, x

aten = torch.ops.aten
KNOWN = {
    aten.t.default,
    aten.transpose.int,
    aten.detach.default,
    aten.view.default,
    aten.alias.default,
    aten.slice.Tensor,
}


class Scaled(torch.Tensor):
    """Small numbers times a scale, as float8 training has them. It knows a few ops."""

    @staticmethod
    def __new__(cls, data, scale):
        self = torch.Tensor._make_wrapper_subclass(cls, data.shape, strides=data.stride(), dtype=torch.float64)
        self.numbers, self.scale = data, scale
        return self

    def __repr__(self, *, tensor_contents=None):
        return f"Scaled({self.numbers} * {self.scale})"

    def value(self):
        return self.numbers * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in KNOWN:
            return cls(func(args[0].numbers, *args[1:], **kwargs or {}), args[0].scale)
        if func is aten.mm.default:
            return torch.mm(*(arg.value() if isinstance(arg, cls) else arg for arg in args))
        raise NotImplementedError(f"Scaled has no {func}")


def scaled(value, mesh, places):
    """Each rank's part of a value, as the class."""
    local = distribute_tensor(value / 2, mesh, places).to_local()
    if is_simulated(mesh):
        made = {id(part): Scaled(part, 2.0) for part in local.ranks}
        local = RankTensor([made[id(part)] for part in local.ranks])
    else:
        local = Scaled(local, 2.0)
    return DTensor.from_local(local, mesh, places, shape=value.shape)


def holds(tensor, want):
    comm = tensor._layout.mesh.comm
    parts = distribute_tensor(want, tensor.device_mesh, tensor.placements)
    for mine, theirs in zip(comm.values(tensor._local), comm.values(parts._local), strict=True):
        assert type(mine) is Scaled
        torch.testing.assert_close(mine.value(), theirs)


def views(mesh):
    value = x(4, 6)
    for places in ([Replicate()] * mesh.ndim, on_one_axis(mesh, Shard(0)), [Shard(1)] * mesh.ndim):
        ours = scaled(value, mesh, places)
        holds(ours, value)
        for op in (torch.t, lambda t: t.t(), lambda t: t.transpose(0, 1), aten.t.default, lambda t: t.t().t().detach()):
            holds(op(ours), op(value))
        with pytest.raises(NotImplementedError, match="Scaled has no aten.permute"):
            ours.permute(1, 0)


def products(mesh):
    value, weight = x(4, 6), x(5, 6, seed=1)
    rows = scaled(weight, mesh, on_one_axis(mesh, Shard(0)))
    ours = distribute_tensor(value, mesh)
    for made in (torch.mm(ours, rows.t()), ours @ rows.t(), F.linear(ours, rows)):
        assert made.placements[0].is_shard(1)
        torch.testing.assert_close(made.full_tensor(), value @ weight.t())


CHECKS = [views, products]
test_simulated, test_processes = checked_on(__name__, CHECKS)
