"""Bad arguments of the constructors: which one, what it was, what would be right; and nothing has changed afterwards."""

import re

import pytest
import torch

import shardwise
from shardwise import (
    DeviceMesh,
    DTensor,
    LayoutError,
    MeshError,
    MoveError,
    Partial,
    RankTensor,
    Replicate,
    Shard,
    ShardwiseError,
    checkpoint,
    distribute_module,
    distribute_tensor,
    simulate,
)  # fmt: skip
from shardwise.parallel import ColwiseParallel, parallelize_module
from shardwise.parallel.plan import PlanError
from tests.tensor.common import same, x
from tests.workers import device_mesh, run_ranks

MESH = simulate((2, 3), axis_names=("a", "b"))
LINE = simulate((3,), axis_names=("a",))
R = Replicate()
VALUE = x(5, 4)


def local(*sizes, columns=4, dtype=torch.float64):
    return RankTensor([torch.ones(n, columns, dtype=dtype) for n in sizes])


CASES = {
    # distribute_tensor
    "not a tensor": (lambda: distribute_tensor([1, 2], LINE), LayoutError, "tensor must be a torch.Tensor, got list"),
    "no mesh": (lambda: distribute_tensor(VALUE), MeshError, "No device mesh is currently active! Pass a device_mesh, or use `with mesh:`"),
    "not a mesh": (lambda: distribute_tensor(VALUE, "cpu"), MeshError, "device_mesh: expected a DeviceMesh or simulate(...), got 'cpu' (str)"),
    "too few placements": (lambda: distribute_tensor(VALUE, MESH, [Shard(0)]), LayoutError, "Found placements length: 1, and device_mesh.ndim: "),
    "too many placements": (lambda: distribute_tensor(VALUE, LINE, [R, R]), LayoutError, "Found placements length: 2, and device_mesh.ndim: "),
    "dim too large": (lambda: distribute_tensor(VALUE, MESH, [R, Shard(2)]), LayoutError, "placements[1] = Shard(dim=2): dim 2 is out of range for a tensor of shape (5, 4); use -2 to 1"),
    "dim too small": (lambda: distribute_tensor(VALUE, LINE, [Shard(-3)]), LayoutError, "placements[0] = Shard(dim=-3): dim -3 is out of range for a tensor of shape (5, 4); use -2 to 1"),
    "shard a scalar": (lambda: distribute_tensor(x(), LINE, [Shard(0)]), LayoutError, "dim 0 is out of range for a tensor of shape (); it has no dim to shard"),
    "sizes do not add up": (lambda: distribute_tensor(VALUE, LINE, [Shard(0, sizes=(2, 2, 2))]), LayoutError, "the sizes (2, 2, 2) add up to 6, but there are 5 indices of dim 0 of shape (5, 4)"),
    "too few sizes": (lambda: distribute_tensor(VALUE, LINE, [Shard(0, sizes=(2, 3))]), LayoutError, "2 sizes for a mesh axis of 3 ranks; give 3"),
    "not a placement": (lambda: distribute_tensor(VALUE, LINE, ["shard"]), LayoutError, "placements[0] = 'shard' is not a placement; use Replicate(), Shard(dim) or Partial(op)"),
    "placement class": (lambda: distribute_tensor(VALUE, LINE, [Replicate]), LayoutError, "is not a placement; use Replicate(), Shard(dim) or Partial(op)"),
    "placements a string": (lambda: distribute_tensor(VALUE, LINE, "S(0)"), LayoutError, "placements = 'S(0)' (str): expected a sequence of placements"),
    "average of ints": (lambda: distribute_tensor(torch.arange(4), LINE, [Partial("avg")]), LayoutError, "placements[0] = Partial(avg): an average of torch.int64 is not a torch.int64; use a float dtype"),
    "bitwise of floats": (lambda: distribute_tensor(VALUE, LINE, [Partial("bxor")]), LayoutError, "placements[0] = Partial(bxor): bitwise reductions need an integer or bool dtype, got torch.float64"),
    "max of complex": (lambda: distribute_tensor(torch.zeros(3, dtype=torch.complex64), LINE, [Partial("max")]), LayoutError, "placements[0] = Partial(max): torch.complex64 has no order; use a real dtype"),
    "mixed reductions": (lambda: distribute_tensor(VALUE, MESH, [Partial("max"), Partial("sum")]), LayoutError, "these reductions do not commute"),
    "distributed already": (lambda: distribute_tensor(distribute_tensor(VALUE, LINE), LINE, [Shard(0)]), LayoutError, "to a different placements [Shard(dim=0)]; use tensor.redistribute(placements=[Shard(dim=0)])"),
    "distribute a RankTensor": (lambda: distribute_tensor(local(1, 1, 1), LINE), LayoutError, "use DTensor.from_local(x, mesh, placements)"),
    "sparse tensor": (lambda: distribute_tensor(torch.eye(3).to_sparse(), LINE, [Shard(0)]), LayoutError, "layout: only torch.strided tensors can be distributed, got torch.sparse_coo"),
    "src_data_rank": (lambda: distribute_tensor(VALUE, LINE, [Shard(0)], src_data_rank=7), LayoutError, "src_data_rank=7 is not a coordinate of mesh axis 0 of 3 ranks"),
    # from_local
    "local not a tensor": (lambda: DTensor.from_local(3, LINE), LayoutError, "the local_tensor argument only accepts torch.Tensor but got <class 'int'> value"),
    "local distributed": (lambda: DTensor.from_local(distribute_tensor(VALUE, LINE), LINE), LayoutError, "the local_tensor argument only accepts torch.Tensor but got <class 'shardwise.tensor.DTensor'> value"),
    "from_local placements": (lambda: DTensor.from_local(VALUE, MESH, [Shard(0)]), LayoutError, "placements: 1 given"),
    "from_local dim": (lambda: DTensor.from_local(VALUE, LINE, [Shard(2)]), LayoutError, "placements[0] = Shard(dim=2): dim 2 is out of range"),
    "from_local shape": (lambda: DTensor.from_local(local(2, 2, 2), LINE, [Shard(0)], shape=(7, 4)), LayoutError, "shape=(7, 4): under [Shard(dim=0)] the rank at (0,) holds (3, 4), but its local tensor is (2, 4)"),
    "from_local shape dims": (lambda: DTensor.from_local(local(2, 2, 2), LINE, [Shard(0)], shape=(6,)), LayoutError, "shape=(6,): 1 dims given for local tensors of 2 dims (2, 4)"),
    "from_local stride": (lambda: DTensor.from_local(local(2, 2, 2), LINE, [Shard(0)], shape=(6, 4), stride=(4,)), LayoutError, "stride = (4,): 1 strides for a shape of 2 dims (6, 4)"),
    "from_local stride alone": (lambda: DTensor.from_local(local(2, 2, 2), LINE, [Shard(0)], stride=(4, 1)), LayoutError, "Found shape:None, stride:(4, 1). Please pass both shape and stride at the same time"),
    "ranks disagree in size": (lambda: DTensor.from_local(RankTensor([torch.ones(2, n) for n in (3, 3, 4)]), LINE, [Shard(0)]), LayoutError, "ranks that must agree hold different sizes of dim 1: 3 and 4 at coordinates (2,)"),
    "ranks disagree in dims": (lambda: DTensor.from_local(RankTensor([torch.ones(2), torch.ones(2), torch.ones(2, 1)]), LINE, [Shard(0)]), LayoutError, "the ranks differ in dims: (2,) and, at (2,), (2, 1)"),
    "ranks disagree in dtype": (lambda: DTensor.from_local(RankTensor([torch.ones(2), torch.ones(2), torch.ones(2).double()]), LINE, [Shard(0)], run_check=True), LayoutError, "dtype"),
    "replicas disagree in size": (lambda: DTensor.from_local(local(2, 2, 3), LINE, [R], run_check=True), LayoutError, "hold different sizes of dim 0"),
    "wrong number of ranks": (lambda: DTensor.from_local(local(2, 2), LINE, [Shard(0)]), MeshError, "a RankTensor of 2 ranks on a simulated mesh of 3"),
    "from_local bitwise": (lambda: DTensor.from_local(VALUE, LINE, [Partial("bor")]), LayoutError, "bitwise reductions need an integer or bool dtype"),
    "grad_placements": (lambda: DTensor.from_local(VALUE.clone().requires_grad_(), LINE, [R], grad_placements=[R, R]), LayoutError, "Found placements length: 2, and device_mesh.ndim: "),
    # moves
    "redistribute placements": (lambda: distribute_tensor(VALUE, MESH).redistribute(placements=[R]), LayoutError, "Found placements length: 1, and device_mesh.ndim: "),
    "redistribute dim": (lambda: distribute_tensor(VALUE, LINE).redistribute(placements=[Shard(4)]), LayoutError, "placements[0] = Shard(dim=4): dim 4 is out of range"),
    "redistribute mesh": (lambda: distribute_tensor(VALUE, LINE).redistribute(MESH), MoveError, "without placements; give one for each of its axes"),
    "redistribute across": (lambda: distribute_tensor(VALUE, LINE).redistribute(MESH, [R]), LayoutError, "Found placements length: 1, and device_mesh.ndim: "),
    "redistribute ints to avg": (lambda: distribute_tensor(torch.arange(4), LINE).redistribute(placements=[Partial("avg")]), ShardwiseError, "Partial(avg)"),
    # factories
    "made of no spec": (lambda: shardwise.DTensor(torch.ones(2), None), LayoutError, "DTensor: spec must be the _spec of a DTensor, got None; or use DTensor.from_local"),
    "factory partial": (lambda: shardwise.ones(3, device_mesh=LINE, placements=[Partial()]), LayoutError, "placements: this factory makes whole values, not parts; got [Partial(sum)]"),
    "factory partial dtype": (lambda: shardwise.empty(3, dtype=torch.int64, device_mesh=LINE, placements=[Partial("avg")]), LayoutError, "an average of torch.int64"),
    "factory size": (lambda: shardwise.ones(3, -1, device_mesh=LINE), LayoutError, "size: must be ints >= 0, got (3, -1)"),
    "factory size type": (lambda: shardwise.rand(2.5, device_mesh=LINE), LayoutError, "size: must be ints >= 0, got (2.5,)"),
    "factory layout": (lambda: shardwise.zeros(3, layout=torch.sparse_coo, device_mesh=LINE), LayoutError, "layout: only torch.strided tensors can be distributed, got torch.sparse_coo"),
    "factory mesh": (lambda: shardwise.randn(3), MeshError, "No device mesh is currently active"),
    "factory dim": (lambda: shardwise.full((3,), 1.0, device_mesh=LINE, placements=[Shard(1)]), LayoutError, "placements[0] = Shard(dim=1): dim 1 is out of range"),
    # placements and meshes
    "unknown reduction": (lambda: Partial("mean"), LayoutError, "reduce_op must be one of sum, avg, product, max, min, band, bor, bxor, got 'mean'"),
    "shard dim type": (lambda: Shard("0"), LayoutError, "Shard: dim must be an int, got '0' (str)"),
    "negative size": (lambda: Shard(0, sizes=(2, -1)), LayoutError, "sizes must be ints >= 0, got -1 in (2, -1)"),
    "mesh shape": (lambda: simulate((2, 0)), MeshError, "shape must be one or more ints > 0, got (2, 0)"),
    "mesh names": (lambda: simulate((2, 2), axis_names=("a",)), MeshError, "must name each of the 2 axes of (2, 2) once"),
    "mesh same names": (lambda: simulate((2, 2), axis_names=("a", "a")), MeshError, "must name each of the 2 axes of (2, 2) once"),
    "unknown axis": (lambda: MESH["c"], MeshError, "mesh axis 'c' is not one of ('a', 'b')"),
    "module mesh": (lambda: distribute_module(torch.nn.Linear(2, 2), "cpu"), MeshError, "device_mesh: expected a DeviceMesh"),
    "plan of a class": (lambda: parallelize_module(torch.nn.Linear(2, 2), LINE, {"": ColwiseParallel}), PlanError, "It is at parallelize_plan[''] = <class 'shardwise.parallel.styles.layers.ColwiseParallel'>; give an instance: ColwiseParallel()"),
    "plan of words": (lambda: parallelize_module(torch.nn.Linear(2, 2), LINE, {"": "colwise"}), PlanError, "It is at parallelize_plan[''] = 'colwise'; give a style, as ColwiseParallel()"),
    "module type": (lambda: distribute_module(VALUE, LINE), ShardwiseError, "distribute_module: module must be a torch.nn.Module, got Tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_message(name):
    make, kind, text = CASES[name]
    with pytest.raises(kind, match=re.escape(text)) as caught:
        make()
    assert isinstance(caught.value, ShardwiseError) and isinstance(caught.value, (ValueError, RuntimeError))


OF_TYPES = {
    "module function": (lambda: distribute_module(torch.nn.Linear(2, 2), LINE, 3), "distribute_module: partition_fn: expected Callable, got 3 (int); give a function of (name, submodule, mesh)"),
    "module input": (lambda: distribute_module(torch.nn.Linear(2, 2), LINE, input_fn="a"), "distribute_module: input_fn: expected Callable, got 'a' (str); give a function of (module, values, mesh)"),
    "save nowhere": (lambda: checkpoint.save(None, {"x": VALUE}), "save: path: expected str or PathLike, got None (NoneType); give a folder"),
    "load from nowhere": (lambda: checkpoint.load(None, {"x": VALUE}), "load: path: expected str or PathLike, got None (NoneType); give a folder or a file"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_TYPES)
def test_message_about_a_type(name):
    make, text = OF_TYPES[name]
    with pytest.raises(TypeError, match=re.escape(text)):
        make()


def test_a_failed_call_changes_nothing():
    leaf = distribute_tensor(VALUE, LINE, [Shard(0)]).requires_grad_()
    (leaf * 2).sum().backward()
    grad = leaf.grad
    other = distribute_tensor(x(3, 2), MESH)
    for attempt in (
        lambda: leaf.redistribute(placements=[Shard(7)]),
        lambda: leaf.__setattr__("grad", distribute_tensor(x(3, 2), LINE)),
        lambda: leaf.__setattr__("data", other),
        lambda: leaf.__setattr__("data", VALUE),
        lambda: leaf.copy_(x(7, 7)),
        lambda: leaf.add_(1),
        lambda: leaf + other,
        lambda: leaf.register_hook(lambda g: g).remove() or leaf.backward(),
        lambda: leaf.to_local(grad_placements=[R, R]),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            attempt()
        assert leaf.shape == (5, 4) and leaf.placements == (Shard(0),) and leaf.grad is grad and leaf.requires_grad
        same(leaf, VALUE)
        same(leaf * 2, VALUE * 2)


def test_a_failed_distribute_leaves_the_module():
    module = torch.nn.Linear(3, 2)

    def partition(name, sub, mesh):
        raise ValueError("mine")

    before = dict(module.named_parameters())
    with pytest.raises(ValueError, match="mine"):
        distribute_module(module, LINE, partition)
    assert all(before[n] is p for n, p in module.named_parameters())


def uneven_shapes_are_seen_everywhere(rank, world_size):
    """Every rank raises the same error, so that none of them waits for the others."""
    mesh = device_mesh((world_size,))
    with pytest.raises(LayoutError, match="ranks that must agree hold different sizes of dim 1"):
        DTensor.from_local(torch.ones(2, 3 + (rank == 1)), mesh, [Shard(0)])
    with pytest.raises(LayoutError, match="the ranks differ in dims"):
        DTensor.from_local(torch.ones((2,) * (1 + rank % 2)), mesh, [Shard(0)])
    with pytest.raises(LayoutError, match="src_data_rank=9 is not a coordinate of mesh axis 0"):
        distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=9)
    made = DTensor.from_local(torch.full((2,), float(rank)), mesh, [Replicate()], run_check=True)
    assert made.to_local().tolist() == [0.0, 0.0]
    return DTensor.from_local(torch.ones(rank, 2), mesh, [Shard(0)]).shape


def test_uneven_shapes_on_processes():
    assert run_ranks(uneven_shapes_are_seen_everywhere, 4) == [(6, 2)] * 4


def the_source_wins(rank, world_size, shape):
    """Different values on every rank: those of the source coordinate are laid out, everywhere."""
    mesh = device_mesh(shape)
    mine = torch.full((5, 3), float(rank)) + torch.arange(15).view(5, 3) / 100
    for source in range(min(shape)):
        owner = int(mesh.mesh[(source,) * mesh.ndim])
        want = mine - rank + owner
        for first in (Replicate(), Shard(0), Shard(1), Partial(), Shard(0, sizes=(5,) + (0,) * (shape[0] - 1))):
            places = [first] + [Shard(1)] * (mesh.ndim - 1)
            made = distribute_tensor(mine, mesh, places, src_data_rank=source)
            torch.testing.assert_close(made.full_tensor(), want, msg=f"{places} source {source}")
    trusted = distribute_tensor(mine, mesh, src_data_rank=None)
    torch.testing.assert_close(trusted.to_local(), mine)
    module = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(module.weight, float(rank))
    shardwise.distribute_module(module, mesh)
    torch.testing.assert_close(module.weight.full_tensor(), torch.zeros(2, 3))


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_the_source_wins(shape):
    run_ranks(the_source_wins, 2 if shape == (2,) else 4, shape)


def not_in_the_mesh(rank, world_size):
    mesh = DeviceMesh("cpu", [0, 1])
    assert distribute_tensor(torch.ones(4), mesh, [Shard(0)]).to_local().tolist() == ([1.0, 1.0] if rank < 2 else [])
    module = parallelize_module(torch.nn.Linear(2, 2), mesh, ColwiseParallel())
    assert module.weight.shape == (2, 2) and module.weight.to_local().numel() == (2 if rank < 2 else 0)


def test_a_rank_outside_of_the_mesh():
    run_ranks(not_in_the_mesh, 4)
