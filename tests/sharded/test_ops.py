"""Torch functions on sharded tensors: the values and gradients of one device, on any tiles."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import sharded as S
from shardwise import simulate
from shardwise.errors import StrictError
from tests.sharded.common import chunks, grid, irregular, on_one, sharded, specs_for, values, whole
from tests.workers import run_ranks


def plain(result):
    return whole(result.detach()) if isinstance(result, S.ShardedTensor) else result


def compare(function, tensors, specs, where):
    """function on sharded tensors gives what it gives on plain ones, forward and backward."""
    floating = [t.is_floating_point() for t in tensors]
    leaves = [t.clone().requires_grad_(f) for t, f in zip(tensors, floating)]
    want = function(*leaves)
    mine = [sharded(t, s, requires_grad=f) for t, s, f in zip(tensors, specs, floating)]
    got = function(*mine)
    assert got.dtype == want.dtype and got.shape == want.shape, where
    assert torch.allclose(plain(got).to(want.dtype), want.detach(), equal_nan=True), where
    if want.requires_grad:
        seed = torch.randn(want.shape, generator=torch.Generator().manual_seed(5), dtype=want.dtype)
        want.backward(seed)
        if isinstance(got, S.ShardedTensor):
            got.backward(sharded(seed, got.sharding_spec()))
        else:
            got.backward(seed)
        for leaf, st in zip(leaves, mine):
            if leaf.grad is not None:
                assert torch.allclose(whole(st.grad), leaf.grad), where


ELEMENTWISE = {
    "unary": lambda x: torch.tanh(x).exp() * 2 - x / 3,
    "methods": lambda x: x.sigmoid().add(1).pow(2).clamp(max=2),
    "functional": lambda x: F.gelu(x) + F.leaky_relu(x, 0.1) + F.dropout(x, 0.5, training=False),
    "compare": lambda x: torch.where(x > 0, x, -x),
    "cast": lambda x: x.float() * 2,
    "like": lambda x: torch.zeros_like(x) + x,
    "bool": lambda x: (x > 0) & (x < 1),
    "contiguous": lambda x: x.contiguous().masked_fill(x < 0, 0.0),
}
BINARY = {
    "add": lambda x, y: x + y * 2,
    "mul": lambda x, y: torch.mul(x, y),
    "three": lambda x, y: torch.addcmul(x, x, y, value=0.5) - torch.lerp(x, y, 0.3),
    "max": lambda x, y: torch.maximum(x, y) / (1 + y * y),
}


def elementwise(rank, world):
    specs = specs_for((5, 4), range(world))
    some = [specs[name] for name in ("chunk 0", "one", "irregular", "twice")]
    for (name, function), spec in itertools.product(ELEMENTWISE.items(), some):
        with shardwise.debug.ledger() as log, shardwise.strict():
            function(sharded(values(5, 4), spec))
        assert not list(log), name
        compare(function, [values(5, 4)], [spec], name)
    for name, function in BINARY.items():
        for a, b in itertools.product(("chunk 0", "irregular", "one"), repeat=2):
            compare(function, [values(5, 4), values(5, 4, seed=1)], [specs[a], specs[b]], (name, a, b))
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_elementwise(world):
    assert all(run_ranks(elementwise, world))


def with_plain(rank, world):
    """Plain tensors count as the same everywhere; their gradients add up over the tiles."""
    for spec in specs_for((5, 4), range(world)).values():
        for shape in [(5, 4), (4,), (1, 4), (5, 1), ()]:
            leaf, other = values(5, 4).requires_grad_(), values(*shape, seed=1).requires_grad_()
            st, same = sharded(leaf.detach(), spec, requires_grad=True), other.detach().clone().requires_grad_()
            (leaf * other + other).pow(2).sum().backward()
            (st * same + same).pow(2).sum().backward()
            assert torch.allclose(whole(st.grad), leaf.grad) and torch.allclose(same.grad, other.grad), shape
    return True


def test_plain_operands():
    assert all(run_ranks(with_plain, 4))


def in_place(rank, world):
    specs = specs_for((5, 4), range(world))
    for spec, other in itertools.product(specs.values(), (specs["irregular"], specs["chunk 1"])):
        value, more = values(5, 4), values(5, 4, seed=1)
        st, extra = sharded(value, spec), sharded(more, other)
        tiles = [s.tensor for s in st.local_shards()]
        assert st.mul_(2) is st and st.add_(extra, alpha=3) is st
        st += 1
        F.relu(st, inplace=True)
        assert torch.allclose(whole(st), F.relu(value * 2 + more * 3 + 1))
        assert st.zero_() is st and st.fill_(2) is st and st.copy_(extra) is st
        assert torch.equal(whole(st), more) and st.copy_(value) is st and torch.equal(whole(st), value)
        st[1:3] = 7  # over the mesh, written back
        value[1:3] = 7
        assert torch.equal(whole(st), value)
        st.index_fill_(1, torch.tensor([0]), -1)
        assert torch.equal(whole(st), value.index_fill_(1, torch.tensor([0]), -1))
        assert all(s.tensor is t for s, t in zip(st.local_shards(), tiles))
        out = torch.mm(sharded(value, spec), torch.eye(4, dtype=torch.float64), out=sharded(more, spec))
        assert torch.allclose(whole(out), value)
    return True


def test_in_place_and_out():
    assert all(run_ranks(in_place, 2))


WEIGHT = values(6, 4, seed=9)
ANY = {
    "linear": lambda x: F.linear(x, WEIGHT, WEIGHT[:, 0]),
    "matmul": lambda x: x @ WEIGHT.t() @ WEIGHT,
    "itself": lambda x: x.t() @ x,
    "softmax": lambda x: torch.softmax(x, 0) + F.log_softmax(x, 1),
    "transpose": lambda x: x.transpose(0, 1).contiguous(),
    "chunk": lambda x: x.chunk(2, 0)[1] * 2,
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "view": lambda x: x.view(-1)[3:7],
    "index": lambda x: x[[4, 0, 2]],
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "sort": lambda x: x.sort(0).values,
    "cumsum": lambda x: x.cumsum(1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "loss": lambda x: F.mse_loss(x, WEIGHT[:5]),
    "split": lambda x: torch.stack(x.split(1, 1)[:2]),
    "argmax": lambda x: x.argmax(0),
}


def any_function(rank, world):
    specs = specs_for((5, 4), range(world))
    for (name, function), which in itertools.product(ANY.items(), ("chunk 0", "turned 1", "irregular", "grid", "one")):
        compare(function, [values(5, 4)], [specs[which]], (name, which))
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_any_function_over_a_mesh_layout(world):
    assert all(run_ranks(any_function, world))


def told(rank, world):
    x = sharded(values(6, 4), grid((6, 4), [0, 1, 1, 0]))
    with shardwise.debug.ledger() as log:
        x @ WEIGHT.t()
    assert {"to_dtensor"} <= {e.op for e in log} and sum(e.bytes for e in log) > 0
    with pytest.raises(StrictError, match="reshard it to slabs of one dim first"), shardwise.strict():
        x.sum(0)
    other = sharded(values(6, 4), irregular((6, 4), range(world), 3))
    with pytest.raises(StrictError, match="add would communicate.*reshard one first"), shardwise.strict():
        x + other
    with shardwise.debug.ledger() as log:
        x + other
    assert {(e.op, e.reason) for e in log} == {("add", "operands in different tiles")}
    different = torch.full((4, 2), float(rank), dtype=torch.float64)
    with pytest.raises(RuntimeError, match="differs between rank 0 and rank 1"):
        x @ different
    return True


def test_the_ledger_tells_and_strict_refuses():
    assert all(run_ranks(told, 2))


def compared(rank, world):
    value = values(5, 4)
    specs = specs_for((5, 4), range(world))
    for a, b in itertools.product([specs[name] for name in ("chunk 0", "one", "irregular", "twice")], repeat=2):
        one, other = sharded(value, a), sharded(value, b)
        assert torch.equal(one, other) and torch.allclose(one, other) and one.equal(other)
        near = sharded(value + 1e-7, b)
        assert not torch.equal(one, near) and torch.allclose(one, near)
        assert not torch.allclose(one, near, rtol=0, atol=1e-9)
    last = value.clone()
    last[-1, -1] += 1  # one rank sees it, all say so
    assert not torch.equal(one, sharded(last, a)) and not torch.allclose(one, sharded(last, b))
    assert not torch.equal(one, sharded(values(4, 5), chunks(0, range(world))))
    for function in (torch.equal, torch.allclose):
        with pytest.raises(TypeError, match="need to be of type ShardedTensor"):
            function(one, value)
    return True


def test_comparison():
    assert all(run_ranks(compared, 2))


INITS = {
    "uniform_": lambda x: torch.nn.init.uniform_(x, -1, 2),
    "normal_": lambda x: torch.nn.init.normal_(x, 1, 3),
    "kaiming_uniform_": lambda x: torch.nn.init.kaiming_uniform_(x, a=0.2, mode="fan_out"),
    "kaiming_normal_": lambda x: torch.nn.init.kaiming_normal_(x),
    "xavier_uniform_": lambda x: torch.nn.init.xavier_uniform_(x, 2.0),
    "constant_": lambda x: torch.nn.init.constant_(x, 0.25),
    "zeros_": lambda x: torch.nn.init.zeros_(x),
    "ones_": lambda x: torch.nn.init.ones_(x),
    "dropout": lambda x: x.copy_(F.dropout(torch.ones_like(x), 0.4)) if not x.requires_grad else x,
    "method": lambda x: x.uniform_(2, 3),
    "exponential_": lambda x: x.exponential_(0.5),
}


def initialised(rank, world):
    for (name, init), spec in itertools.product(INITS.items(), specs_for((6, 5), range(world)).values()):
        for way, want in (("philox", shardwise.empty(6, 5, device_mesh=simulate(1))), ("torch", torch.empty(6, 5))):
            st = S.empty(spec, 6, 5, requires_grad=name.startswith(("u", "c", "k")))
            with shardwise.random.use(way):
                torch.manual_seed(4)
                init(want)
                torch.manual_seed(4)
                assert init(st) is st
            want = want.full_tensor() if way == "philox" else want
            assert torch.allclose(whole(st.detach()), want), (name, way)
    return True


def test_initialisers():
    assert all(run_ranks(initialised, 4))


def overridden(rank, world):
    from shardwise.sharded.ops import registry

    st = S.ones(chunks(0, range(world)), 4)
    saved = dict(registry.custom_ops), {k: dict(v) for k, v in registry.spec_ops.items()}

    class Own(S.ChunkShardingSpec):
        pass

    try:

        @S.custom_sharded_op_impl(torch.asin)
        def asin(types, args, kwargs, process_group):
            return types, args, kwargs, process_group

        @S.custom_sharding_spec_op(Own, torch.bmm)
        def bmm(types, args, kwargs, process_group):
            return "mine"

        types, args, kwargs, group = torch.asin(st)
        assert types == (S.ShardedTensor,) and args[0] is st and kwargs == {} and group is st._process_group
        assert (
            torch.bmm(S.ones(Own(0, [f"rank:{r}/cpu" for r in range(world)]), 2, 2, 2), torch.ones(2, 2, 2)) == "mine"
        )
        with pytest.raises(TypeError, match="expects signature"):
            S.custom_sharded_op_impl(torch.acos)(lambda types: 0)
    finally:
        registry.custom_ops.clear()
        registry.custom_ops.update(saved[0])
        registry.spec_ops.clear()
        registry.spec_ops.update(saved[1])
    return True


def test_custom_ops():
    assert all(run_ranks(overridden, 2))


def surface(rank, world):
    spec = irregular((5, 4), range(world), 0)
    st = sharded(values(5, 4), spec, requires_grad=True)
    assert st.is_leaf and st.grad is None and st.grad_fn is None and st.requires_grad
    seen = []
    twice = st * 2
    handle = twice.register_hook(lambda g: seen.append(whole(g)))
    twice.sum().backward()
    handle.remove()
    assert torch.equal(seen[0], torch.ones(5, 4, dtype=torch.float64)) and st.grad is st.grad
    st.grad = None
    assert st.grad is None
    st.grad = sharded(values(5, 4, seed=3), chunks(0, range(world)))  # in other tiles
    assert torch.equal(whole(st.grad), values(5, 4, seed=3))
    st.data.zero_()
    assert whole(st.detach()).count_nonzero() == 0
    (only,) = torch.autograd.grad((st + 1).prod(), [st], allow_unused=True)
    assert torch.equal(whole(only), torch.ones(5, 4, dtype=torch.float64))
    with torch.no_grad():
        assert not (st + 1).requires_grad
    assert float(S.full(chunks(0, range(world)), (1,), 2.5)) == 2.5 and S.ones(chunks(0, range(world)), 1).item() == 1
    assert S.ones(chunks(0, range(world)), 2, 2).tolist() == [[1, 1], [1, 1]]
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        (st + 1).backward()
    with pytest.raises(TypeError, match="must be one too, got Tensor"):
        (st + 1).backward(torch.ones(5, 4))
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_autograd_surface(world):
    assert all(run_ranks(surface, world))


def replacing(rank, world):
    """Hooks of a leaf give another gradient, however many tiles a rank holds of it."""
    value = values(6, 4)
    for name, spec in specs_for((6, 4), range(world)).items():
        st, seen = sharded(value, spec, requires_grad=True), []
        st.register_hook(lambda g, seen=seen: seen.append(whole(g)))
        st.register_hook(lambda g: g * 3)
        gone = st.register_hook(lambda g: g * 100)
        last = st.register_hook(lambda g: g + 1)
        gone.remove()
        for times in (1, 2):  # gradients add up
            (st * st).sum().backward()
            assert torch.allclose(whole(st.grad), times * (6 * value + 1)), name
        (first,) = torch.autograd.grad((st * st).sum(), [st], create_graph=True)
        assert torch.allclose(whole(first.detach()), 6 * value + 1) and torch.allclose(whole(st.grad), 12 * value + 2)
        last.remove()
        (second,) = torch.autograd.grad(first.sum(), [st])
        assert torch.allclose(whole(second), torch.full_like(value, 18.0)), name  # the hook's 3, twice
        assert len(seen) == 4 and torch.allclose(seen[0], 2 * value), name
    return True


def test_hooks_replace_gradients_of_leaves():
    assert all(run_ranks(replacing, 2))


def printed(rank, world):
    st = sharded(values(4, 3), chunks(0, range(world)))
    assert f"{st}" == str(st) == repr(st) and repr(st).startswith("ShardedTensor(shape=")
    assert f"{sharded(torch.tensor(2.5), on_one((), world - 1)):.2f}" == "2.50"
    return True


def test_printing():
    assert all(run_ranks(printed, 2))
