"""Into the distributed world and out of it: distribute_tensor, from_local, to_local, redistribute, full_tensor, factories."""

import pytest
import torch

import shardwise
from shardwise import (
    AutogradError,
    DTensor,
    LayoutError,
    Partial,
    RankTensor,
    Shard,
    debug,
    distribute_tensor,
)
from shardwise.layout.shapes import dense_stride
from shardwise.testing.spread import Parts
from tests.random.common import as_torch_draws
from tests.tensor.common import R, checked_on, is_simulated, laid_out, layouts, locals_of, on_one_axis, same, x

VALUES = {
    "even": x(4, 4), "uneven": x(5, 7), "fewer rows than ranks": x(1, 2), "empty": x(0, 3), "scalar": x(), "cube": x(2, 3, 4),
    "ints": torch.arange(15).view(5, 3), "bools": torch.arange(6) % 2 == 0, "complex": torch.complex(x(3, 4), x(3, 4, seed=1)),
    "half": x(4, 3).half(), "strided": x(4, 6).t(),
}  # fmt: skip


def holds_its_tiles(tensor, value):
    """Every rank played here holds exactly the elements its layout says."""
    comm = tensor._layout.mesh.comm
    for coords in comm.coords_here():
        local = comm.at(tensor._local, coords)
        torch.testing.assert_close(local.detach(), Parts(value, tensor._layout, 0).at(coords), rtol=0, atol=0)


def distribute_all_placements(mesh):
    for name, value in VALUES.items() if is_simulated(mesh) else list(VALUES.items())[:4]:
        for places in layouts(mesh, value, partial=False):
            for source in (0, None):
                made = distribute_tensor(value, mesh, places, src_data_rank=source)
                where = f"{name} {places} src_data_rank={source}"
                assert type(made) is DTensor and made.device_mesh is mesh and made.dtype == value.dtype, where
                assert made.shape == value.shape and made.is_leaf and not made.requires_grad, where
                holds_its_tiles(made, value)
                same(made, value, where, tolerance=0)


def distribute_partial(mesh):
    for op in ("sum", "product", "max", "min", "avg"):
        for axis in range(mesh.ndim):
            made = distribute_tensor(x(5, 3), mesh, on_one_axis(mesh, Partial(op), axis))
            assert made.placements[axis] == Partial(op)
            same(made, x(5, 3), op)
    made = distribute_tensor(VALUES["ints"], mesh, on_one_axis(mesh, Partial("bor")))
    same(made, VALUES["ints"])


def distribute_keeps_memory_order(mesh):
    """As a clone does: dense strides, channels_last stays so."""
    for value in (x(4, 6).t(), x(2, 3, 4, 5).to(memory_format=torch.channels_last), x(8, 3)[::2], x(1, 3).expand(4, 3)):
        for places in layouts(mesh, value):
            made = distribute_tensor(value, mesh, places)
            assert made.stride() == value.clone().stride(), f"{value.stride()} {places}"
            if not made.layout.is_partial:
                holds_its_tiles(made, value)
            for local in locals_of(made):
                assert local.stride() == dense_stride(local.shape, made.stride())
    assert made.is_contiguous() == value.clone().is_contiguous()


def distribute_takes_leaves(mesh):
    """Of any other tensor the gradient would be lost."""
    hidden = x(4, 4).requires_grad_() * 2
    with pytest.raises(AutogradError, match="non-leaf tensor! Its gradient would end here; use DTensor.from_"):
        distribute_tensor(hidden, mesh)
    with torch.no_grad():
        same(distribute_tensor(hidden, mesh), hidden)
    same(distribute_tensor(hidden.detach(), mesh), hidden)


def distribute_keeps_what_it_is(mesh):
    value = x(5, 3)
    plain = distribute_tensor(value, mesh, on_one_axis(mesh, Shard(0)))
    assert not plain.requires_grad and not isinstance(plain, torch.nn.Parameter)
    leaf = distribute_tensor(value.clone().requires_grad_(), mesh, on_one_axis(mesh, Shard(0)))
    assert leaf.requires_grad and leaf.is_leaf
    param = distribute_tensor(torch.nn.Parameter(value.clone()), mesh, on_one_axis(mesh, Shard(0)))
    assert isinstance(param, torch.nn.Parameter) and isinstance(param, DTensor) and param.requires_grad
    frozen = distribute_tensor(torch.nn.Parameter(value.clone(), requires_grad=False), mesh)
    assert isinstance(frozen, torch.nn.Parameter) and not frozen.requires_grad
    assert distribute_tensor(plain, mesh, on_one_axis(mesh, Shard(0))) is plain


def distribute_owns_its_memory(mesh):
    for places in layouts(mesh, x(4, 4), partial=False):
        value = x(4, 4)
        made = distribute_tensor(value, mesh, places)
        value.zero_()
        same(made, x(4, 4), str(places))
        made.zero_()
        same(made, torch.zeros(4, 4, dtype=value.dtype), str(places))


def distribute_default_is_replicate(mesh):
    assert distribute_tensor(x(3), mesh).placements == (R,) * mesh.ndim
    with mesh:
        assert distribute_tensor(x(3), placements=on_one_axis(mesh, Shard(0))).device_mesh is mesh


def from_local_finds_the_global_shape(mesh):
    for value in (x(5, 7), x(1, 2), x(4, 4), x(0, 3), x(2, 3, 4)):
        for places in layouts(mesh, value, partial=False):
            laid = distribute_tensor(value, mesh, places)
            made = DTensor.from_local(laid.to_local(), mesh, places)
            assert made.shape == value.shape, f"{made.shape} {places}"
            holds_its_tiles(made, value)
            same(made, value, str(places))
            checked = DTensor.from_local(laid.to_local(), mesh, places, run_check=True)
            same(checked, value, str(places))


def from_local_with_shape(mesh):
    value = x(5, 7)
    for places in layouts(mesh, value):
        laid = laid_out(value, mesh, places)
        with debug.ledger() as log:
            made = DTensor.from_local(laid.to_local(), mesh, places, shape=(5, 7), stride=(7, 1))
        assert len(log) == 0
        assert made.shape == (5, 7) and made.stride() == (7, 1)
        same(made, value, str(places))


def from_local_keeps_memory_order(mesh):
    value = x(6, 4)
    laid = distribute_tensor(value, mesh, on_one_axis(mesh, Shard(0)))
    flipped = laid._layout.mesh.comm.bind(lambda v: v.t())(laid.to_local())
    made = DTensor.from_local(flipped, mesh, on_one_axis(mesh, Shard(1)))
    assert made.stride() == (1, 4)
    same(made, value.t())
    given = DTensor.from_local(flipped, mesh, on_one_axis(mesh, Shard(1)), shape=(4, 6), stride=(1, 4))
    assert given.stride() == (1, 4)


def from_local_default_is_replicate(mesh):
    made = DTensor.from_local(x(3, 2), mesh)
    assert made.placements == (R,) * mesh.ndim
    same(made, x(3, 2))


def from_local_assume_even(mesh):
    made = DTensor.from_local(x(2, 3), mesh, on_one_axis(mesh, Shard(0)), assume_even=True)
    assert made.shape == (2 * mesh.shape[0], 3)
    same(made, torch.cat([x(2, 3)] * mesh.shape[0]))


def from_local_is_differentiable(mesh):
    value, weight = x(5, 4), x(5, 4, seed=3)
    for places in layouts(mesh, value):
        leaf = laid_out(value, mesh, places)._local.detach().requires_grad_()
        made = DTensor.from_local(leaf, mesh, places, shape=value.shape)
        assert made.requires_grad
        (made * distribute_tensor(weight, mesh)).sum().backward()
        grads = [p if not p.is_partial() else R for p in places]
        same(DTensor.from_local(leaf.grad, mesh, grads, shape=value.shape), weight, str(places))


def from_local_grad_placements(mesh):
    """A gradient asked for as Partial comes back in parts that add up; by default each rank has all of it."""
    value, weight = x(5, 4), x(5, 4, seed=3)
    for theirs in (on_one_axis(mesh, Partial()), [Partial()] * mesh.ndim, [R] * mesh.ndim):
        local = own_copies(value, mesh)
        made = DTensor.from_local(local, mesh, [R] * mesh.ndim, grad_placements=theirs)
        (made * distribute_tensor(weight, mesh, on_one_axis(mesh, Shard(0)))).sum().backward()
        same(DTensor.from_local(local.grad, mesh, theirs), weight, str(theirs))
    for wrong in (on_one_axis(mesh, Shard(0)), on_one_axis(mesh, Shard(1))):
        local = own_copies(value, mesh)
        with pytest.raises(LayoutError, match="grad_placements"):
            DTensor.from_local(local, mesh, [R] * mesh.ndim, grad_placements=wrong)
        leaf = distribute_tensor(value, mesh).requires_grad_()
        with pytest.raises(LayoutError, match="grad_placements"):
            leaf.to_local(grad_placements=wrong)
        with pytest.raises(LayoutError, match="grad_placements"):
            leaf.full_tensor(grad_placements=wrong)


def own_copies(value, mesh):
    """A leaf on every rank, each with memory of its own."""
    if is_simulated(mesh):
        return RankTensor([value.clone().requires_grad_() for _ in range(mesh.size())])
    return value.clone().requires_grad_()


def to_local_is_the_local_tensor(mesh):
    value = x(5, 3)
    for places in layouts(mesh, value):
        laid = laid_out(value, mesh, places)
        local = laid.to_local()
        if is_simulated(mesh):
            assert isinstance(local, RankTensor) and len(local.ranks) == mesh.size()
            shapes = [tuple(v.shape) for v in local.ranks]
            assert shapes == [laid.layout.local_shape(r) for r in range(mesh.size())]
        else:
            assert type(local) is torch.Tensor
        local.mul_(2)
        same(laid, value * 2, f"to_local aliases, {places}")


def to_local_is_differentiable(mesh):
    value, weight = x(5, 4), x(5, 4, seed=3)
    for places in layouts(mesh, value, partial=False):
        leaf = distribute_tensor(value, mesh, places).requires_grad_()
        scale = distribute_tensor(weight, mesh, places).to_local()
        local = (leaf * 2).to_local() * scale
        out = DTensor.from_local(local, mesh, places, shape=value.shape)
        out.sum().backward()
        same(leaf.grad, 2 * weight, str(places))


def from_local_meets_others(mesh):
    """Values that came back from local code and one that never left: each gradient is counted once."""
    for places in layouts(mesh, x(5, 4)):
        leaf, other = distribute_tensor(x(5, 4), mesh).requires_grad_(), laid_out(x(5, 4, seed=3), mesh, places, True)
        back = DTensor.from_local(leaf.to_local() * 2, mesh, [R] * mesh.ndim)
        (back * other).sum().backward()
        same(leaf.grad, 2 * x(5, 4, seed=3), str(places))
        same(other.grad, 2 * x(5, 4), str(places))
        copies = DTensor.from_local(own_copies(x(5, 4), mesh).detach(), mesh, [R] * mesh.ndim)
        other.grad = None
        (copies * other).sum().backward()
        same(other.grad, x(5, 4), str(places))


def to_local_grad_placements(mesh):
    """Each rank uses a replicated value on its own rows: the gradient comes back as parts."""
    value = x(6, 4)
    leaf = distribute_tensor(value, mesh).requires_grad_()
    rows = distribute_tensor(x(6, 4, seed=3), mesh, on_one_axis(mesh, Shard(0)))
    mine = on_one_axis(mesh, Partial())
    local = (leaf * 1).to_local(grad_placements=mine)
    tall = distribute_tensor(torch.ones(6, 1, dtype=value.dtype), mesh, on_one_axis(mesh, Shard(0))).to_local()
    total = local.sum(0, keepdim=True) * tall * rows.to_local()
    DTensor.from_local(total, mesh, on_one_axis(mesh, Shard(0)), shape=(6, 4)).sum().backward()
    plain = value.clone().requires_grad_()
    (plain.sum(0, keepdim=True) * x(6, 4, seed=3)).sum().backward()
    same(leaf.grad, plain.grad)


def redistribute_everywhere(mesh):
    value, weight = x(5, 7), x(5, 7, seed=4)
    targets = layouts(mesh, value) if is_simulated(mesh) else layouts(mesh, value)[-3:]
    for places in layouts(mesh, value):
        for target in targets:
            leaf = laid_out(value, mesh, places, requires_grad=True)
            moved = leaf.redistribute(placements=target)
            where = f"{places} -> {target}"
            assert moved.layout.placements == leaf.layout.replace(placements=target).placements, where
            same(moved, value, where)
            (moved * distribute_tensor(weight, mesh)).sum().backward()
            same(leaf.grad, weight, where)


def redistribute_to_the_same_is_self(mesh):
    for places in layouts(mesh, x(5, 7)):
        laid = laid_out(x(5, 7), mesh, places)
        assert laid.redistribute(placements=places) is laid
        assert laid.redistribute(mesh, places) is laid


def redistribute_with_dtypes(mesh):
    value = x(6, 4, dtype=torch.float32)
    leaf = distribute_tensor(value, mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
    seen = []
    out = leaf.redistribute(placements=[R] * mesh.ndim, forward_dtype=torch.float64, backward_dtype=torch.bfloat16)
    assert out.dtype == torch.float64
    same(out, value.double())
    out.register_hook(lambda g: seen.append(g.dtype))
    with debug.ledger() as log:
        (out * distribute_tensor(x(6, 4), mesh, on_one_axis(mesh, Shard(1)))).sum().backward()
    assert seen == [torch.float64]
    assert leaf.grad.dtype == torch.float32
    same(leaf.grad, x(6, 4).bfloat16().float(), tolerance=0.05)
    assert len(log) > 0
    half = leaf.detach().redistribute(placements=[R] * mesh.ndim, forward_dtype=torch.float16)
    assert half.dtype == torch.float16
    same(half, value.half())


def full_tensor_is_differentiable(mesh):
    value, weight = x(5, 4), x(5, 4, seed=3)
    for places in layouts(mesh, value):
        leaf = laid_out(value, mesh, places, requires_grad=True)
        full = (leaf * 3).full_tensor()
        assert type(full) is torch.Tensor and full.requires_grad
        torch.testing.assert_close(full.detach(), value * 3)
        (full * weight).sum().backward()
        same(leaf.grad, 3 * weight, str(places))


def full_tensor_grad_placements(mesh):
    """grad_placements=Partial: the ranks' gradients of the whole value are parts of it. In simulation one rank stands for all."""
    value = x(5, 4)
    leaf = distribute_tensor(value, mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
    full = (leaf * 1).full_tensor(grad_placements=[Partial()] * mesh.ndim)
    full.sum().backward()
    if not is_simulated(mesh):
        same(leaf.grad, torch.full_like(value, mesh.size()))


@as_torch_draws
def factories(mesh):
    fills = {
        shardwise.zeros: torch.zeros, shardwise.ones: torch.ones,
        shardwise.rand: torch.rand, shardwise.randn: torch.randn,
    }  # fmt: skip
    for mine, theirs in fills.items():
        for size in ((5, 7), (1, 2), (0, 3), (), (2, 3, 4)) if is_simulated(mesh) else ((5, 7), ()):
            for places in layouts(mesh, torch.empty(size), partial=False):
                for dtype in (None, torch.float64):
                    where = f"{mine.__name__} {size} {places} {dtype}"
                    torch.manual_seed(3)
                    made = mine(*size, dtype=dtype, device_mesh=mesh, placements=places)
                    torch.manual_seed(3)
                    same(made, theirs(size, dtype=dtype), where, tolerance=0)
                    assert made.is_leaf and not made.requires_grad, where
                    for coords in made._layout.mesh.comm.coords_here():
                        local = made._layout.mesh.comm.at(made._local, coords)
                        assert tuple(local.shape) == made.layout.local_shape_at(coords), where


def memory_for_parts(mesh):
    """A tensor without values, or of zeros, may be Partial; one made like a Partial tensor is, until it is written."""
    value = x(5, 3)
    for op in ("sum", "avg", "max", "min", "product"):
        places = [Partial(op), *[Shard(0)] * (mesh.ndim - 1)]
        made = shardwise.empty(5, 3, dtype=value.dtype, device_mesh=mesh, placements=places)
        assert made.placements == tuple(places)
        zeros = shardwise.zeros(5, 3, dtype=value.dtype, device_mesh=mesh, placements=places)
        assert zeros.placements == tuple(places)
        same(zeros, torch.zeros_like(value))
        for like in (made, laid_out(value, mesh, places), torch.empty_like(made)):
            other = torch.empty_like(like)
            assert other.placements == tuple(places) and other.shape == value.shape
            same(other.copy_(distribute_tensor(value, mesh)), value, op)
            same(torch.empty_like(like).fill_(2), torch.full_like(value, 2), op)
        nowhere = torch.empty_like(made, device="meta")
        assert nowhere.device.type == "meta" and nowhere.placements == tuple(places)
        assert torch.empty_like(made, dtype=torch.int32).dtype == torch.int32


def emptied_modules_keep_their_layouts(mesh):
    places = [Partial(), *[Shard(0)] * (mesh.ndim - 1)]
    for device in ("cpu", "meta"):
        module = torch.nn.Linear(3, 5, bias=False)
        module.weight = torch.nn.Parameter(laid_out(x(5, 3), mesh, places))
        for to in (device, "cpu"):
            module.to_empty(device=to)
            assert module.weight.placements == tuple(places) and module.weight.device.type == to
            assert module.weight.requires_grad and all(v.device.type == to for v in locals_of(module.weight))


def factory_arguments(mesh):
    places = on_one_axis(mesh, Shard(0))
    for make in (shardwise.zeros, shardwise.ones, shardwise.empty, shardwise.rand, shardwise.randn):
        assert make((5, 3), device_mesh=mesh, placements=places).shape == (5, 3)
        assert make([5, 3], device_mesh=mesh, placements=places).shape == (5, 3)
        assert make(torch.Size([5, 3]), device_mesh=mesh, placements=places).shape == (5, 3)
        leaf = make(5, 3, requires_grad=True, device_mesh=mesh, placements=places)
        assert leaf.requires_grad and leaf.is_leaf and leaf.dtype == torch.get_default_dtype()
        assert make(5, device_mesh=mesh).placements == (R,) * mesh.ndim
    assert shardwise.zeros(4, dtype=torch.int32, device_mesh=mesh, placements=places).dtype == torch.int32
    for fill in (2, 2.5, True, 1 + 2j):
        same(shardwise.full((5, 3), fill, device_mesh=mesh, placements=places), torch.full((5, 3), fill))
    same(shardwise.full((5,), 3, dtype=torch.float64, device_mesh=mesh), torch.full((5,), 3, dtype=torch.float64))
    assert shardwise.full((2,), 1.0, requires_grad=True, device_mesh=mesh).requires_grad


def new_ones_of_its_own_size(mesh):
    """A new tensor as large as this one is cut as it is; where parts were pending it is whole, as one of another size."""
    for value in (x(5, 7), x(1, 2), x(0, 3), x()):
        size = tuple(value.shape)
        for places in layouts(mesh, value):
            mine = laid_out(value, mesh, places)
            kept = tuple(R if p.is_partial() else p for p in mine.placements)
            for make in (
                lambda t, size=size: t.new_zeros(size),
                lambda t, size=size: t.new_ones(*size, dtype=torch.int32) if size else t.new_ones(()),
                lambda t, size=size: t.new_full(size=size, fill_value=3.0, requires_grad=True),
                lambda t, size=size: t.new_full(t.shape, 2.5),
            ):
                made = make(mine)
                assert made.placements == kept and made.is_leaf, places
                same(made, make(value), str(places))
                assert made.requires_grad == make(value).requires_grad
            other = mine.new_zeros(4, 2)
            assert other.placements == (R,) * mesh.ndim and other.shape == (4, 2)
            same(mine.new_tensor([1.0, 2.0]), value.new_tensor([1.0, 2.0]))
            assert mine.new_empty_strided((2, 3), (1, 2)).stride() == (1, 2)
            for strided in (value, value.mT.contiguous().mT if value.ndim else value):
                made = mine.new_empty_strided(strided.shape, strided.stride(), requires_grad=True).detach().fill_(2.0)
                assert made.placements == kept and made.stride() == strided.stride(), places
                same(made, torch.full_like(value, 2.0))


def what_torch_calls_it(mesh):
    value = x(5, 7)
    places = on_one_axis(mesh, Shard(1))
    mine = laid_out(value, mesh, places, requires_grad=True)
    assert mine._spec.placements == mine.placements and mine._spec.mesh is mine.device_mesh
    assert mine._spec.shape == (5, 7) and mine._spec.stride == (7, 1) and mine._spec.dim_map == [-1, 0]
    assert mine._spec.num_shards == mesh.shape[0] and mine._spec.is_sharded() and not mine._spec.is_replicated()
    assert mine._spec.tensor_meta.dtype == torch.float64
    assert not mine._local_tensor.requires_grad
    mine._local_tensor.mul_(2)
    same(mine, value * 2)
    again = DTensor.from_local(local_tensor=mine._local_tensor, device_mesh=mesh, placements=places)
    same(again, value * 2)
    same(DTensor.from_local(local=mine._local_tensor, device_mesh=mesh, placements=places), value * 2)
    with pytest.raises(LayoutError, match="two names of one argument"):
        DTensor.from_local(mine._local_tensor, mesh, places, local=mine._local_tensor)


@as_torch_draws
def random_factories_advance_the_stream(mesh):
    """Two draws in a row are the plain program's two draws."""
    torch.manual_seed(5)
    mine = [shardwise.randn(5, 3, device_mesh=mesh, placements=on_one_axis(mesh, Shard(d))) for d in (0, 1)]
    torch.manual_seed(5)
    for got in mine:
        same(got, torch.randn(5, 3), tolerance=0)


CHECKS = [
    distribute_all_placements, distribute_partial, distribute_keeps_memory_order, distribute_takes_leaves,
    distribute_keeps_what_it_is, distribute_owns_its_memory,
    distribute_default_is_replicate, from_local_finds_the_global_shape, from_local_with_shape, from_local_keeps_memory_order,
    from_local_default_is_replicate, from_local_assume_even, from_local_is_differentiable, from_local_grad_placements,
    to_local_is_the_local_tensor, to_local_is_differentiable, from_local_meets_others, to_local_grad_placements, redistribute_everywhere,
    redistribute_to_the_same_is_self, redistribute_with_dtypes, full_tensor_is_differentiable, full_tensor_grad_placements,
    factories, memory_for_parts, emptied_modules_keep_their_layouts, factory_arguments, new_ones_of_its_own_size, what_torch_calls_it, random_factories_advance_the_stream,
]  # fmt: skip
test_simulated, test_processes = checked_on(__name__, CHECKS)


@pytest.mark.parametrize("steps", [0, 1, 3, 11])
@pytest.mark.parametrize("places", [[Shard(0)], [Shard(0, sizes=(0, 1, 2, 8))], [shardwise.Replicate()]])
def test_evenly_spaced(steps, places):
    """The numbers of torch.linspace and torch.logspace; what they refuse is refused with their words."""
    mesh = shardwise.simulate(4)
    places = [Shard(0)] if steps != 11 and places[0] != shardwise.Replicate() else places
    on_mesh = {"device_mesh": mesh, "placements": places}
    same(shardwise.linspace(-1, 2.5, steps, **on_mesh), torch.linspace(-1, 2.5, steps), str(places))
    same(shardwise.linspace(0, 7, steps, dtype=torch.int64, **on_mesh), torch.linspace(0, 7, steps, dtype=torch.int64))
    same(shardwise.logspace(0, 2 + 1j, steps, **on_mesh), torch.logspace(0, 2 + 1j, steps))
    end = shardwise.distribute_tensor(torch.tensor(3.0, dtype=torch.float64), mesh, [Partial()])
    made = shardwise.logspace(0, end, steps, 2.0, requires_grad=True, **on_mesh)
    same(made, torch.logspace(0, 3, steps, 2.0))
    assert made.requires_grad and made.is_leaf and made.placements == tuple(places)
    with pytest.raises(shardwise.LayoutError, match=r"size: must be ints >= 0, got \(-1,\)"):
        shardwise.linspace(0, 1, -1, **on_mesh)
