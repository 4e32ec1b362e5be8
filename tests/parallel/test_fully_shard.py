"""fully_shard, block by block and then the whole, equals one device: meshes, starts, policies and odd programs."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import DTensor, RankTensor, Replicate, Shard, distribute_tensor, materialize, simulate
from shardwise.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from shardwise.errors import AutogradError, LayoutError, MeshError
from shardwise.mesh import as_mesh
from shardwise.parallel import (
    ColwiseParallel,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    RowwiseParallel,
    data_parallel,
    fully_shard,
    parallelize_module,
)
from shardwise.parallel.data.states import Memory
from tests.parallel.data_net import Net, batch, build, equal, loss_of, one_device, run_checks
from tests.parallel.shard_net import MESHES, feed, loss_on, sharded, steps
from tests.tensor.common import same
from tests.workers import device_mesh, run_ranks


def is_whole(module):
    return any(group.memory.now is Memory.WHOLE for group in module._fully_sharded.unit.groups or ())


# -- meshes ------------------------------------------------------------------------------------------------
def trains(mesh):
    for typed in (False, True):
        model = sharded(build(), mesh)
        assert isinstance(model, FSDPModule) and isinstance(model, Net) and type(model).__name__ == "FSDPNet"
        equal(steps(model, mesh, typed), one_device(), f"{mesh} typed={typed}")
        parts = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        assert list(model.blocks[0].up.weight.placements) == parts
        assert model.last.weight is model.first.weight
        assert model.unused.weight.grad is None and model.blocks[1].up.weight.grad is None


@pytest.mark.parametrize(("shape", "names"), [*MESHES, ((1, 3), ("copies", "parts"))], ids=str)
def test_trains_simulated(shape, names):
    trains(simulate(shape, axis_names=names))


def _trains(rank, world_size):
    trains(device_mesh((world_size,), ("dp",)))
    trains(device_mesh((2, world_size // 2), ("copies", "parts")))


def test_trains_on_processes():
    run_ranks(_trains, 4)


def over_tensor_parallel(mesh):
    """On top of styles over mesh["tp"], with dims that both cut."""

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(x)))

    torch.manual_seed(0)
    want = nn.Sequential(nn.Linear(5, 6), Mlp(), Mlp(), nn.Linear(6, 3)).double()
    model = copy.deepcopy(want)
    for block in model[1:3]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    data = mesh["copies", "parts"] if "copies" in mesh.mesh_dim_names else mesh["parts"]
    for block in model[1:3]:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    assert model[1].up.weight._layout.mesh is as_mesh(mesh)
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=0.01)) for m in (want, model)]
    for step in range(3):
        x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for m, optimizer in pairs:
            optimizer.zero_grad()
            m(x if m is want else feed(x, data)).square().mean().backward()
            optimizer.step()
        for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
            same(p.grad, q.grad, f"gradient of {name}")
            same(p, q, name)


def test_over_tensor_parallel():
    over_tensor_parallel(simulate((2, 2, 2), axis_names=("copies", "parts", "tp")))
    over_tensor_parallel(simulate((4, 2), axis_names=("parts", "tp")))


def _over_tensor_parallel(rank, world_size):
    over_tensor_parallel(device_mesh((2, 2), ("parts", "tp")))
    over_tensor_parallel(device_mesh((2, 1, 2), ("copies", "parts", "tp")))


def test_over_tensor_parallel_on_processes():
    run_ranks(_over_tensor_parallel, 4)


def distributed_over_three_axes(mesh, ways=(("copies", "parts"), ("parts",), ("copies",), ("parts", "tp"), ())):
    """Blocks whose parameters are laid out over the whole mesh, and a batch that is too: cut over some of its axes."""
    for batch_axes in ways:
        model = build()
        where = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
        for block in model.blocks:
            for name, p in list(block.named_parameters()):
                owner, _, key = name.rpartition(".")
                value = distribute_tensor(p.detach(), mesh, [Replicate(), Replicate(), where.get(name, Replicate())])
                setattr(block.get_submodule(owner), key, nn.Parameter(value, p.requires_grad))
        sharded(model, mesh["copies", "parts"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            places = [Shard(0) if name in batch_axes else Replicate() for name in mesh.mesh_dim_names]
            optimizer.zero_grad()
            loss_of(model, *(distribute_tensor(v, mesh, places) for v in batch(step))).backward()
            optimizer.step()
        equal(model, one_device(), str(batch_axes))


def test_distributed_over_three_axes():
    distributed_over_three_axes(simulate((2, 2, 2), axis_names=("copies", "parts", "tp")))
    distributed_over_three_axes(simulate((3, 2, 1), axis_names=("copies", "parts", "tp")))


def _over_three_axes(rank, world_size):
    distributed_over_three_axes(device_mesh((2, 2, 1), ("copies", "parts", "tp")), [("copies", "parts")])
    distributed_over_three_axes(device_mesh((1, 2, 2), ("copies", "parts", "tp")), [("parts",)])


def test_distributed_over_three_axes_on_processes():
    run_ranks(_over_three_axes, 4)


# -- starts ------------------------------------------------------------------------------------------------
def on_meta(mesh):
    with torch.device("meta"):
        model = Net().double()
    model.blocks[1].up.weight.requires_grad_(False)
    sharded(model, mesh)
    assert model.first.weight.is_meta and isinstance(model.first.weight, DTensor)
    return model


def from_meta(mesh):
    values = build().state_dict()
    cut = {k: distribute_tensor(v.detach(), mesh, [Shard(0) if v.ndim else Replicate()]) for k, v in values.items()}

    def emptied(model):
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(cut[name])

    def loaded(model):
        model.to_empty(device="cpu")
        model.load_state_dict(cut)

    def assigned(model):
        model.load_state_dict(copy.deepcopy(cut), assign=True)  # the parameters are these from then on
        model.blocks[1].up.weight.requires_grad_(False)

    def materialized(model):
        found = {id(module): name for name, module in model.named_modules()}

        def init(module):
            for name, p in module.named_parameters(recurse=False):
                with torch.no_grad():
                    p.copy_(cut[f"{found[id(module)]}.{name}".lstrip(".")])

        materialize(model, init)

    def given(model):
        set_model_state_dict(model, dict(values), options=StateDictOptions(full_state_dict=True))

    def sent(model):
        has = not dist.is_initialized() or dist.get_rank() == 0
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, dict(values) if has else {}, options=options)

    for start in (emptied, loaded, assigned, materialized, given, sent):
        model = on_meta(mesh)
        with pytest.raises(
            LayoutError, match=r"FSDP parameters should be .* on meta device: \['.*'\].* shardwise.materialize\(model\)"
        ):
            model(feed(batch()[0], mesh))
        start(model)
        assert model.last.weight is model.first.weight, start.__name__
        equal(steps(model, mesh), one_device(), start.__name__)


def initialised(mesh):
    """reset_parameters() on the sharded parameters draws what it draws on one device laid out otherwise."""
    torch.manual_seed(5)
    drawn = []
    for way in (lambda m: m.to_empty(device="cpu"), None):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        torch.manual_seed(5)
        if way is None:
            materialize(model)
        else:
            way(model)
            for layer in model:
                layer.reset_parameters()
        drawn.append([p.full_tensor() for p in model.parameters()])
        model(feed(torch.ones(12, 5), mesh))
    for one, other in zip(*drawn, strict=True):
        torch.testing.assert_close(one, other)
        assert one.std() > 0


def test_materialize_after_data_parallel():
    mesh = simulate(3, axis_names=("dp",))
    for shard in ("none", "parameters"):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        data_parallel(model, mesh, shard, unit_bytes=0)
        with pytest.raises(LayoutError, match=r"data_parallel: parameters should be .* on meta device: \['weight', 'bias'\]"):
            model(RankTensor([torch.ones(2, 5)] * 3))
        torch.manual_seed(0)
        materialize(model)
        model(RankTensor([torch.ones(2, 5)] * 3)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


# -- policies ----------------------------------------------------------------------------------------------
def mixed_precision(mesh):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks, self.dtypes = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 4)]), []

        def forward(self, x):
            for block in self.blocks:
                self.dtypes.append((x.dtype, block.weight.dtype))
                x = block(x)
            return x

    half, x = torch.bfloat16, torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, output_dtype=torch.float32)
    want, model = Two(), sharded(Two(), mesh, mp_policy=policy)
    out = model(feed(x, mesh))
    assert out.dtype == torch.float32 and model.blocks[0].weight.dtype == torch.float32
    out.square().mean().backward()
    with torch.no_grad():
        expected = x
        for block in want.blocks:
            expected = F.linear(expected.to(half), block.weight.to(half), block.bias.to(half)).float()
    got = torch.cat(list(out.ranks)) if isinstance(out, RankTensor) else None
    if got is not None:
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    want(x).square().mean().backward()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        assert p.dtype == p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=0.05, atol=5e-3)
    policy = MixedPrecisionPolicy(param_dtype=half, cast_forward_inputs=False)
    with pytest.raises(RuntimeError, match=r"[dD]type"):
        sharded(Two(), mesh, mp_policy=policy)(feed(x, mesh))


def sums_that_wait(mesh):
    """Gradients that wait are added up in the dtype of the reduction, where small ones are not lost."""
    model = nn.Linear(1, 1, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    x = feed(torch.ones(mesh.size(), 1), mesh)
    for i in range(4):
        model.set_requires_gradient_sync(i == 3)
        (model(x) * (256 if i == 0 else 1)).sum().backward()
    assert model.weight.grad.full_tensor().item() == 256 + 3  # 256 + 1 is 256 in bfloat16


def gradient_sync(mesh):
    for typed in (False, True):
        want, model = build(), sharded(build(), mesh)
        for step in range(3):
            loss_of(want, *batch(step)).backward()
            model.set_requires_gradient_sync(step == 2)
            model.set_is_last_backward(step == 2)
            model.set_reshard_after_backward(step == 2)
            with shardwise.debug.ledger() as log:
                loss_on(model, mesh, step, typed).backward()
            if step < 2 and not typed:
                assert {entry.kind for entry in log} <= {"all_gather"}
                if mesh.size() > 1:
                    with pytest.raises(AutogradError, match="not reduced"):
                        torch.optim.SGD(model.parameters()).step()
        for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
            same(p.grad, q.grad, f"{name} {typed}")
    # only the blocks wait
    want, model = build(), sharded(build(), mesh)
    for step in range(2):
        loss_of(want, *batch(step)).backward()
        for block in model.blocks:
            block.set_requires_gradient_sync(step == 1)
        loss_on(model, mesh, step).backward()
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        same(p.grad, q.grad, name)
    # and the sum over the copies
    want, model = build(), sharded(build(), mesh)
    for step in range(2):
        loss_of(want, *batch(step)).backward()
        model.set_requires_all_reduce(step == 1)
        loss_on(model, mesh, step).backward()
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        same(p.grad, q.grad, name)


def divide_factor(mesh):
    want, model = build(), sharded(build(), mesh)
    loss_of(want, *batch()).backward()
    for module in (model, *model.blocks):
        module.set_reduce_scatter_divide_factor(mesh.size() / 3)
    for typed in (False, True):
        model.zero_grad()
        loss_on(model, mesh, typed=typed).backward()
        for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
            same(p.grad, None if q.grad is None else q.grad * 3, name)


def memory(mesh):
    """Which modules are whole when."""
    if mesh.size(mesh.ndim - 1) == 1:
        return
    model = sharded(build(), mesh)
    first, second, third = model.blocks
    steps(model, mesh, count=1)
    loss = loss_on(model, mesh)
    assert [is_whole(m) for m in (*model.blocks, model)] == [False, False, False, True]
    loss.backward()
    assert not any(map(is_whole, (*model.blocks, model)))
    model.set_reshard_after_forward(True, recurse=False)
    first.set_reshard_after_forward(False)
    second.set_reshard_after_backward(False)
    loss = loss_on(model, mesh)
    assert [is_whole(m) for m in (*model.blocks, model)] == [True, False, False, False]
    loss.backward()
    assert [is_whole(m) for m in (*model.blocks, model)] == [False, True, False, False]
    second.reshard()
    assert not is_whole(second)
    third.unshard()
    assert is_whole(third) and not isinstance(third.up.weight, DTensor) and third.up.weight.shape == (7, 5)
    third.reshard()
    assert not is_whole(third) and isinstance(third.up.weight, DTensor)
    handle = third.unshard(async_op=True)
    assert isinstance(third.up.weight, DTensor)
    handle.wait()
    assert not isinstance(third.up.weight, DTensor)
    with torch.no_grad():
        loss_on(model, mesh)
    assert not any(map(is_whole, model.blocks)) and isinstance(third.up.weight, DTensor)
    loss_on(model, mesh).backward()


def prefetch(mesh):
    if mesh.size(mesh.ndim - 1) == 1:
        return
    model = sharded(build(), mesh)
    first, second, third = model.blocks
    steps(model, mesh, count=1)
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([first, second])
    seen = []

    def on_their_way():
        groups = [g for m in model.blocks for g in m._fully_sharded.unit.groups]
        return [g.memory.now is Memory.GATHERING for g in groups]

    first.up.register_forward_hook(lambda *_: seen.append(on_their_way()))
    third.register_forward_hook(
        lambda m, args, out: (
            [
                v.register_hook(lambda g: seen.append(on_their_way()))
                for v in (out.ranks[:1] if isinstance(out, RankTensor) else [out])
            ]
            and None
        )
    )
    loss = loss_on(model, mesh)
    assert seen == [[False, True, True]]
    loss.backward()
    assert seen[1:] == [[True, True, False]]
    with pytest.raises(LayoutError, match=r"modules\[1\], a Linear, is not fully sharded"):
        first.set_modules_to_forward_prefetch([second, second.up])


def hook_on_sums(mesh):
    """It sees what all ranks have summed, and what it writes is what parameters get; a gradient that is missing stays so."""
    want, seen = build(), []
    loss_of(want, *batch()).backward()

    def triple(sums):
        seen.append(sums.dtype)
        sums.mul_(3)

    for typed in (False, True):
        model = sharded(build(), mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        for part in (model, *model.blocks[:2]):
            part.set_all_reduce_hook(triple)
        loss_on(model, mesh, typed=typed).backward()
        assert set(seen) == {torch.float32}
        for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
            factor = 1 if name.startswith("blocks.2") else 3
            same(p.grad, None if q.grad is None else q.grad * factor, name, 1e-5)
    with pytest.raises(LayoutError, match="hook must be a function of one tensor, got 3"):
        model.set_all_reduce_hook(3)


CHECKS = [
    from_meta, initialised, mixed_precision, sums_that_wait, gradient_sync, divide_factor, hook_on_sums, memory, prefetch,
]  # fmt: skip
ON_ONE_AXIS = {from_meta}


@pytest.mark.parametrize(("shape", "names"), MESHES, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_simulated(check, shape, names):
    if check not in ON_ONE_AXIS or len(shape) == 1:
        check(simulate(shape, axis_names=names))


def _on_ranks(rank, world_size):
    run_checks(device_mesh((world_size,), ("dp",)), CHECKS)


def test_processes():
    run_ranks(_on_ranks, 2)


def test_offload_on_cpu():
    """On a mesh of CPUs there is nowhere else to go."""
    mesh = simulate(3, axis_names=("dp",))
    model = sharded(build(), mesh, offload_policy=CPUOffloadPolicy())
    equal(steps(model, mesh), one_device())


def test_axes_by_name():
    """The mesh of the whole program, and which of its axes are for data."""
    mesh = simulate((2, 3, 2), axis_names=("copies", "parts", "tp"))
    for axes, cut in (("parts", Shard(0)), (("copies", "parts"), Shard(0)), ("copies", Replicate())):
        copies, parts = axes if isinstance(axes, tuple) else (None, axes) if cut == Shard(0) else (axes, None)
        model, dims = build(), DataParallelMeshDims(shard=parts, replicate=copies)
        parallelize_module(model.blocks[0], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        sharded(model, mesh, dp_mesh_dims=dims)
        steps(model, mesh[axes])
        assert model.narrow.weight.placements == tuple(cut if n == parts else Replicate() for n in model.narrow.weight.device_mesh.mesh_dim_names)
        equal(model, one_device())
    with pytest.raises(MeshError, match="axes \\('dp',\\) that mesh="):
        fully_shard(build(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    with pytest.raises(LayoutError, match="several axes as one"):
        fully_shard(build(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("copies", "parts")))
    with pytest.raises(LayoutError, match="name at least one axis"):
        DataParallelMeshDims()


def test_an_enclosing_mesh():
    mesh = simulate(3, axis_names=("dp",))
    with mesh:
        model = fully_shard(nn.Linear(4, 4))
    assert model.weight.device_mesh is mesh


def test_reshard_to_some_ranks():
    mesh = simulate(4, axis_names=("dp",))
    equal(steps(sharded(build(), mesh, reshard_after_forward=2), mesh), one_device())
    equal(steps(sharded(build(), mesh, reshard_after_forward=False), mesh), one_device())


# -- bad input ---------------------------------------------------------------------------------------------
def test_messages():
    mesh = simulate((2, 2, 2), axis_names=("a", "b", "c"))
    for given, message in (
        ({"module": 3}, "must be a torch.nn.Module, or a list of them, got 3"),
        ({"module": []}, "empty list"),
        ({"module": nn.ModuleList([nn.Linear(2, 2)])}, "does not support containers.* on its elements"),
        ({"mp_policy": 3}, "mp_policy must be a MixedPrecisionPolicy, got 3"),
        ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.int8)}, "mp_policy.reduce_dtype must be a floating"),
        ({"offload_policy": 3}, "offload_policy must be an OffloadPolicy.*, got 3"),
        ({"reshard_after_forward": "no"}, "reshard_after_forward should be a bool or an int"),
        ({"reshard_after_forward": 3}, "reshard_after_forward as an int, it should be a factor of 2, not 3"),
        ({"shard_placement_fn": lambda p: Shard(2)}, r"shard_placement_fn gave Shard\(dim=2\)"),
        ({"shard_placement_fn": lambda p: 1}, "shard_placement_fn gave 1"),
    ):  # fmt: skip
        with pytest.raises(LayoutError, match=message):
            fully_shard(**({"module": nn.Linear(2, 2), "mesh": mesh["a"]} | given))
    with pytest.raises(MeshError, match="one axis .of parts. or two"):
        fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(MeshError, match="No device mesh is currently active"):
        fully_shard(nn.Linear(2, 2))
    with pytest.raises(LayoutError, match=r"\(FSDPLinear\) is sharded already"):
        fully_shard(fully_shard(nn.Linear(2, 2), mesh=mesh["a"]), mesh=mesh["a"])
    whole = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=mesh["a"])
    with pytest.raises(LayoutError, match="bottom-up"):
        fully_shard(whole[0], mesh=mesh["a"])
    with pytest.raises(LayoutError, match="data parallel already"):
        fully_shard(nn.Sequential(data_parallel(nn.Linear(2, 2), mesh["a"])), mesh=mesh["a"])
    with pytest.raises(LayoutError, match="True or False, got 1"):
        whole.set_requires_gradient_sync(1)
    with pytest.raises(LayoutError, match="a number above 0, got 0"):
        whole.set_reduce_scatter_divide_factor(0)


def test_an_optimizer_made_before():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    fully_shard(model, mesh=simulate(2))
    with pytest.raises(AutogradError, match=r"replaced by fully_shard\(\)"):
        optimizer.step()


def test_nothing_is_changed_by_a_failure():
    mesh = simulate(2)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mesh=mesh)
    model[1].bias.register_hook(lambda grad: None)
    with pytest.raises(LayoutError, match="'bias' of shape .* has hooks"):
        fully_shard(model, mesh=mesh)
    assert type(model) is nn.Sequential and type(model[1].weight) is nn.Parameter
    model[0](RankTensor([torch.ones(1, 2)] * 2)).sum().backward()
    assert model[0].weight.grad is not None


def test_a_batch_over_some_of_the_axes():
    mesh = simulate((2, 2), axis_names=("copies", "parts"))
    model = fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(MeshError, match="has some axes of the data mesh .* but not all"):
        model(distribute_tensor(torch.ones(4, 2), mesh["parts"], [Shard(0)]))


def test_layers_of_the_same_shapes_are_cut_once():
    """Where tensor parallelism cuts a dim too, who holds what is worked out rank by rank."""

    def placements(mesh, rows, columns=3):
        layer = nn.Linear(columns, rows, bias=False)
        parallelize_module(layer, mesh["tp"], ColwiseParallel())
        return fully_shard(layer, mesh=mesh["dp"]).weight.placements

    shardwise.clear_caches()
    sizes = lambda: shardwise.cache_info()["cuts of parameters"].currsize
    one, other = (simulate((2, 4), axis_names=("dp", "tp")) for _ in range(2))
    assert placements(one, 21) == placements(other, 21) and sizes() == 1
    assert placements(one, 22) != placements(one, 21) and sizes() == 2
    turned = simulate((4, 2), axis_names=("tp", "dp"))
    assert placements(turned, 21) != placements(one, 21) and sizes() == 3
    x = distribute_tensor(torch.arange(63.0).view(21, 3), turned, placements(turned, 21))
    assert sorted(row for part in x.to_local().ranks for row in part[:, 0].tolist()) == list(range(0, 63, 3))
