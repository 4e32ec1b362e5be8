"""local_map: functions of local tensors on distributed ones."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs

from shardwise import (
    DTensor,
    LayoutError,
    MeshError,
    Partial,
    RankTensor,
    Replicate,
    Shard,
    distribute_tensor,
    local_map,
    simulate,
)
from shardwise.debug import ledger
from tests.workers import device_mesh, run_ranks

R, P = Replicate(), Partial()


def value(*shape):
    return torch.sin(torch.arange(float(torch.Size(shape).numel()))).view(shape)


# -- the same program simulated and on gloo ----------------------------------------------------------------
def row_times_column(mesh):
    """A product whose inner dim is cut: uneven, values and gradients."""
    w, x = value(5, 7), value(7, 3)
    product = local_map(torch.mm, out_placements=[P], in_placements=([Shard(1)], [Shard(0)]))
    dw = distribute_tensor(w, mesh, [Shard(1)]).requires_grad_()
    dx = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    out = product(dw, dx)
    assert out.placements == (P,)
    torch.testing.assert_close(out.full_tensor(), w @ x)
    (out * value(5, 3)).sum().backward()
    torch.testing.assert_close(dw.grad.full_tensor(), value(5, 3) @ x.T)
    torch.testing.assert_close(dx.grad.full_tensor(), w.T @ value(5, 3))


def replicated_weight(mesh):
    """Each rank uses the whole weight for its rows: the weight's gradient is in parts, and we say so."""
    x, w = value(7, 4), value(4, 2)
    rows = local_map(torch.mm, [Shard(0)], ([Shard(0)], [R]), in_grad_placements=([Shard(0)], [P]))
    dx = distribute_tensor(x, mesh, [Shard(0)])
    dw = distribute_tensor(w, mesh, [R]).requires_grad_()
    out = rows(dx, dw)
    assert out.shape == (7, 2)
    torch.testing.assert_close(out.full_tensor(), x @ w)
    (out * value(7, 2)).sum().backward()
    torch.testing.assert_close(dw.grad.full_tensor(), x.T @ value(7, 2))


def many_outputs(mesh):
    """A dict of two tensors and a number; one tensor of each local size."""

    def statistics(x, scale, *, shift):
        return {"scaled": x * scale + shift, "sum": x.sum(0), "name": "rows"}

    mapped = local_map(statistics, out_placements=([Shard(0)], [P], None))
    x = value(7, 3)
    dx = distribute_tensor(x, mesh, [Shard(0, sizes=(4, 0, 2, 1))])
    out = mapped(dx, 2.0, shift=distribute_tensor(value(3), mesh, [R]))
    assert out["name"] == "rows"
    assert out["scaled"].shape == (7, 3) and out["sum"].shape == (3,)
    torch.testing.assert_close(out["scaled"].full_tensor(), x * 2 + value(3))
    torch.testing.assert_close(out["sum"].full_tensor(), x.sum(0))


def redistributed(mesh):
    x = value(8, 4)
    norm = local_map(lambda x: x / x.norm(dim=1, keepdim=True), [Shard(0)], ([Shard(0)],), redistribute_inputs=True)
    dx = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    out = norm(dx)
    torch.testing.assert_close(out.full_tensor(), x / x.norm(dim=1, keepdim=True))
    (out * value(8, 4)).sum().backward()
    want = x.clone().requires_grad_()
    (want / want.norm(dim=1, keepdim=True) * value(8, 4)).sum().backward()
    torch.testing.assert_close(dx.grad.full_tensor(), want.grad)
    assert dx.grad.placements == (Shard(1),)


def replicated_all_through(mesh):
    x = distribute_tensor(value(4), mesh, [R]).requires_grad_()
    out = local_map(torch.exp, [R])(x)
    out.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), value(4).exp())


PROGRAMS = [row_times_column, replicated_weight, many_outputs, redistributed, replicated_all_through]


@pytest.mark.parametrize("program", PROGRAMS)
def test_simulated(program):
    program(simulate(4))


def on_gloo(rank, world_size):
    for program in PROGRAMS:
        program(device_mesh((4,)))
    all_reduced(device_mesh((4,)))
    torchs_placements(device_mesh((4,)))


def all_reduced(mesh):
    """On processes the function may communicate."""

    def product(w, x):
        out = torch.mm(w, x)
        dist.all_reduce(out)
        return out

    w, x = value(5, 7), value(7, 3)
    out = local_map(product, [R])(distribute_tensor(w, mesh, [Shard(1)]), distribute_tensor(x, mesh, [Shard(0)]))
    torch.testing.assert_close(out.to_local(), w @ x)


def torchs_placements(mesh):
    x = distribute_tensor(value(8), mesh, [Shard(0)])
    out = local_map(torch.neg, [theirs.Shard(0)], in_placements=([theirs.Shard(0)],))(x)
    assert out.placements == (Shard(0),)


def test_gloo():
    run_ranks(on_gloo, 4)


# -- the simulated mesh in particular ----------------------------------------------------------------------
def test_function_sees_one_ranks_plain_tensors():
    seen = []

    def look(x):
        seen.append((type(x), tuple(x.shape)))
        return x

    mesh = simulate((2, 2))
    local_map(look, [Shard(0), R])(distribute_tensor(value(5, 2), mesh, [Shard(0), R]))
    # ranks that hold the same tensor share a call
    assert seen == [(torch.Tensor, (3, 2)), (torch.Tensor, (2, 2))]


def test_2d_mesh_gradients():
    mesh = simulate((2, 3))
    x, w = value(5, 7), value(7, 4)
    dx = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
    dw = distribute_tensor(w, mesh, [R, Shard(0)]).requires_grad_()
    grads = ([Shard(0), Shard(1)], [P, Shard(0)])
    out = local_map(torch.mm, [Shard(0), P], in_grad_placements=grads)(dx, dw)
    torch.testing.assert_close(out.full_tensor(), x @ w)
    (out * value(5, 4)).sum().backward()
    torch.testing.assert_close(dx.grad.full_tensor(), value(5, 4) @ w.T)
    torch.testing.assert_close(dw.grad.full_tensor(), x.T @ value(5, 4))


def test_parts_made_from_replicas_are_each_ranks_own():
    x = distribute_tensor(value(4), simulate(4), [R])
    out = local_map(torch.clone, [P])(x)
    torch.testing.assert_close(out.full_tensor(), value(4) * 4)
    out = local_map(torch.clone, [Shard(0)])(x)
    torch.testing.assert_close(out.full_tensor(), value(4).repeat(4))


def test_a_call_for_each_coordinate_that_gives_a_value_of_its_own():
    calls = []
    count = lambda x: calls.append(x) or x.clone()  # as a function that draws random numbers must be called
    x = distribute_tensor(value(4), simulate((2, 3)), [R, R])
    for places, expected in [([R, R], 1), ([R, P], 3), ([Shard(0), R], 2), ([Shard(0), P], 6)]:
        calls.clear()
        local_map(count, places)(x)
        assert len(calls) == expected


def test_rank_tensors_are_passed_rank_by_rank():
    x = distribute_tensor(value(4), simulate(2), [Shard(0)])
    offsets = RankTensor([torch.tensor(0.0), torch.tensor(10.0)])
    out = local_map(torch.add, [Shard(0)])(x, offsets)
    torch.testing.assert_close(out.full_tensor(), value(4) + torch.tensor([0.0, 0.0, 10.0, 10.0]))


def test_without_distributed_arguments_it_is_the_function():
    assert local_map(torch.neg, [Shard(0)])(torch.ones(2)).tolist() == [-1, -1]


def test_decorator():
    @local_map(out_placements=[Shard(0)])
    def negative(x):
        """Minus x."""
        return -x

    assert negative.__doc__ == "Minus x."
    x = distribute_tensor(value(5), simulate(4), [Shard(0)])
    torch.testing.assert_close(negative(x).full_tensor(), -value(5))


def test_single_outputs_may_be_given_as_a_tuple():
    x = distribute_tensor(value(4), simulate(2), [Shard(0)])
    for places in ([Shard(0)], (Shard(0),), Shard(0), ([Shard(0)],)):
        assert local_map(torch.neg, places)(x).placements == (Shard(0),)
    assert local_map(torch.neg, None)(distribute_tensor(value(4), simulate(2), [R])).placements == (R,)
    assert local_map(lambda x: 3)(x) == 3


def test_moves_only_what_it_is_told():
    x = distribute_tensor(value(8, 4), simulate(4), [Shard(1)])
    with ledger() as log:
        local_map(torch.neg, [Shard(1)])(x)
        assert len(log) == 0
        local_map(torch.neg, [Shard(0)], ([Shard(0)],), redistribute_inputs=True)(x)
    assert [e.kind for e in log] == ["all_to_all"]


# -- bad input ---------------------------------------------------------------------------------------------
def two(x):
    return x, x


def test_errors():
    x = distribute_tensor(value(4, 4), simulate(2), [Shard(0)])
    laid_out = r"two: argument 0 in local_map has a mismatched placements: .*Shard\(dim=0\).*Replicate\(\).*redistribute_inputs=True"
    cases = [
        (lambda: local_map(two, [Shard(0)])(x), r"two: local_map requires one .* received 1 out_placements but 2 is expected"),
        (lambda: local_map(two, ([R], None), ([R],))(x), laid_out),
        (lambda: local_map(two, ([R], None), ([R], [R]))(x), r"two: in_placements length 2 does not match .* 1!"),
        (lambda: local_map(two, ([R], None), None, ())(x), r"two: in_grad_placements length 0 does not match .* 1!"),
        (lambda: local_map(lambda x: 3, [R])(x), r"Non-tensor output 3 expects None"),
        (lambda: local_map(lambda y: x, [R])(x), r"gives a DTensor.*takes and gives local tensors"),
        (lambda: local_map(torch.neg, [R, R])(x), r"2 given .* for a mesh of 1 axes"),
    ]
    for call, message in cases:
        with pytest.raises(LayoutError, match=message):
            call()
    with pytest.raises(MeshError, match="not of the same world"):
        local_map(torch.neg, [R], device_mesh=simulate(4))(x)


def test_mesh_of_the_outputs():
    world = simulate((2, 2), axis_names=("dp", "tp"))
    x = distribute_tensor(value(4), world["tp"], [Shard(0)])
    out = local_map(torch.neg, [R, Shard(0)], device_mesh=world)(x)
    assert isinstance(out, DTensor) and out.device_mesh is world
    torch.testing.assert_close(out.full_tensor(), -value(4))
