"""Plain Python values out of a distributed tensor, and plain operands into its ops."""

import math
import operator

import numpy as np
import pytest
import torch

from shardwise import (
    DTensor,
    LayoutError,
    MeshError,
    Partial,
    RuleError,
    Shard,
    StrictError,
    debug,
    distribute_tensor,
    simulate,
    strict,
)
from tests.tensor.common import R, checked_on, laid_out, layouts, on_one_axis, same, x

VALUE = x(5, 4)


def numbers(mesh):
    for value in (x(), torch.tensor(7), torch.tensor(True), torch.tensor(1 + 2j), torch.tensor(2.5)):
        for places in layouts(mesh, value, partial=value.dtype.is_floating_point):
            mine = laid_out(value, mesh, places)
            assert type(mine.item()) is type(value.item()) and mine.item() == pytest.approx(value.item()), places
            assert mine.tolist() == pytest.approx(value.tolist())
            assert bool(mine) == bool(value)
            if not value.is_complex():
                assert float(mine) == pytest.approx(float(value)) and math.floor(float(mine)) == math.floor(
                    float(value)
                )
                assert int(mine) == int(value)
            assert complex(mine) == pytest.approx(complex(value))
    total = laid_out(VALUE, mesh, on_one_axis(mesh, Shard(0))).sum()
    assert total.placements[0] == Partial() or total.placements[0] == R
    assert total.item() == pytest.approx(VALUE.sum().item())
    assert (total > -100).item() is True
    assert ("yes" if total > -100 else "no") == "yes"
    assert not (total > 1e9)
    assert range(10)[distribute_tensor(torch.tensor(3), mesh)] == 3
    one = distribute_tensor(x(1, 1), mesh, on_one_axis(mesh, Shard(0)))
    assert one.item() == x(1, 1).item() and bool(one) is True
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        distribute_tensor(VALUE, mesh).item()
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0))) > 0)


def arrays(mesh):
    for places in layouts(mesh, VALUE):
        mine = laid_out(VALUE, mesh, places)
        assert np.allclose(mine.tolist(), VALUE.tolist())
        assert isinstance(mine.numpy(), np.ndarray)
        np.testing.assert_allclose(mine.numpy(), VALUE.numpy(), atol=1e-12)
        np.testing.assert_allclose(np.asarray(mine), VALUE.numpy(), atol=1e-12)
        np.testing.assert_allclose(np.array(mine, dtype=np.float32), VALUE.float().numpy(), atol=1e-6)
        leaf = laid_out(VALUE, mesh, places, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"Use tensor.detach\(\).numpy\(\)"):
            leaf.numpy()
        np.testing.assert_allclose(leaf.numpy(force=True), VALUE.numpy(), atol=1e-12)
        np.testing.assert_allclose(leaf.detach().numpy(), VALUE.numpy(), atol=1e-12)


def container_protocol(mesh):
    for places in layouts(mesh, VALUE):
        mine = laid_out(VALUE, mesh, places)
        assert len(mine) == 5 and mine.numel() == 20 and mine.dim() == mine.ndim == 2
        assert mine.size() == VALUE.size() and mine.size(1) == 4 and mine.shape == VALUE.shape
        assert isinstance(mine.shape, torch.Size) and mine.stride() == (4, 1) and mine.is_contiguous()
        assert (
            mine.element_size() == 8 and mine.nbytes == 160 and mine.device.type == "cpu" and mine.is_floating_point()
        )
        rows = list(mine)
        assert len(rows) == 5
        for row, want in zip(rows, VALUE, strict=True):
            same(row, want, str(places))
        a, b, c, d, e = mine
        same(e, VALUE[4], str(places))
        exact = distribute_tensor(VALUE, mesh)
        assert VALUE[1, 2].item() in exact and 1e9 not in exact
        with pytest.raises(TypeError, match="len.. of a 0-d tensor"):
            len(mine.sum())
        with pytest.raises(TypeError, match="iteration over a 0-d tensor"):
            list(mine.sum())
        with pytest.raises(IndexError, match="out of bounds|out of range"):
            mine[7]
        assert {mine: 1}[mine] == 1 and hash(mine) == hash(mine) and mine is not mine.clone()
        assert len({mine, mine, mine.clone()}) == 2


def comparisons(mesh):
    for places in layouts(mesh, VALUE):
        mine = distribute_tensor(VALUE, mesh, places)
        other = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(1)))
        assert torch.equal(mine, other) is True and mine.equal(other) is True
        assert torch.equal(mine, VALUE) is True
        assert torch.equal(mine, other + 1) is False
        assert torch.allclose(mine, other + 1e-12) is True and torch.allclose(mine, other + 1) is False
        assert torch.equal(mine, other[:3]) is False
        eq = mine == other
        assert isinstance(eq, DTensor) and eq.dtype == torch.bool and bool(eq.all()) and not bool((mine != other).any())
        torch.testing.assert_close(mine.full_tensor(), VALUE)
        assert torch.is_tensor(mine) and isinstance(mine, torch.Tensor)


def text(mesh):
    scalar = distribute_tensor(torch.tensor(3.14159), mesh)
    assert f"{scalar:.2f}" == "3.14" and f"{scalar:8.3f}" == "   3.142"
    total = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0))).sum()
    assert f"{total:.4f}" == f"{VALUE.sum():.4f}"
    for value in (x(), x(0, 3), x(5, 4), x(300, 300)):
        for places in layouts(mesh, value):
            mine = laid_out(value, mesh, places)
            for shown in (repr(mine), str(mine)):
                assert shown.startswith("DTensor(") and f"shape={tuple(value.shape)}" in shown, shown
                assert repr(mine.placements[0]) in shown and len(shown) < 12_000, len(shown)
            assert "requires_grad=True" in repr(laid_out(value, mesh, places, requires_grad=True))
    assert "Parameter" in repr(torch.nn.Parameter(distribute_tensor(VALUE, mesh)))
    assert "float16" in repr(distribute_tensor(VALUE.half(), mesh))
    with pytest.raises(TypeError):
        format(distribute_tensor(VALUE, mesh), ".2f")


BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.pow,
    torch.maximum,
    operator.lt,
    operator.eq,
]


def plain_operands(mesh):
    """Numbers and plain tensors count as replicated, on either side."""
    others = [2, 0.5, torch.tensor(2.0), VALUE.abs(), VALUE.abs()[0], VALUE.abs()[:, :1], np.float64(3.0)]
    for places in layouts(mesh, VALUE):
        mine, plain = laid_out(VALUE.abs() + 1, mesh, places), VALUE.abs() + 1
        for op in BINARY:
            for other in others:
                if op is torch.maximum and not isinstance(other, torch.Tensor):
                    continue
                where = f"{op} {other} {places}"
                same(op(mine, other), op(plain, other), where)
                if not isinstance(other, np.float64):
                    same(op(other, mine), op(other, plain), where)
        same(VALUE.t() @ mine, VALUE.t() @ plain, str(places))
        same(mine @ VALUE.t(), plain @ VALUE.t(), str(places))
        same(torch.cat([mine, VALUE]), torch.cat([plain, VALUE]), str(places))
        same(torch.where(VALUE > 0, mine, 0.0), torch.where(VALUE > 0, plain, 0.0), str(places))
        same(mine.copy_(VALUE), VALUE, str(places))


def strict_refuses_what_was_not_asked_for(mesh):
    first, second = (distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(d))) for d in (0, 1))
    with strict():
        with pytest.raises(StrictError, match=r"add: a plain tensor meets a distributed one.*distribute_tensor"):
            first + VALUE
        with pytest.raises(StrictError) as caught:
            first + second
        message = str(caught.value)
        for part in (
            "add would communicate under strict()",
            "shape (5, 4)",
            "S(0)",
            "S(1)",
            "redistribute(placements=[",
        ):
            assert part in message, message
        exec_fix = message[message.index("placements=[") :].rstrip(")").removeprefix("placements=")
        wanted = eval(exec_fix, {"Shard": Shard, "Replicate": type(R), "Partial": Partial})
        moved = (second if "operand 1" in message.split(":", 1)[1][:12] else first).redistribute(placements=wanted)
        if moved.placements == first.placements:
            same(first + moved, VALUE * 2)
        same(first + 1, VALUE + 1)
        same(first * first, VALUE * VALUE)
        same(first.sum().redistribute(placements=[R] * mesh.ndim), VALUE.sum())
        assert first.full_tensor().equal(VALUE)
        assert first.sum().item() == pytest.approx(VALUE.sum().item())
        if mesh.shape[0] > 1:
            with pytest.raises(StrictError, match="sort would communicate"):
                first.sort(0)
    same(first + VALUE, VALUE * 2)
    strict.enable()
    try:
        with pytest.raises(StrictError):
            first + second
    finally:
        strict.disable()
    same(first + second, VALUE * 2)


def strict_allows_backward(mesh):
    """The backward pass of what was asked for was asked for too."""
    leaf = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0))).requires_grad_()
    weight = distribute_tensor(x(4, 3), mesh).requires_grad_()
    with strict(), debug.ledger() as log:
        (leaf @ weight).sum().backward()
    plain, plain_weight = VALUE.clone().requires_grad_(), x(4, 3).requires_grad_()
    (plain @ plain_weight).sum().backward()
    same(leaf.grad, plain.grad)
    same(weight.grad, plain_weight.grad)
    assert [e.kind for e in log if e.backward] == ["all_reduce"]


def strict_sees_inside_the_program_of_an_op(mesh):
    """Ops that are several moves and calls: their communication is theirs, in the ledger and under strict()."""
    leaf = laid_out(VALUE, mesh, on_one_axis(mesh, Shard(0)))
    with debug.ledger() as log:
        same(leaf.logsumexp(0), VALUE.logsumexp(0))
    assert {(e.op, e.kind) for e in log} == {("logsumexp", "all_reduce")}
    with (
        strict(),
        pytest.raises(StrictError, match=r"^logsumexp would communicate under strict\(\): on the way it moves"),
    ):
        leaf.logsumexp(0)
    whole = leaf.redistribute(placements=[R] * len(leaf.placements))
    with strict():
        same(whole.logsumexp(0), VALUE.logsumexp(0))


def memory(mesh):
    """What torch does with the memory of a tensor, which the wrapper has none of."""
    for places in layouts(mesh, VALUE):
        mine = laid_out(VALUE, mesh, places)
        assert mine.apply_(lambda v: v * v) is mine
        same(mine, VALUE * VALUE, str(places))
        assert not mine.is_shared() and mine.share_memory_() is mine and mine.is_shared()
        same(mine + 1, VALUE * VALUE + 1, str(places))
        with pytest.raises(RuleError, match="memory of a distributed tensor is on many ranks; give x.to_local"):
            torch.from_dlpack(mine)
    with pytest.raises(RuntimeError, match="requires grad"):
        laid_out(VALUE, mesh, places, requires_grad=True).apply_(abs)


def sparse_operands_are_refused(mesh):
    mine = distribute_tensor(VALUE, mesh, on_one_axis(mesh, Shard(0)))
    with pytest.raises(LayoutError, match=r"a torch.sparse_coo tensor meets a DTensor.*x.to_dense\(\)"):
        torch.eye(5, dtype=torch.float64).to_sparse() @ mine


CHECKS = [
    memory, sparse_operands_are_refused, numbers, arrays, container_protocol, comparisons, text, plain_operands, strict_refuses_what_was_not_asked_for,
    strict_allows_backward, strict_sees_inside_the_program_of_an_op,
]  # fmt: skip
test_simulated, test_processes = checked_on(__name__, CHECKS)


def test_operands_on_different_meshes():
    a = distribute_tensor(VALUE, simulate((2,), axis_names=("a",)), [Shard(0)])
    b = distribute_tensor(VALUE, simulate((3,), axis_names=("b",)), [Shard(0)])
    for op in (torch.add, torch.mul, lambda s, t: s @ t.t(), lambda s, t: torch.cat([s, t]), lambda s, t: s.copy_(t)):
        with pytest.raises(MeshError, match=r"different meshes, mesh\(a=2\) and mesh\(b=3\); lay one of them out"):
            op(a, b)
    same(a, VALUE)
    same(b, VALUE)


def test_a_slice_follows_its_tensor_bound():
    whole = torch.arange(12.0).view(4, 3)
    rows = distribute_tensor(whole, simulate((3,)), [Shard(0)])
    for end in (distribute_tensor(torch.tensor(1), simulate((3,)), [R]), torch.tensor(1)):
        assert rows[:end].shape == (1, 3)
        end += 2
        torch.testing.assert_close(rows[:end].full_tensor(), whole[:3])
        torch.testing.assert_close(rows[0:2, :end].full_tensor(), whole[:2])


def test_tensors_of_no_dim_stand_for_numbers():
    """Where torch takes a number, a 0-d tensor is one, and its value of the moment counts."""
    whole, mesh = torch.arange(12.0).view(4, 3), simulate((3,))
    x, n = distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(torch.tensor(0), mesh, [R])
    for i in (0, 1):
        for call in (
            lambda x, n: x.cumsum(n),
            lambda x, n: x.roll(n, 0),
            lambda x, n: x.new_zeros((n, 2)),
            lambda x, n: x.view(n + 1, -1),
            lambda x, n: torch.stack([x, x], n),
            lambda x, n: torch.baddbmm(x[None, :3], x[None, :3], x[None, :3], alpha=n),
            lambda x, n: torch.polygamma(n, x + 1),
            lambda x, n: x.tensor_split(n + 2)[0],
        ):
            torch.testing.assert_close(call(x, n).full_tensor(), call(whole, torch.tensor(i)))
        n += 1
    with pytest.raises(TypeError, match="a number is needed"):
        x.new_zeros((3,)).add(x[0], alpha=n.double().requires_grad_())


def test_a_wrong_call_raises_what_torch_raises():
    vector = distribute_tensor(torch.arange(6.0), simulate((3,)), [Shard(0)])
    for call in (
        lambda x: torch.linalg.det(x),
        lambda x: torch.linalg.eigh(x),
        lambda x: torch.nn.functional.rms_norm(x, [3], x),
        lambda x: torch.native_group_norm(x.view(1, 6, 1), None, None, 1, 6, 1, 0, 1e-5),
        lambda x: torch.addmv(x, x[:3].view(1, 3), x[:3]),
        lambda x: torch.native_dropout(x, 1.5, True),
    ):
        with pytest.raises(Exception) as wanted:
            call(torch.arange(6.0))
        with pytest.raises(wanted.type):
            call(vector)


def test_arrays_are_read_only_where_they_are_copies():
    mesh = simulate(2)
    for places in ([Shard(0)], [Partial()]):
        mine = distribute_tensor(VALUE, mesh, places)
        for array in (mine.numpy(), np.asarray(mine)):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
    whole = distribute_tensor(VALUE, mesh, [R])
    whole.numpy()[0] = 7
    assert bool((whole[0] == 7).all())
    np.array(distribute_tensor(VALUE, mesh, [Shard(0)]))[0] = 1
