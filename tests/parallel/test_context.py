"""Context parallel: the zigzag split, the context manager on distributed and on plain tensors, its errors."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwise
from shardwise import (
    DTensor,
    LayoutError,
    MeshError,
    Replicate,
    RuleError,
    Shard,
    distribute_tensor,
    simulate,
)
from shardwise.attention.sequence import current_way
from shardwise.parallel import (
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    sequence_exchange,
    set_rotate_method,
    zigzag,
)
from tests.values import seeded
from tests.workers import device_mesh, run_ranks

R = Replicate()
WAYS = ("ring", "gather")


# ---------------------------------------------------------------- the pieces


@pytest.mark.parametrize("length, ranks", [(16, 4), (17, 4), (3, 4), (0, 2), (5, 1), (40, 3)])
def test_zigzag_gives_everyone_a_chunk_of_each_half(length, ranks):
    rows = Shard(0, pieces=zigzag(0, length, ranks).pieces).pieces or ((),)
    x = distribute_tensor(torch.arange(length), simulate(ranks), [zigzag(0, length, ranks)])
    held = [part.tolist() for part in x.to_local().ranks]
    assert sorted(i for part in held for i in part) == list(range(length)), rows
    seen = [sum(i + 1 for i in part) for part in held]  # keys a rank's queries see
    if length % (2 * ranks) == 0:
        assert len(set(seen)) == 1
    assert max(seen, default=0) - min(seen, default=0) <= 2 * length + 2
    assert torch.equal(x.full_tensor(), torch.arange(length))


def test_zigzag_over_two_axes_deals_to_all_their_ranks():
    x = distribute_tensor(torch.arange(16), simulate((2, 2)), zigzag(0, 16, (2, 2)))
    flat = distribute_tensor(torch.arange(16), simulate(4), [zigzag(0, 16, 4)])
    assert [t.tolist() for t in x.to_local().ranks] == [t.tolist() for t in flat.to_local().ranks]


# ---------------------------------------------------------------- the context manager


class Block(torch.nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.project = (
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 3 * width),
            torch.nn.Linear(width, width),
        )

    def forward(self, x, position):
        q, k, v = self.qkv(self.norm(x + position)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.project(y.transpose(1, 2).flatten(2))


def block_and_inputs(length):
    torch.manual_seed(3)
    block = Block().double()
    return (
        block,
        torch.randn(2, length, 8, dtype=torch.float64),
        torch.randn(length, 8, dtype=torch.float64),
        torch.randn(2, length, 8, dtype=torch.float64),
    )


def distributed_program(mesh, length, way):
    """A model on DTensors: sequence over cp, batch over dp."""
    block, x, position, target = block_and_inputs(length)
    (block(x, position) * target).mean().backward()
    want = {name: p.grad for name, p in block.named_parameters()}
    mine, *_ = block_and_inputs(length)
    shardwise.distribute_module(mine, mesh)
    places = [Shard(0), R] if len(mesh.mesh.shape) == 2 else [R]
    cp = mesh["cp"] if len(places) == 2 else mesh
    whole = [R] * len(places)
    x, target = (distribute_tensor(t, mesh, places, src_data_rank=None) for t in (x, target))
    position = distribute_tensor(position, mesh, whole, src_data_rank=None)
    before = x.placements
    with (
        sequence_exchange(way),
        context_parallel(cp, buffers=[x, position, target], buffer_seq_dims=[1, 0, 1], no_restore_buffers={target}),
    ):
        assert x.placements[-1] == zigzag(1, length, mesh.mesh.shape[-1]) or mesh.mesh.shape[-1] == 1
        out = mine(x, position)
        (out * target).mean().backward()
    assert x.placements == before and position.placements == tuple(whole) and target.placements[-1].is_shard(1)
    torch.testing.assert_close(
        out.detach().full_tensor(),
        block(block_and_inputs(length)[1], block_and_inputs(length)[2]).detach(),
        rtol=1e-10,
        atol=1e-10,
    )
    for name, p in mine.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), want[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [16, 13, 3])
def test_context_parallel_on_distributed_tensors(length, way):
    distributed_program(simulate(4), length, way)
    distributed_program(simulate((2, 2), axis_names=("dp", "cp")), length, way)


def plain_program(rank, world_size, length):
    """PyTorch's own pattern: plain tensors, cut in place."""
    mesh = device_mesh((world_size,))
    for causal, way, keys in itertools.product((True, False), WAYS, (length, length + 5)):
        q, k, v = seeded((2, 2, length, 4), (2, 2, keys, 4), (2, 2, keys, 4))
        plain = [t.clone().requires_grad_() for t in (q, k, v)]
        want = F.scaled_dot_product_attention(*plain, is_causal=causal)
        want.square().sum().backward()
        mine = [q.clone(), k.clone(), v.clone()]
        with (
            sequence_exchange(way),
            context_parallel(mesh, buffers=mine, buffer_seq_dims=(2, 2, 2), no_restore_buffers={mine[1]}),
        ):
            assert mine[0].shape[2] < length or length < 2 * world_size
            for t in mine:
                t.requires_grad_()
            out = F.scaled_dot_product_attention(*mine, is_causal=causal)
            out.square().sum().backward()
            grads = [t.grad for t in mine]
            for t in mine:
                t.requires_grad_(False)
        assert torch.equal(mine[0], q) and torch.equal(mine[2], v)
        assert torch.equal(context_parallel_unshard(mesh, [mine[1]], [2])[0], k)
        whole = context_parallel_unshard(mesh, [out.detach(), *grads], [2, 2, 2, 2])
        for a, b in zip(whole, [want.detach(), *(t.grad for t in plain)]):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    block, x, position, target = block_and_inputs(length)
    loss = (block(x, position) * target).sum()
    loss.backward()
    mine, *_ = block_and_inputs(length)
    with context_parallel(mesh, buffers=[x, position, target], buffer_seq_dims=[1, 0, 1]):
        (mine(x, position) * target).sum().backward()
    for p, want in zip(mine.parameters(), block.parameters()):
        dist.all_reduce(p.grad)
        torch.testing.assert_close(p.grad, want.grad, rtol=1e-10, atol=1e-10)
    # a module whose attention cannot be seen says so, and works on DTensors
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    x = torch.randn(2, length, 8, dtype=torch.float64)
    want, y = layer(x, x, x, need_weights=False)[0], distribute_tensor(x, mesh, [R], src_data_rank=None)
    with context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[1, 1]), torch.no_grad():
        with pytest.raises(RuleError, match="give it DTensors"):
            layer(x, x, x, need_weights=False)
        out = layer(y, y, y, need_weights=False)[0]
    torch.testing.assert_close(out.full_tensor(), want.detach(), rtol=1e-10, atol=1e-10)
    # masks: whole, or the rows of this rank's queries
    q, k, v = seeded((2, 2, length, 4), (2, 2, length, 4), (2, 2, length, 4))
    seen = torch.rand(length, length, generator=torch.Generator().manual_seed(0)) > 0.3
    want = F.scaled_dot_product_attention(q, k, v, seen)
    rows = seen.clone()
    with context_parallel(mesh, buffers=[q, k, v, rows], buffer_seq_dims=[2, 2, 2, 0]):
        for mask in (seen, rows):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            torch.testing.assert_close(context_parallel_unshard(mesh, [out], [2])[0], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world_size, length", [(2, 8), (4, 24), (4, 21)])
def test_context_parallel_on_plain_tensors(world_size, length):
    run_ranks(plain_program, world_size, length)


def on_gloo_context(rank, world_size):
    for way, length in itertools.product(WAYS, (16, 13)):
        distributed_program(device_mesh((4,)), length, way)
        distributed_program(device_mesh((2, 2), ("dp", "cp")), length, way)


def test_context_parallel_on_distributed_tensors_of_processes():
    run_ranks(on_gloo_context, 4)


def test_into_the_split_and_back():
    mesh = simulate((2, 2), axis_names=("dp", "cp"))
    x = torch.randn(4, 9, 3, requires_grad=True)
    (cut,) = context_parallel_shard(mesh["cp"], [distribute_tensor(x, mesh, [Shard(0), R])], [-2])
    assert cut.placements == (Shard(0), zigzag(1, 9, 2))
    (back,) = context_parallel_unshard(mesh["cp"], [cut], [1])
    assert back.placements == (Shard(0), R)
    assert torch.equal(back.full_tensor(), x)
    (plain,) = context_parallel_shard(mesh["cp"], [x], [1])
    assert isinstance(plain, DTensor) and plain.placements == (zigzag(1, 9, 2),)


def test_errors_say_what_to_do():
    mesh, x = simulate(2), torch.zeros(2, 4)
    mine = distribute_tensor(x, mesh, [R])
    with pytest.raises(LayoutError, match="1 buffers and 0 buffer_seq_dims"), context_parallel(mesh, buffers=[mine]):
        pass
    with (
        pytest.raises(LayoutError, match=r"buffer_seq_dims\[0\] = 2 is out of range for a tensor of 2 dims"),
        context_parallel(mesh, buffers=[mine], buffer_seq_dims=[2]),
    ):
        pass
    with (
        pytest.raises(LayoutError, match="not among buffers"),
        context_parallel(mesh, buffers=[mine], buffer_seq_dims=[1], no_restore_buffers={x}),
    ):
        pass
    with (
        pytest.raises(MeshError, match=r"buffers\[0\] is a plain tensor"),
        context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
    ):
        pass
    leaf = distribute_tensor(x, mesh, [R]).requires_grad_()
    with (
        pytest.raises(LayoutError, match=r"buffers\[1\] requires grad"),
        context_parallel(mesh, buffers=[mine, leaf], buffer_seq_dims=[1, 1]),
    ):
        pass
    assert mine.placements == (R,)  # as it was
    with pytest.raises(MeshError, match="no axes in common"):
        context_parallel_shard(simulate(2, axis_names=("cp",)), [mine], [1])
    with pytest.raises(LayoutError, match="is cut on axis 'dp' already"):
        grid = simulate((2, 2), axis_names=("dp", "cp"))
        context_parallel_shard(grid["cp"], [distribute_tensor(x, grid, [Shard(1), R])], [1])
    with pytest.raises(LayoutError, match="ranks must be an int > 0"):
        zigzag(0, 4, 0)
    with pytest.raises(RuleError, match="'auto', 'gather' or 'ring', got 'p2p'"):
        sequence_exchange("p2p")
    with pytest.raises(RuleError, match="does not support using ring for kv shards rotation; use one of allgather, "):
        set_rotate_method("ring")
    set_rotate_method("alltoall")
    assert current_way() == "ring"
    set_rotate_method("auto")
    assert current_way() == "auto"
    with pytest.raises(ZeroDivisionError), context_parallel(mesh, buffers=[mine], buffer_seq_dims=[1]):
        raise ZeroDivisionError
    assert mine.placements == (R,)
    assert shardwise.experimental.context_parallel is shardwise.context_parallel is context_parallel
