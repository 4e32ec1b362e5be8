"""What bad input says: the argument, its value, and what would be right."""

import pytest
import torch

from shardwise import DTensor, Partial, RankTensor, Replicate, Shard, distribute_tensor, plan_move, simulate, strict
from shardwise.errors import LayoutError, MeshError, MoveError, ShardwiseError, StrictError
from shardwise.layout import Layout, as_placements
from shardwise.mesh import as_mesh


def on(mesh_shape, placements, shape, **more):
    return Layout.make(as_mesh(simulate(mesh_shape)), placements, shape, torch.float32, **more)


def overlapping():
    return Shard(0, pieces=[[[(0, 2)], [(1, 3)]]])


BAD_LAYOUTS = {
    "too few placements": (
        lambda: on((2, 2), [Shard(0)], (4, 4)),
        "`placements` must have the same length as `device_mesh.ndim`! Found placements length: 1, and device_mesh.ndim: 2. "
        "Given were [Shard(dim=0)] for a mesh of shape (2, 2); give one for each axis, as [Shard(dim=0), Replicate()]",
    ),
    "too many placements": (
        lambda: on((2,), [Shard(0), Replicate()], (4, 4)),
        "`placements` must have the same length as `device_mesh.ndim`! Found placements length: 2, and device_mesh.ndim: 1. "
        "Given were [Shard(dim=0), Replicate()] for a mesh of shape (2,); give one for each axis, as [Shard(dim=0)]",
    ),
    "dim too large": (
        lambda: on((2, 2), [Replicate(), Shard(2)], (4, 4)),
        "placements[1] = Shard(dim=2): dim 2 is out of range for a tensor of shape (4, 4); use -2 to 1. "
        "Dimension out of range (expected to be in range of [-2, 1], but got 2)",
    ),
    "dim too small": (
        lambda: on((2,), [Shard(-3, sizes=(1, 3))], (4, 4)),
        "placements[0] = Shard(dim=-3, sizes=(1, 3)): dim -3 is out of range for a tensor of shape (4, 4); use -2 to 1. "
        "Dimension out of range (expected to be in range of [-2, 1], but got -3)",
    ),
    "no dims": (
        lambda: on((2,), [Shard(0)], ()),
        "placements[0] = Shard(dim=0): dim 0 is out of range for a tensor of shape (); it has no dim to shard. "
        "Dimension out of range (expected to be in range of [-1, 0], but got 0)",
    ),
    "sizes do not add up": (
        lambda: on((4,), [Shard(0, sizes=(1, 2, 3, 4))], (4, 4)),
        "placements[0] = Shard(dim=0, sizes=(1, 2, 3, 4)): the sizes (1, 2, 3, 4) add up to 10, but there are 4 "
        "indices of dim 0 of shape (4, 4) to deal out",
    ),
    "sizes do not add up to a nested part": (
        lambda: on((2, 2), [Shard(0), Shard(0, sizes=((1, 3), (1, 3)))], (7,)),
        "placements[1] = Shard(dim=0, sizes=((1, 3), (1, 3))): the sizes (1, 3) add up to 4, but there are 3 indices "
        "of dim 0 of shape (7,) to deal out",
    ),
    "wrong count of sizes": (
        lambda: on((4,), [Shard(0, sizes=(1, 3))], (4,)),
        "placements[0] = Shard(dim=0, sizes=(1, 3)): 2 sizes for a mesh axis of 4 ranks; give 4",
    ),
    "wrong count of rows": (
        lambda: on((2, 2), [Shard(0), Shard(0, sizes=((1, 3), (1, 3), (1, 3)))], (8,)),
        "placements[1] = Shard(dim=0, sizes=((1, 3), (1, 3), (1, 3))): 3 rows of sizes, but the axes before it cut "
        "dim 0 into 2 parts; give 2 rows, or one for all",
    ),
    "pieces overlap": (
        lambda: on((2,), [overlapping()], (4,)),
        f"placements[0] = {overlapping()!r}: the pieces overlap or leave holes; they must deal out each of the 4 "
        "indices [0, 4) of dim 0 of shape (4,) once",
    ),
    "reductions that do not commute": (
        lambda: on((2, 2), [Partial(), Partial("max")], (4,)),
        "placements[0] = Partial(sum), placements[1] = Partial(max): these reductions do not commute, so the value "
        "would depend on their order; reduce one first",
    ),
    "negative shape": (lambda: on((2,), [Shard(0)], (4, -1)), "shape = (4, -1): sizes must be ints >= 0"),
    "shape of floats": (lambda: on((2,), [Shard(0)], (4, 2.5)), "shape = (4, 2.5): sizes must be ints >= 0"),
    "stride of another shape": (
        lambda: on((2,), [Shard(0)], (4, 4), stride=(1,)),
        "stride = (1,): 1 strides for a shape of 2 dims (4, 4)",
    ),
}

BAD_PLACEMENTS = {
    "dim not an int": (lambda: Shard("0"), "Shard: dim must be an int, got '0' (str)"),
    "dim a bool": (lambda: Shard(True), "Shard: dim must be an int, got True (bool)"),
    "negative size": (lambda: Shard(0, sizes=(3, -1)), "Shard: sizes must be ints >= 0, got -1 in (3, -1)"),
    "fractional size": (lambda: Shard(0, sizes=[1.5]), "Shard: sizes must be ints >= 0, got 1.5 in (1.5,)"),
    "one size": (
        lambda: Shard(0, sizes=5),
        "Shard: sizes must be a sequence of ints, one per rank of the axis, got 5",
    ),
    "rows and sizes mixed": (
        lambda: Shard(0, sizes=((1, 2), 3)),
        "Shard: sizes must be ints, or one row of ints for each outer part, got 3 in ((1, 2), 3)",
    ),
    "sizes and pieces": (
        lambda: Shard(0, sizes=(1,), pieces=[[[(0, 1)]]]),
        "Shard: give sizes or pieces, not both",
    ),
    "flat pieces": (
        lambda: Shard(0, pieces=[(0, 1)]),
        "Shard: pieces must be rows of parts of (start, stop) intervals, as ((((0, 2), (4, 6)), ((2, 4),)),), "
        "got [(0, 1)]",
    ),
    "unknown reduction": (
        lambda: Partial("mean"),
        "Partial: reduce_op must be one of sum, avg, product, max, min, band, bor, bxor, got 'mean'",
    ),
    "not a placement": (
        lambda: as_placements([Replicate(), "S"]),
        "placements[1] = 'S' is not a placement; use Replicate(), Shard(dim) or Partial(op)",
    ),
    "a class": (
        lambda: as_placements([Replicate]),
        "placements[0] = <class 'shardwise.layout.placement.Replicate'> is not a placement; use Replicate(), "
        "Shard(dim) or Partial(op)",
    ),
    "not a sequence": (
        lambda: as_placements(0),
        "placements = 0 (int): expected a sequence of placements, one per mesh axis, as [Shard(0), Replicate()]",
    ),
    "a string": (
        lambda: as_placements("RS"),
        "placements = 'RS' (str): expected a sequence of placements, one per mesh axis, as [Shard(0), Replicate()]",
    ),
}


@pytest.mark.parametrize("case", BAD_LAYOUTS.values(), ids=list(BAD_LAYOUTS))
def test_layouts(case):
    fails_with(LayoutError, *case)


@pytest.mark.parametrize("case", BAD_PLACEMENTS.values(), ids=list(BAD_PLACEMENTS))
def test_placements(case):
    fails_with(LayoutError, *case)


def test_reductions_that_commute():
    assert on((2, 2), [Partial(), Partial("avg")], (4,)).is_partial
    assert on((2, 2), [Partial("max"), Partial("max")], (4,)).is_partial
    assert on((2, 1), [Partial("max"), Partial("sum")], (4,)).is_partial  # one rank reduces nothing


def fails_with(kind, make, text):
    with pytest.raises(kind) as caught:
        make()
    assert str(caught.value) == text
    assert isinstance(caught.value, ShardwiseError)


@pytest.mark.parametrize("index", [(4, 0), (-1, 0), (0,), (0, 0, 0), 3, (0.5, 0), "ab"])
def test_index(index):
    layout = on((2,), [Shard(0)], (4, 4))
    text = f"index {index!r} is outside of shape (4, 4); give 2 ints, 0 <= index[d] < shape[d]"
    fails_with(LayoutError, lambda: layout.holders(index), text)


def test_ranks_and_axes():
    layout = on((2, 2), [Shard(0), Replicate()], (4, 4))
    fails_with(MeshError, lambda: layout.tiles(4), "rank 4 is not in the mesh of ranks [0, 1, 2, 3]")
    fails_with(MeshError, lambda: layout.local_shape(-1), "rank -1 is not in the mesh of ranks [0, 1, 2, 3]")
    fails_with(MeshError, lambda: layout.mesh.axis("tp"), "axis 'tp' is not one of ('0', '1')")
    fails_with(MeshError, lambda: layout.mesh.axis(2), "axis 2 is out of range for a mesh of 2 axes (2, 2)")


def test_meshes():
    for shape in ((2, 0), (), "ab", True, (2.0,)):
        fails_with(
            MeshError, lambda s=shape: simulate(s), f"simulate: shape must be one or more ints > 0, got {shape!r}"
        )
    text = "simulate: axis_names ('x', 'x') must name each of the 2 axes of (2, 2) once; use strings"
    fails_with(MeshError, lambda: simulate((2, 2), axis_names=("x", "x")), text)
    text = "device_mesh: expected a DeviceMesh or simulate(...), got 3 (int)"
    fails_with(MeshError, lambda: as_mesh(3), text)
    text = "device_mesh: expected a DeviceMesh or simulate(...), got [Shard(dim=1)] (list); placements without a mesh are given by name: placements=[Shard(dim=1)]"
    x = distribute_tensor(torch.ones(4, 4), simulate(2), [Shard(0)])
    fails_with(MeshError, lambda: x.redistribute([Shard(1)]), text)
    text = (
        "No device mesh is currently active! Pass a device_mesh, or use `with mesh:`; a mesh is made by simulate((4,)) in one process, "
        "and by init_device_mesh('cpu', (4,)) under torchrun"
    )
    fails_with(MeshError, lambda: as_mesh(None), text)
    text = "mesh axis 'pp' is not one of ('dp', 'tp')"
    fails_with(MeshError, lambda: simulate((2, 2), axis_names=("dp", "tp"))["pp"], text)


def test_moves():
    here = on((2,), [Shard(0)], (4, 4))
    there = on((3,), [Shard(0)], (4, 5))
    text = f"a move keeps shape and dtype, but {here} and {there} differ"
    fails_with(MoveError, lambda: plan_move(here, there), text)
    wide = here.replace(dtype=torch.float64)
    fails_with(MoveError, lambda: plan_move(here, wide), f"a move keeps shape and dtype, but {here} and {wide} differ")
    text = "plan_move: dst_layout must be a Layout, got [Replicate()]; a DTensor's is its .layout"
    fails_with(MoveError, lambda: plan_move(here, [Replicate()]), text)
    x = distribute_tensor(torch.ones(4, 4), simulate(2), [Shard(0)])
    text = "plan_move: src_layout must be a Layout, got DTensor; a DTensor's is its .layout"
    fails_with(MoveError, lambda: plan_move(x, here), text)


def test_what_simulated_ranks_hold():
    """torch's error about shapes comes with a note that says whose they are."""
    part = distribute_tensor(torch.ones(4, 6), simulate(2), [Shard(0)]).to_local()
    with pytest.raises(RuntimeError, match="The size of tensor a") as error:
        part + torch.ones(4, 6)
    assert error.value.__notes__ == [
        "add: each simulated rank ran it on what it holds itself, a part or a copy; those of rank 0 have the shapes (2, 6), (4, 6). "
        "To compute with the whole, use the DTensor: a style of parallelize_module returns it with use_local_output=False"
    ]


def test_one_operand_under_strict():
    x = distribute_tensor(torch.ones(4, 6), simulate(2), [Shard(0)])
    with strict(), pytest.raises(StrictError, match=r"is laid out \[S\(0\)\] but must be \[R\]: on axis '0' the cheapest way"):
        torch.sort(x, dim=0)


def test_a_bad_call_leaves_its_tensor_alone():
    mesh = simulate(2)
    x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    for places in ([Shard(1)], [Shard(0), Shard(0)], ["S"], [Shard(0, sizes=(1, 1))]):
        with pytest.raises(LayoutError):
            x.redistribute(placements=places)
    assert x.placements == (Shard(0),)
    assert torch.equal(x.full_tensor(), torch.arange(6.0))


def test_reductions_a_dtype_cannot_do():
    mesh = simulate(2)
    text = "placements[0] = Partial(avg): an average of torch.int64 is not a torch.int64; use a float dtype"
    fails_with(LayoutError, lambda: distribute_tensor(torch.arange(3), mesh, [Partial("avg")]), text)
    fails_with(LayoutError, lambda: DTensor.from_local(torch.arange(3), mesh, [Partial("avg")]), text)
    whole = distribute_tensor(torch.arange(3), mesh)
    fails_with(LayoutError, lambda: whole.redistribute(placements=[Partial("avg")]), text)
    text = "placements[0] = Partial(band): bitwise reductions need an integer or bool dtype, got torch.float32"
    fails_with(LayoutError, lambda: distribute_tensor(torch.ones(3), mesh, [Partial("band")]), text)


def test_from_local():
    mesh = simulate((2, 2))
    two, three = torch.ones(2, 3), torch.ones(3, 3)

    def tall(placements, ranks, **more):
        return lambda: DTensor.from_local(RankTensor(ranks), mesh, placements, **more)

    text = "placements[0] = Shard(dim=2): dim 2 is out of range for a local tensor of 2 dims (2, 3). "
    text += "Dimension out of range (expected to be in range of [-2, 1], but got 2)"
    fails_with(LayoutError, tall([Shard(2), Replicate()], [two] * 4), text)
    text = "placements: 1 given [Shard(dim=0)] for a mesh of 2 axes (2, 2); give one per axis"
    fails_with(LayoutError, tall([Shard(0)], [two] * 4), text)
    with pytest.raises(LayoutError, match="ranks that must agree hold different sizes of dim 0: 2 and 3 at"):
        tall([Shard(0), Replicate()], [two, three, two, two])()
    with pytest.raises(LayoutError, match=r"the ranks differ in dims: \(2, 3\) and, at \(0, 1\), \(2,\)"):
        tall([Shard(0), Shard(0)], [two, torch.ones(2), two, two])()
    with pytest.raises(LayoutError, match=r"the ranks differ in dims: \(\) and, at \(0, 1\), \(2,\)"):
        DTensor.from_local(RankTensor([torch.ones(()), *[torch.ones(2)] * 3]), mesh, [Replicate()] * 2, run_check=True)
    text = "shape=(9, 3): under [Shard(dim=0), Replicate()] the rank at (0, 0) holds (5, 3), but its local tensor "
    text += "is (2, 3)"
    fails_with(LayoutError, tall([Shard(0), Replicate()], [two] * 4, shape=(9, 3)), text)
    text = "placements[0] = Shard(dim=0, sizes=(1, 3)): the ranks hold [2, 2] indices of dim 0"
    fails_with(LayoutError, tall([Shard(0, sizes=(1, 3)), Replicate()], [two] * 4), text)
    text = "placements[1] = Shard(dim=0, sizes=(2, 3)): the ranks hold [[2, 3], [3, 2]] indices of dim 0"
    fails_with(LayoutError, tall([Shard(0), Shard(0, sizes=(2, 3))], [two, three, three, two]), text)
    with pytest.raises(LayoutError, match=r"the rank at \(1, 0\) holds \(2, 3\), but its local tensor is \(3, 3\)"):
        tall([Shard(0), Replicate()], [two, two, three, three], shape=(4, 3), run_check=True)()
    with pytest.raises(LayoutError, match="local_tensor argument only accepts torch.Tensor but got <class 'list'> value"):
        DTensor.from_local([1.0], mesh)
    with pytest.raises(MeshError, match="a RankTensor of 3 ranks on a simulated mesh of 4"):
        tall([Shard(0), Replicate()], [two] * 3)()
