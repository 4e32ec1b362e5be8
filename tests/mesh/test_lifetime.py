"""One mesh for each DeviceMesh and its process groups; a mesh lives as long as somebody uses it."""

import copy
import gc
import io
import pickle
import tracemalloc
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise import Partial, Replicate, Shard, clear_caches, distribute_tensor, init_device_mesh, simulate
from shardwise.mesh import as_mesh
from tests.forked import run_forked
from tests.workers import run_ranks


def use(mesh):
    """A little of everything that caches plans and layouts."""
    x = nn.Parameter(distribute_tensor(torch.arange(30.0).view(6, 5), mesh, [Shard(0)] * mesh.ndim))
    y = (x @ x.T).softmax(0).sum()
    y.backward()
    optimizer = torch.optim.AdamW([x])
    optimizer.step()
    x.detach().redistribute(placements=[Replicate()] * mesh.ndim).redistribute(placements=[Partial()] * mesh.ndim)
    shardwise.randn(4, 3, device_mesh=mesh, placements=[Shard(1)] * mesh.ndim).sort(0)
    image = distribute_tensor(torch.ones(1, 1, 12, 4), mesh, [Shard(2)] * mesh.ndim)
    torch.nn.functional.conv2d(image, torch.ones(1, 1, 3, 3), padding=1)
    return x


def test_equal_simulated_meshes_are_one_while_used():
    first = simulate((2, 3), first_rank=7)
    assert simulate((2, 3), first_rank=7) is first
    assert as_mesh(first) is as_mesh(first) is as_mesh(pickle.loads(pickle.dumps(first)))
    sub = simulate((2, 3), axis_names=("a", "b"), first_rank=7)["b"]
    gc.collect()
    assert simulate((2, 3), axis_names=("a", "b"), first_rank=7)["b"] is sub  # the world lives with its sub-mesh


def test_a_tensor_keeps_its_mesh():
    x = distribute_tensor(torch.ones(6), simulate(3, first_rank=70), [Shard(0)])
    clear_caches(), gc.collect(), gc.collect()
    assert x.device_mesh is simulate(3, first_rank=70)
    assert (x + distribute_tensor(torch.ones(6), simulate(3, first_rank=70), [Shard(0)])).sum().item() == 12


def test_unused_simulated_meshes_are_freed():
    def made(i):
        mesh = simulate((2, 2), axis_names=("a", "b"), first_rank=100 + 4 * i)
        use(mesh), use(mesh["b"])
        return [weakref.ref(x) for x in (mesh, mesh["b"], as_mesh(mesh), as_mesh(mesh["b"]))]

    before = {name: info.currsize for name, info in shardwise.cache_info().items()}
    refs = [ref for i in range(3) for ref in made(i)]
    assert shardwise.cache_info()["plans"].currsize > before["plans"]
    gc.collect(), gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
    assert all(info.currsize <= before[name] for name, info in shardwise.cache_info().items())


def test_memory_of_300_meshes_is_flat():
    def grow(first, count):
        for i in range(first, first + count):
            mesh = simulate(3, first_rank=1000 + 3 * i)
            x = nn.Parameter(distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)]))
            (x * x.redistribute(placements=[Replicate()])).sum().backward()
            if i % 50 == 49:
                gc.collect(), gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        grow(0, 50)
        before = grow(50, 50)
        after = grow(100, 200)
    finally:
        tracemalloc.stop()
    assert after - before < 100_000, f"{after - before} bytes more after 200 meshes"  # was 40 KiB for each of them


def _unused(rank, world_size):
    groups = [dist.new_group(range(world_size)) for _ in range(3)]
    refs = []
    for group in groups:
        mesh = DeviceMesh.from_group(group, "cpu")
        use(mesh)
        refs += [weakref.ref(mesh), weakref.ref(as_mesh(mesh))]
        del mesh
    gc.collect(), gc.collect()
    left = [ref() for ref in refs]
    for group in groups:
        dist.destroy_process_group(group)
    return left


def test_unused_device_meshes_are_freed():
    assert run_ranks(_unused, 2) == [[None] * 6] * 2


def _by_groups(rank, world_size):
    one, other = (DeviceMesh.from_group(dist.new_group(range(world_size)), "cpu") for _ in range(2))
    again = DeviceMesh.from_group(one.get_group(), "cpu")
    assert one == other == again  # torch compares the ranks only
    loaded = pickle.loads(pickle.dumps(one))
    meshes = [as_mesh(m) for m in (one, other, again, copy.copy(one), copy.deepcopy(one), loaded)]
    assert [m is meshes[0] for m in meshes] == [True, False, True, True, True, True]
    assert meshes[1].comm.group(0) is other.get_group() and meshes[0].comm.group(0) is one.get_group()
    x = distribute_tensor(torch.arange(6.0), one, [Shard(0)])
    moved = x.redistribute(other, [Shard(0)])
    assert moved.device_mesh is other
    assert torch.equal((moved + moved).full_tensor(), 2 * torch.arange(6.0))
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    assert torch.equal((torch.load(buffer) + x).full_tensor(), 2 * torch.arange(6.0))
    return True


def test_other_groups_are_another_mesh():
    assert run_ranks(_by_groups, 2) == [True] * 2


def _sliced(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert as_mesh(mesh["tp"]) is as_mesh(mesh["tp"])
    assert as_mesh(mesh["tp"]) is not as_mesh(mesh["dp"])
    x = distribute_tensor(torch.arange(6.0), mesh["tp"], [Shard(0)])
    y = distribute_tensor(torch.arange(6.0), mesh["tp"], [Replicate()])
    return (x + y).full_tensor().tolist()


def test_a_slice_is_one_mesh():
    assert run_ranks(_sliced, 4) == [[2.0 * i for i in range(6)]] * 4


AGAIN = """
import gc, sys
import torch, torch.distributed as dist
import shardwise
from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.mesh import as_mesh

rank, kept, made = int(sys.argv[1]), [], []
for turn in range(4):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}{turn}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    if turn % 2:
        kept.append(mesh)  # one that outlives its groups, equal to the next
    one = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    made.append(as_mesh(mesh))
    kept.append(one)
    for _ in range(3):
        gc.collect()
        other = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (2,)), [Replicate()])
        assert as_mesh(mesh) is made[-1] and other._layout.mesh.is_alike(made[-1])
        assert torch.equal((one + other).full_tensor(), 2 * torch.arange(6.0))
        if len(kept) > 2:
            del kept[0]  # the mesh of a world that is gone dies: nothing of this one may go with it
    del mesh, one, other
    gc.collect()
    dist.destroy_process_group()
assert len(set(made)) == 4
del made, kept
shardwise.clear_caches()
gc.collect()
from shardwise.mesh import _meshes
assert not len(_meshes), list(_meshes.items())
print("fine")
"""


def test_a_world_made_anew(tmp_path):
    ranks = run_forked(AGAIN, [(rank, tmp_path / "store") for rank in range(2)])
    assert [rank.said for rank in ranks] == ["fine\n"] * 2, "\n".join(rank.noise for rank in ranks)


def test_caches_are_bounded():
    mesh = simulate(2, first_rank=900)
    for i in range(40):
        x = distribute_tensor(torch.ones(i + 1, 2), mesh, [Shard(0)])
        (x * 2).redistribute(placements=[Shard(1)])
    plans = as_mesh(mesh).plans
    assert 40 <= len(plans) <= plans.maxsize
    plans.maxsize = 60
    for i in range(40):
        distribute_tensor(torch.ones(i + 1, 3), mesh, [Shard(0)]) * 2
    assert len(plans) <= 60
    shardwise.clear_caches()
    assert not plans and shardwise.cache_info()["moves"].currsize == 0


def test_no_step_keeps_anything():
    """Objects that the collector knows, after some hundred steps with another learning rate each."""
    mesh = simulate((2, 2), first_rank=910)
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()]))
    optimizer = torch.optim.AdamW([weight])

    def steps(count):
        for i in range(count):
            optimizer.param_groups[0]["lr"] = 1e-3 / (i + 1)
            optimizer.zero_grad()
            (weight @ weight.redistribute(placements=[Replicate(), Shard(1)]).T).sum().backward()
            optimizer.step()
        gc.collect()
        return len(gc.get_objects()), {name: info.currsize for name, info in shardwise.cache_info().items()}

    steps(5)
    before, caches = steps(10)
    after, same = steps(100)
    assert abs(after - before) < 50 and same == caches, (after - before, caches, same)


def test_an_all_to_all_of_many_ranks_is_linear_work():
    """Elements that are put and taken when 1,024 ranks exchange, against 256: by what is copied, not by the clock."""
    counts = {}
    for ranks in (256, 1024):
        x = distribute_tensor(torch.ones(ranks, ranks), simulate(ranks), [Shard(0)])
        with Copies() as copies:
            x.redistribute(placements=[Shard(1)])
        with Copies() as warm:
            x.redistribute(placements=[Shard(1)])
        counts[ranks] = copies.calls, warm.calls
    for few, many in zip(counts[256], counts[1024], strict=True):
        assert many <= 4.5 * few, counts


class Copies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_planning_an_op_that_keeps_its_result_leaves_nothing_behind():
    """torch is asked once for each plan what it keeps for the gradient: a result among that must not hold itself."""

    def alive():
        gc.collect()
        return sum(type(x).__name__ == "SoftmaxBackward0" for x in gc.get_objects())

    mesh, before = simulate(2), alive()
    for n in range(2, 12):
        distribute_tensor(torch.ones(n, n), mesh, [Shard(0)]).requires_grad_().softmax(0)
    assert alive() == before
