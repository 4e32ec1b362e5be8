"""SimulatedMesh as a DeviceMesh, RankTensor as a local tensor."""

import copy
import pickle

import pytest
import torch

from shardwise import (
    DTensor,
    LayoutError,
    MeshError,
    Partial,
    RankTensor,
    Replicate,
    Shard,
    distribute_tensor,
    simulate,
)
from tests.tensor.common import same, x


def test_mesh_surface():
    mesh = simulate((2, 4), axis_names=("dp", "tp"))
    assert mesh.shape == (2, 4) and mesh.ndim == 2 and mesh.size() == 8 and mesh.size(0) == 2 and mesh.size(1) == 4
    assert mesh.mesh_dim_names == ("dp", "tp") and mesh.device_type == "cpu"
    assert torch.equal(mesh.mesh, torch.arange(8).view(2, 4))
    assert repr(mesh) == "SimulatedMesh(dp=2, tp=4, device='cpu')"
    assert simulate((2, 4), axis_names=("dp", "tp")) is mesh and simulate((2, 4)) is not mesh
    assert simulate(3).shape == (3,)
    assert pickle.loads(pickle.dumps(mesh)) is mesh and copy.deepcopy(mesh) is mesh
    assert {mesh: 1}[mesh] == 1


def test_sub_mesh():
    mesh = simulate((2, 3), axis_names=("dp", "tp"))
    tp = mesh["tp"]
    assert tp.shape == (3,) and tp.mesh_dim_names == ("tp",) and mesh["tp"] is tp and mesh["dp", "tp"] is mesh
    assert pickle.loads(pickle.dumps(tp)) is tp
    value = x(5, 4)
    laid = distribute_tensor(value, tp, [Shard(0)]).requires_grad_()
    assert len(laid.to_local().ranks) == 6
    assert [v.shape[0] for v in laid.to_local().ranks] == [2, 2, 1] * 2
    other = distribute_tensor(x(4, 5), tp, [Shard(0)])
    same(laid @ other, value @ x(4, 5))
    same(laid + distribute_tensor(value, mesh), value * 2)
    with pytest.raises(MeshError, match="different meshes"):
        laid + distribute_tensor(value, mesh, [Shard(0), Replicate()])
    with pytest.raises(KeyError, match="^mesh axis 0 is not one of"):
        mesh[0]
    with pytest.raises(MeshError, match="mesh axis 'pp' is not one of"):
        mesh["pp"]
    flipped = mesh["tp", "dp"]
    assert flipped.shape == (3, 2)
    same(distribute_tensor(value, flipped, [Shard(0), Shard(1)]), value)


def test_flattened_axes():
    """As torch's DeviceMesh has them."""
    mesh = simulate((2, 3, 2), axis_names=("pp", "dp", "tp"))
    flat = mesh["dp", "tp"]._flatten("all")
    assert flat.shape == (6,) and flat.axis_names == ("all",) and mesh["all"] is flat is mesh["pp"]["all"]
    assert flat.ranks == mesh["dp", "tp"].ranks and mesh._flatten().axis_names == ("pp_dp_tp",)
    leaf = distribute_tensor(x(7, 2), flat, [Shard(0)]).requires_grad_()
    (leaf * leaf).sum().backward()
    same(leaf.grad, x(7, 2) * 2)
    assert pickle.loads(pickle.dumps(flat)) is flat
    with pytest.raises(MeshError, match=r"\('pp', 'tp'\) must follow each other in \('pp', 'dp', 'tp'\)"):
        mesh["pp", "tp"]._flatten()
    with pytest.raises(MeshError, match="'pp' is an axis of"):
        mesh["dp", "tp"]._flatten("pp")


def test_gradients_on_a_sub_mesh():
    mesh = simulate((2, 3), axis_names=("dp", "tp"))
    for place in (Shard(0), Replicate()):
        laid = distribute_tensor(x(5, 4), mesh["tp"], [place]).requires_grad_()
        (laid * laid).sum().backward()
        same(laid.grad, 2 * x(5, 4))


def test_mesh_as_context():
    outer, inner = simulate((2,), axis_names=("o",)), simulate((3,), axis_names=("i",))
    with outer as entered:
        assert entered is outer
        assert distribute_tensor(x(3)).device_mesh is outer
        with inner:
            assert DTensor.from_local(x(3)).device_mesh is inner
        assert distribute_tensor(x(3)).device_mesh is outer
    with pytest.raises(MeshError, match="No device mesh is currently active"):
        distribute_tensor(x(3))


EVEN = [x(2, 3, seed=i) for i in range(3)]
UNEVEN = [x(n, 3, seed=n) for n in (2, 0, 3)]


@pytest.mark.parametrize("parts", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_rank_tensor_arithmetic(parts):
    local = RankTensor(parts)
    assert isinstance(local, torch.Tensor) and len(local.ranks) == 3
    for op in (
        lambda t: t + 1, lambda t: 2 * t - t, lambda t: t.exp().sum(), lambda t: t @ torch.ones(3, 2, dtype=t.dtype),
        lambda t: torch.cat([t, t], 1), lambda t: t.t(), lambda t: t[:, 1:], lambda t: torch.nn.functional.softmax(t, -1),
        lambda t: t > 0, lambda t: torch.where(t > 0, t, 0.0), lambda t: t.float(),
    ):  # fmt: skip
        got = op(local)
        assert isinstance(got, RankTensor)
        for mine, part in zip(got.ranks, parts, strict=True):
            torch.testing.assert_close(mine, op(part))
    one, two = local.chunk(2, 1)
    for mine, part in zip(one.ranks, parts, strict=True):
        torch.testing.assert_close(mine, part.chunk(2, 1)[0])
    values, indices = local.max(1)
    for mine, part in zip(indices.ranks, parts, strict=True):
        torch.testing.assert_close(mine, part.max(1).indices)


def test_rank_tensor_shape():
    even, uneven = RankTensor(EVEN), RankTensor(UNEVEN)
    assert even.shape == (2, 3) and even.size() == (2, 3) and even.size(1) == 3 and even.dim() == even.ndim == 2
    assert even.dtype == torch.float64 and even.device.type == "cpu" and even.numel() == 6
    assert uneven.size(1) == 3 and uneven.dtype == torch.float64 and uneven.dim() == 2
    for read in (lambda t: t.shape, lambda t: t.size(), lambda t: t.size(0)):
        with pytest.raises(LayoutError, match=r"the ranks differ in .*read it off .ranks\[i\] for rank i"):
            read(uneven)


def test_uneven_rank_tensor_has_no_numel():
    for read in (lambda t: t.numel(), len):
        with pytest.raises(LayoutError, match="the ranks differ"):
            read(RankTensor(UNEVEN))


def test_rank_tensor_backward():
    local = RankTensor([p.clone().requires_grad_() for p in UNEVEN])
    assert local.requires_grad and local.is_leaf and local.grad is None
    (local * local).sum().backward()
    for mine, part in zip(local.grad.ranks, UNEVEN, strict=True):
        torch.testing.assert_close(mine, 2 * part)
    local.grad = None
    assert all(v.grad is None for v in local.ranks)
    (local * 3).backward(RankTensor([torch.ones_like(p) for p in UNEVEN]))
    for mine, part in zip(local.grad.ranks, UNEVEN, strict=True):
        torch.testing.assert_close(mine, torch.full_like(part, 3))
    grads = torch.autograd.grad((local * local).sum(), local)
    for mine, part in zip(grads[0].ranks, UNEVEN, strict=True):
        torch.testing.assert_close(mine, 2 * part)


def test_rank_tensor_flags():
    shared = x(2, 2)
    local = RankTensor([shared, shared, shared.clone()])
    local.add_(1)
    for value in local.ranks:
        torch.testing.assert_close(value, x(2, 2) + 1)
    assert local.requires_grad_() is local or isinstance(local, RankTensor)
    assert all(v.requires_grad for v in local.ranks) and not local.detach().requires_grad
    twin = copy.deepcopy(local.detach())
    assert twin.ranks[0] is twin.ranks[1] and twin.ranks[0] is not local.ranks[0]
    back = pickle.loads(pickle.dumps(local.detach()))
    torch.testing.assert_close(back.ranks[2], local.ranks[2].detach())
    assert "RankTensor of 3 ranks" in repr(local)
    with torch.no_grad():
        local.zero_()
    assert all(not v.any() for v in local.ranks)


def test_rank_tensor_meets_dtensor():
    mesh = simulate((3,))
    with pytest.raises(MeshError, match=r"say how it is laid out: DTensor.from_local\(x, mesh, placements\)"):
        distribute_tensor(x(2, 3), mesh) + RankTensor(EVEN)


def test_a_local_program():
    """Column-parallel by hand: each simulated rank uses its own part, as model code on one rank does."""
    mesh = simulate((3,))
    value, weight = x(4, 6), x(6, 7)
    plain, plain_weight = value.clone().requires_grad_(), weight.clone().requires_grad_()
    (plain @ plain_weight).relu().pow(2).sum().backward()
    leaf, columns = (
        distribute_tensor(value, mesh).requires_grad_(),
        distribute_tensor(weight, mesh, [Shard(1)]).requires_grad_(),
    )
    hidden = (leaf.to_local(grad_placements=[Partial()]) @ columns.to_local()).relu()
    out = DTensor.from_local(hidden, mesh, [Shard(1)])
    assert out.shape == (4, 7)
    out.pow(2).sum().backward()
    same(leaf.grad, plain.grad)
    same(columns.grad, plain_weight.grad)


def test_one_rank():
    mesh = simulate((1,))
    for place in (Replicate(), Shard(0)):
        leaf = distribute_tensor(x(3, 2), mesh, [place]).requires_grad_()
        (leaf @ leaf.t()).sum().backward()
        plain = x(3, 2).requires_grad_()
        (plain @ plain.t()).sum().backward()
        same(leaf.grad, plain.grad)


def test_a_local_value_that_meets_a_distributed_one_raises():
    mesh = simulate(2)
    weight = distribute_tensor(torch.ones(3), mesh)
    local = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).to_local()
    for call in (
        lambda: local * weight,
        lambda: weight * local,
        lambda: torch.nn.functional.layer_norm(local, (3,), weight),
    ):
        with pytest.raises(MeshError, match="a RankTensor meets a DTensor; say how it is laid out"):
            call()
    assert isinstance(local * torch.nn.Parameter(torch.ones(3)), RankTensor)
