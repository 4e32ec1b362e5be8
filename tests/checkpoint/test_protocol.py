"""torch.distributed.checkpoint saves one layout and loads into another."""

import ast
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as theirs
from torch.distributed.checkpoint.metadata import MetadataIndex

import shardwise
from shardwise import (
    DTensor,
    LayoutError,
    Partial,
    RankTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    simulate,
)
from tests.workers import device_mesh, run_ranks

# A single process is what we want here, not a mistake.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

R = Replicate()
SHAPE = (7, 10)
PIECES = Shard(0, pieces=((((0, 2), (4, 6)), ((2, 4), (6, 7))),))  # two pieces on each of two ranks

# mesh shape, placements
LAYOUTS = {
    "rows": ((4,), [Shard(0)]),
    "columns with an empty rank": ((4,), [Shard(1, sizes=(3, 0, 6, 1))]),
    "replicated": ((2, 2), [R, R]),
    "blocks": ((2, 2), [Shard(0), Shard(1)]),
    "rows twice": ((2, 2), [Shard(0), Shard(0)]),
    "pieces by columns": ((2, 2), [PIECES, Shard(1)]),
    "replicated pieces": ((2, 2), [R, PIECES]),
}


def value(shape=SHAPE):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def state(mesh_of):
    """Every layout in one state dict, and a scalar, a tensor without elements and a plain tensor."""
    tensors = {name: distribute_tensor(value(), mesh_of(shape), places) for name, (shape, places) in LAYOUTS.items()}
    tensors["scalar"] = distribute_tensor(torch.tensor(3.0), mesh_of((4,)), [R])
    tensors["empty"] = distribute_tensor(torch.zeros(0, 3), mesh_of((4,)), [Shard(1)])
    tensors["plain"] = value((2,))
    return tensors


def targets(mesh_of, shift):
    """Zeros, each name laid out as the name `shift` places further."""
    names = list(LAYOUTS)
    found = {}
    for name, other in zip(names, itertools.islice(itertools.cycle(names), shift, None), strict=False):
        shape, places = LAYOUTS[other]
        found[name] = distribute_tensor(torch.zeros(SHAPE), mesh_of(shape), places)
    found["scalar"] = distribute_tensor(torch.tensor(0.0), mesh_of((2, 2)), [R, R])
    found["empty"] = distribute_tensor(torch.zeros(0, 3), mesh_of((4,)), [Shard(0)])
    found["plain"] = torch.zeros(2)
    return found


def check(loaded):
    for name, tensor in loaded.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        want = {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 3), "plain": value((2,))}.get(name, value())
        torch.testing.assert_close(whole, want, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


# -- simulated: all ranks' tiles from one process ----------------------------------------------------------
@pytest.mark.parametrize("shift", range(len(LAYOUTS)))
def test_simulated(tmp_path, shift):
    dcp.save(state(simulate), checkpoint_id=tmp_path, no_dist=True)
    loaded = targets(simulate, shift)
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    check(loaded)


def test_replicas_that_share_no_tensor_are_all_loaded(tmp_path):
    saved = {"x": distribute_tensor(value(), simulate(4), [Shard(0)])}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    own = RankTensor([torch.zeros(n, 10) for n in (4, 3, 4, 3)])
    x = DTensor.from_local(own, simulate((2, 2)), [R, PIECES], shape=SHAPE)
    dcp.load({"x": x}, checkpoint_id=tmp_path, no_dist=True)
    for rank, local in enumerate(x.to_local().ranks):
        rows = [[0, 1, 4, 5], [2, 3, 6]][rank % 2]
        assert torch.equal(local, value()[rows])


# -- gloo --------------------------------------------------------------------------------------------------
def save_on_gloo(rank, world_size, path):
    metadata = dcp.save(state(device_mesh), checkpoint_id=path)
    return {name: len(md.chunks) for name, md in metadata.state_dict_metadata.items()} if rank == 0 else None


def load_on_gloo(rank, world_size, path, shift):
    loaded = targets(device_mesh, shift)
    dcp.load(loaded, checkpoint_id=path)
    check(loaded)


def test_gloo(tmp_path):
    chunks = run_ranks(save_on_gloo, 4, str(tmp_path))[0]
    assert chunks["replicated"] == 1  # written once
    assert chunks["rows"] == 4
    assert chunks["columns with an empty rank"] == 3
    assert chunks["pieces by columns"] == 8
    assert chunks["replicated pieces"] == 4
    for shift in range(len(LAYOUTS)):
        run_ranks(load_on_gloo, 4, str(tmp_path), shift)


def test_gloo_to_simulated_and_back(tmp_path):
    run_ranks(save_on_gloo, 4, str(tmp_path / "gloo"))
    loaded = targets(simulate, 2)
    dcp.load(loaded, checkpoint_id=tmp_path / "gloo", no_dist=True)
    check(loaded)
    dcp.save(state(simulate), checkpoint_id=tmp_path / "simulated", no_dist=True)
    run_ranks(load_on_gloo, 4, str(tmp_path / "simulated"), 3)


def with_torchs_dtensor(rank, world_size, path):
    """Ours loads what torch's saved, and the other way round."""
    mesh = device_mesh((2, 2))
    torchs = theirs.distribute_tensor(value(), mesh, [theirs.Shard(1), theirs.Shard(0)])
    dcp.save({"x": torchs}, checkpoint_id=f"{path}/theirs")
    mine = distribute_tensor(torch.zeros(SHAPE), mesh, [PIECES, Shard(1)])
    dcp.load({"x": mine}, checkpoint_id=f"{path}/theirs")
    assert torch.equal(mine.full_tensor(), value())
    dcp.save({"x": mine}, checkpoint_id=f"{path}/ours")
    torchs = theirs.distribute_tensor(torch.zeros(SHAPE), mesh, [theirs.Shard(0), theirs.Replicate()])
    dcp.load({"x": torchs}, checkpoint_id=f"{path}/ours")
    assert torch.equal(torchs.full_tensor(), value())


def test_torchs_dtensor(tmp_path):
    run_ranks(with_torchs_dtensor, 4, str(tmp_path))


# -- a training run ----------------------------------------------------------------------------------------
def trained(mesh, dims, steps):
    """A model with its weights cut along `dims` (by layer), and its optimizer, after some steps."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))

    def cut(name, module, mesh):
        if name in dims:
            module.weight = torch.nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(dims[name])]))

    distribute_module(model, mesh, cut)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for i in range(steps):
        step(model, optimizer, mesh, i)
    return model, optimizer


def step(model, optimizer, mesh, i):
    x = distribute_tensor(torch.sin(torch.arange(24.0) + i).view(4, 6), mesh, [R])
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def resume(rank, world_size, path):
    """Two steps, saved and loaded into another layout, then a third: as three steps at a stretch."""
    mesh = device_mesh((4,)) if world_size > 1 else simulate(4)
    model, optimizer = trained(mesh, {"0": 0, "2": 1}, 2)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    step(model, optimizer, mesh, 2)
    other, its_optimizer = trained(mesh, {"0": 1}, 1)
    loaded = {"model": other.state_dict(), "optimizer": its_optimizer.state_dict()}
    dcp.load(loaded, checkpoint_id=path)
    other.load_state_dict(loaded["model"])
    its_optimizer.load_state_dict(loaded["optimizer"])
    step(other, its_optimizer, mesh, 2)
    for want, got in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), want.full_tensor())


def test_resume_simulated(tmp_path):
    resume(0, 1, str(tmp_path))


def test_resume_on_gloo(tmp_path):
    run_ranks(resume, 4, str(tmp_path))


# -- bad input ---------------------------------------------------------------------------------------------
def test_partial_is_refused(tmp_path):
    x = distribute_tensor(value(), simulate(4), [Partial()])
    with pytest.raises(LayoutError, match=r"saving 'x'.*Partial\(sum\).*redistribute it to Replicate"):
        x.__create_write_items__("x", x)
    with pytest.raises(LayoutError, match="loading into a tensor"):
        x.__create_chunk_list__()


def test_a_box_that_is_not_here():
    x = distribute_tensor(value(), simulate(2), [Shard(0)])
    with pytest.raises(LayoutError, match=r"'x': no box at \(1, 0\).*\(0, 0\), \(4, 0\)"):
        x.__get_tensor_shard__(MetadataIndex("x", (1, 0)))
    with pytest.raises(LayoutError, match="has no offset"):
        x.__get_tensor_shard__(MetadataIndex("x"))


def test_a_shard_is_a_view():
    x = distribute_tensor(value(), simulate((2, 2)), [PIECES, Shard(1)]).requires_grad_()
    shard = x.__get_tensor_shard__(MetadataIndex("x", (4, 5)))
    assert torch.equal(shard, value()[4:6, 5:])
    shard.zero_()
    assert x.full_tensor()[4:6, 5:].sum() == 0
    assert not shard.requires_grad


def imported_by(path):
    """The modules of shardwise that a file imports at its top, not those for types only."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardwise"):
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_nothing_that_the_tensor_imports_imports_the_tensor():
    root = Path(shardwise.__file__).parent
    found, left = set(), ["shardwise.tensor"]
    while left:
        name = left.pop()
        inside = root.joinpath(*name.split(".")[1:])
        for path in (inside.with_suffix(".py"), inside / "__init__.py"):
            if path.exists() and path != root / "__init__.py":
                names = set(imported_by(path))
                assert "shardwise.tensor" not in names, f"{path} imports shardwise.tensor, which imports it"
                packages = {n.rpartition(".")[0] for n in names}  # importing a module runs its package
                left += (names | packages) - found
                found |= names | packages
    assert "shardwise.checkpoint_protocol" in found and "shardwise.checkpoint" not in found
