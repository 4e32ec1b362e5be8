"""Attention over cut sequences is exact: ring and gather, any split, forward, gradients and second derivatives."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import (
    Replicate,
    Shard,
    StrictError,
    distribute_tensor,
    simulate,
)
from shardwise.attention import ring
from shardwise.attention.blocks import visible_blocks
from shardwise.parallel import (
    context_parallel,
    sequence_exchange,
    zigzag,
)
from shardwise.testing import check_rule
from tests.values import seeded
from tests.workers import device_mesh, run_ranks

R = Replicate()
WAYS = ("ring", "gather")


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_are_what_the_mask_shows(causal):
    sets = [(), ((0, 7),), ((0, 2), (5, 6)), ((1, 3), (4, 7)), ((3, 5),), ((2, 3), (6, 7))]
    for rows, keys, by_piece in itertools.product(sets, sets, (False, True)):
        i = torch.tensor([i for a, b in rows for i in range(a, b)], dtype=torch.long).view(-1, 1)
        j = torch.tensor([j for a, b in keys for j in range(a, b)], dtype=torch.long)
        want = (j <= i) if causal else torch.ones(len(i), len(j), dtype=torch.bool)
        got = torch.zeros(want.shape, dtype=torch.long)
        for block in visible_blocks(rows, keys, causal, by_piece):
            part = got[slice(*block.rows), slice(*block.keys)]
            part += torch.ones(part.shape).tril().long() if block.causal else 1
            if block.causal:
                assert part.shape[0] == part.shape[1]
            if by_piece:
                assert j[slice(*block.keys)].tolist() == list(range(block.column, block.column + part.shape[1]))
        assert torch.equal(got, want.long()), (rows, keys)


# ---------------------------------------------------------------- DTensors


def splits(n, ranks):
    """Ways to cut a sequence of n."""
    odd = [0] * ranks
    odd[0], odd[-1] = n - n // 3, n // 3
    return [Shard(2), zigzag(2, n, ranks), Shard(2, sizes=odd)]


def spread(x, mesh, places):
    return distribute_tensor(x, mesh, places, src_data_rank=None).requires_grad_(x.is_floating_point())


def agrees(mesh, places, tensors, way, mask=None, mask_places=None, tolerance=1e-10, **kwargs):
    """Attention and all its gradients on these layouts are plain torch's; returns the output."""
    plain = [t.clone().requires_grad_() for t in tensors]
    plain_mask = None if mask is None else mask.clone().requires_grad_(mask.is_floating_point())
    want = F.scaled_dot_product_attention(*plain, plain_mask, **kwargs)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(want)
    want.backward(grad)
    mine = [spread(t, mesh, p) for t, p in zip(tensors, places, strict=True)]
    mine_mask = None if mask is None else spread(mask, mesh, mask_places)
    with sequence_exchange(way):
        out = F.scaled_dot_product_attention(*mine, mine_mask, **kwargs)
    close = lambda a, b: torch.testing.assert_close(a.detach().full_tensor(), b, rtol=tolerance, atol=tolerance)
    close(out, want.detach())
    out.backward(distribute_tensor(grad, mesh, [R] * len(out.placements), src_data_rank=None))
    for a, b in zip([*mine, mine_mask], [*plain, plain_mask], strict=True):
        if b is not None and b.requires_grad:
            close(a.grad, b.grad)
            assert a.grad.placements == a.placements
    return out


def all_splits(mesh, ranks, lengths, pairs):
    for (lq, lk), causal in lengths:
        tensors = seeded((2, 2, lq, 4), (2, 2, lk, 4), (2, 2, lk, 4))
        for way, (q, k) in itertools.product(WAYS, pairs(splits(lq, ranks), splits(lk, ranks))):
            out = agrees(mesh, ([q], [k], [k]), tensors, way, is_causal=causal)
            assert out.placements == spread(tensors[0], mesh, [q]).placements  # where the queries were


def test_any_split_of_queries_and_keys():
    all_splits(
        simulate(3), 3, itertools.product([(13, 13), (9, 14), (14, 9), (2, 11)], (False, True)), itertools.product
    )


def on_gloo_splits(rank, world_size):
    all_splits(device_mesh((world_size,)), world_size, [((9, 14), True)], lambda a, b: zip(a, reversed(b)))


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_split_on_processes(world_size):
    run_ranks(on_gloo_splits, world_size)


def many_forms(meshes):
    """Heads cut as well, masks of every shape, grouped heads, other head widths, batch dims that broadcast."""
    line, grid = meshes
    ranks = 4
    q, k, v = seeded((2, 4, 11, 4), (2, 4, 11, 4), (2, 4, 11, 4))
    cut = [zigzag(2, 11, ranks)]
    for way in WAYS:
        for seq, head in ((0, 1), (1, 0)):  # cp x tp and tp x cp
            places = [None, None]
            places[seq], places[head] = zigzag(2, 11, 2), Shard(1)
            out = agrees(grid, [places] * 3, (q, k, v), way, is_causal=True)
            assert list(out.placements) == places
        agrees(grid, [list(zigzag(2, 11, (2, 2)))] * 3, (q, k, v), way, is_causal=True)
        agrees(grid, [[Shard(0), Shard(2)]] * 3, (q, k, v), way, is_causal=True)
        agrees(grid, ([Shard(2), Shard(2)], [Shard(2), R], [R, Shard(2)]), (q, k, v), way, is_causal=True)
        agrees(grid, ([Shard(2), R], [Shard(2), Shard(2)], [Shard(2), Shard(3)]), (q, k, v), way, is_causal=True)
        agrees(line, ([Shard(2)], [zigzag(2, 11, ranks)], [R]), (q, k, v), way, is_causal=True)
        for heads, width in ((2, 4), (1, 3)):  # grouped heads, and values of another width
            few = seeded((2, heads, 11, 4), (2, heads, 11, width), seed=3)
            agrees(line, [cut] * 3, (q, *few), way, is_causal=True, enable_gqa=True, scale=0.3)
        agrees(
            grid, [[zigzag(2, 11, 2), Shard(1)]] * 3, (q, *seeded((2, 2, 11, 4), (2, 2, 11, 4))), way, enable_gqa=True
        )
        # batch dims that broadcast, and none at all
        agrees(line, [[Shard(2)]] * 3, (q, k[:1], v[:, :1]), way, is_causal=True)
        agrees(line, [[Shard(1)]] * 3, (q[0], k[0], v[0]), way, is_causal=True)
        agrees(line, [[Shard(0)]] * 3, (q[0, 0], k[0, 0], v[0, 0]), way, is_causal=True)
        # masks: of bools and of numbers (with their gradient), by rows, for all rows, with a query that sees nothing
        seen = torch.rand(11, 11, generator=torch.Generator().manual_seed(2)) > 0.4
        seen[:, 0], seen[3] = True, False
        bias = seeded((2, 1, 11, 11), (1, 11), (11,), seed=5)
        for mask, rows in ((seen, [R]), (seen, [Shard(0)]), (seen, [Shard(1)]), (bias[0], [Shard(2)]), (bias[0], [R]),
                           (bias[1], [R]), (bias[2], [R]), (bias[2], [Shard(0)])):  # fmt: skip
            agrees(line, [cut] * 3, (q, k, v), way, mask, rows)
            agrees(
                line,
                ([Shard(2)], cut, cut),
                (q[:, :, :5], k, v),
                way,
                mask[..., :5, :] if mask.dim() > 1 and mask.shape[-2] > 1 else mask,
                rows,
            )
        agrees(grid, [[zigzag(2, 11, 2), Shard(1)]] * 3, (q, k, v), way, bias[0], [Shard(2), R])
        # nothing to attend with, or to
        for lq, lk in ((0, 5), (5, 0)):
            agrees(line, [[Shard(2)]] * 3, seeded((1, 2, lq, 4), (1, 2, lk, 4), (1, 2, lk, 4)), way)


def test_many_forms():
    many_forms((simulate(4), simulate((2, 2))))


def on_gloo_forms(rank, world_size):
    many_forms((device_mesh((4,)), device_mesh((2, 2))))


def test_many_forms_on_processes():
    run_ranks(on_gloo_forms, 4)


CASES = {
    "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(2, 2, 7, 4)] * 3),
    "lengths": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(2, 5, 4), (2, 8, 4), (2, 8, 3)]),
    "grouped": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), [(4, 7, 4), (2, 7, 4), (2, 7, 4)]),
    "bias": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), [(2, 2, 6, 4)] * 3 + [(2, 6, 6)]),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(3,), (2, 2), (2, 1, 2)], ids=str)
def test_random_layouts(shape, way):
    """Any mixture of layouts, pending sums too."""
    for name, (function, shapes) in CASES.items():
        with sequence_exchange(way):
            check_rule(function, [seeded(*shapes)], [simulate(shape)], limit=12, seed=len(name), tolerance=1e-10)


def second_derivatives(mesh, ranks, way):
    q, k, v, m = seeded((1, 2, 6, 4), (1, 2, 7, 4), (1, 2, 7, 4), (6, 7))
    places = ([zigzag(2, 6, ranks)], [Shard(2)], [Shard(2)], [R])

    def penalty(q, k, v, m):
        out = F.scaled_dot_product_attention(q, k, v, m, is_causal=False)
        first = torch.autograd.grad((out * out).sum(), (q, k, v, m), create_graph=True)
        return sum((g * g).sum() for g in first)

    plain = [t.clone().requires_grad_() for t in (q, k, v, m)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        penalty(*plain).backward()
    with sequence_exchange(way):
        mine = [spread(t, mesh, p) for t, p in zip((q, k, v, m), places)]
        penalty(*mine).backward()
    for a, b in zip(mine, plain):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives(way):
    second_derivatives(simulate(3), 3, way)


def on_gloo_second_derivatives(rank, world_size):
    for way in WAYS:
        second_derivatives(device_mesh((world_size,)), world_size, way)


def test_second_derivatives_on_processes():
    run_ranks(on_gloo_second_derivatives, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    tensors = [t.to(dtype) for t in seeded((1, 2, 12, 8), (1, 2, 12, 8), (1, 2, 12, 8))]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for way in WAYS:
        out = agrees(simulate(3), [[zigzag(2, 12, 3)]] * 3, tensors, way, is_causal=True, tolerance=tolerance)
        assert out.dtype == dtype


def test_autocast_computes_in_its_dtype():
    tensors = [t.float() for t in seeded((1, 2, 12, 8), (1, 2, 12, 8), (1, 2, 12, 8))]
    mine = [spread(t, simulate(3), [Shard(2)]) for t in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        want = F.scaled_dot_product_attention(*tensors, is_causal=True)
        for way in WAYS:
            with sequence_exchange(way):
                out = F.scaled_dot_product_attention(*mine, is_causal=True)
            assert out.dtype == want.dtype == torch.bfloat16
            torch.testing.assert_close(out.detach().full_tensor(), want, rtol=2e-2, atol=2e-2)
    out.float().sum().backward()
    assert mine[0].grad.dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_fused_kernels_of_a_gpu(dtype):
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    tensors = [t.to("cuda", dtype) for t in seeded((2, 4, 133, 64), (2, 4, 133, 64), (2, 4, 133, 64))]
    for way, causal in itertools.product(WAYS, (False, True)):
        agrees(
            simulate(4, device="cuda"), [[zigzag(2, 133, 4)]] * 3, tensors, way, is_causal=causal, tolerance=tolerance
        )


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("which", range(3))
def test_expanded_queries_keys_and_values(which, dim):
    """Tensors whose elements share memory, and whose strides tell no order."""
    tensors = [
        torch.randn(2, 3, 8, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3)
    ]
    results = []
    for made in (torch.clone, lambda t: distribute_tensor(t, simulate(4), [Shard(2)])):
        leaves = [made(t).requires_grad_() for t in tensors]
        used = [t.narrow(dim, 0, 1).expand(t.shape) if i == which else t for i, t in enumerate(leaves)]
        out = F.scaled_dot_product_attention(*used)
        (out * out).sum().backward()
        results.append(
            [t.full_tensor() if hasattr(t, "full_tensor") else t for t in (out, *(leaf.grad for leaf in leaves))]
        )
    torch.testing.assert_close(results[1], results[0])


def test_the_output_is_stored_as_torch_stores_it():
    x = torch.randn(2, 12, 4, 8)
    q, mine = x.transpose(1, 2), distribute_tensor(x, simulate(3), [Shard(1)]).transpose(1, 2)
    want, out = (F.scaled_dot_product_attention(t, t, t, is_causal=True) for t in (q, mine))
    assert out.stride() == want.stride()
    torch.testing.assert_close(out.transpose(1, 2).view(2, 12, 32).full_tensor(), want.transpose(1, 2).view(2, 12, 32))


# ---------------------------------------------------------------- what travels


def test_a_ring_moves_keys_and_values_once_forward_and_their_gradients_too():
    n, ranks = 24, 4
    tensors = seeded((1, 2, n, 4), (1, 2, n, 4), (1, 2, n, 4))
    mine = [spread(t, simulate(ranks), [zigzag(2, n, ranks)]) for t in tensors]
    kv = 2 * tensors[1].nbytes
    with sequence_exchange("ring"), shardwise.debug.ledger() as log:
        out = F.scaled_dot_product_attention(*mine, is_causal=True)
    assert {e.kind for e in log} == {"all_to_all"} and len(log) == ranks - 1
    assert sum(e.bytes for e in log) == (ranks - 1) * kv
    with shardwise.debug.ledger() as log:
        out.sum().backward()
    back = [e for e in log if e.op == "scaled_dot_product_attention"]
    assert all(e.backward for e in back)
    assert sum(e.bytes for e in back) == (ranks - 1) * kv + ranks * kv
    with sequence_exchange("gather"), shardwise.debug.ledger() as log:
        out = F.scaled_dot_product_attention(*mine, is_causal=True)
        out.sum().backward()
    kinds = [(e.kind, e.backward) for e in log if e.op == "scaled_dot_product_attention"]
    assert sorted(kinds) == [("all_gather", False)] * 2 + [("reduce_scatter", True)] * 2


def test_nothing_travels_where_keys_are_whole():
    q, k, v = seeded((1, 2, 12, 4), (1, 2, 12, 4), (1, 2, 12, 4))
    mesh = simulate(3)
    with shardwise.strict():
        F.scaled_dot_product_attention(
            *(distribute_tensor(t, mesh, p) for t, p in zip((q, k, v), ([Shard(2)], [R], [R]))), is_causal=True
        )


def test_size_decides_and_a_memory_cap_counts():
    small, mesh = seeded((1, 1, 64, 8), (1, 1, 64, 8), (1, 1, 64, 8)), simulate(2)
    mine = [distribute_tensor(t, mesh, [Shard(2)]) for t in small]

    def kinds():
        with shardwise.debug.ledger() as log:
            F.scaled_dot_product_attention(*mine)
        return {e.kind for e in log}

    assert kinds() == {"all_gather"}
    with shardwise.memory_cap(6000):  # whole keys and values are 8192 bytes
        assert kinds() == {"all_to_all"}
    large = [torch.zeros(1, 1, 70_000, 8, dtype=torch.float64)] * 2
    mine = [
        distribute_tensor(torch.zeros(1, 1, 1, 8, dtype=torch.float64), mesh, [Shard(2)]),
        *(distribute_tensor(t, mesh, [Shard(2)]) for t in large),
    ]
    assert kinds() == {"all_to_all"}


def test_a_few_queries_ask_every_rank_for_its_part_of_the_answer():
    """Long keys that are cut, queries that are not: what travels does not grow with the keys."""
    mesh = simulate(4)
    seen = torch.rand(3, 80, generator=torch.Generator().manual_seed(1)) > 0.5
    seen[1] = False  # a query that sees nothing
    for keys in ([Shard(2)], [zigzag(2, 80, 4)], [Shard(2, sizes=(0, 70, 9, 1))]):
        for extra in ({}, {"is_causal": True}, {"enable_gqa": True}):
            tensors = seeded((2, 4, 3, 4), *[(2, 2 if "enable_gqa" in extra else 4, 80, 4)] * 2)
            with shardwise.debug.ledger() as log:
                out = agrees(mesh, ([R], keys, keys), tensors, "auto", **extra)
            assert out.placements == (R,)
            assert not {e.kind for e in log if e.op == "scaled_dot_product_attention"} & {"all_gather", "all_to_all"}
        agrees(mesh, ([R], keys, keys), seeded((2, 4, 3, 4), (2, 4, 80, 4), (2, 4, 80, 4)), "auto", seen, [R])
    grid = simulate((2, 2))
    agrees(
        grid,
        ([Shard(1), R], [Shard(1), Shard(2)], [Shard(1), Shard(2)]),
        seeded((2, 4, 3, 4), (2, 4, 80, 4), (2, 4, 80, 4)),
        "auto",
    )


@pytest.mark.parametrize("grad", [False, True])
def test_a_ring_never_holds_the_keys_of_more_than_a_rank_and_keeps_its_own(grad, monkeypatch):
    ranks, n = 4, 32
    tensors = seeded((1, 2, n, 4), (1, 2, n, 4), (1, 2, n, 4))
    mine = [spread(t, simulate(ranks), [zigzag(2, n, ranks)]) for t in tensors]
    seen = []
    attend = ring.attend
    monkeypatch.setattr(ring, "attend", lambda q, k, *rest: seen.append(k.shape[-2]) or attend(q, k, *rest))
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t),
        sequence_exchange("ring"),
        torch.set_grad_enabled(grad),
    ):
        F.scaled_dot_product_attention(*mine, is_causal=True)
    assert set(seen) == {n // ranks} and len(seen) == ranks * ranks
    operands, lse = 4 * tensors[0].nbytes, tensors[0].nbytes // 4  # q, k, v and the output; a number a query
    assert sum(kept) == (operands + lse if grad else 0)


def test_strict_refuses_a_ring_nobody_asked_for():
    mine = [distribute_tensor(t, simulate(2), [Shard(2)]) for t in seeded((1, 1, 4, 4), (1, 1, 4, 4), (1, 1, 4, 4))]
    for way in WAYS:
        with (
            sequence_exchange(way),
            shardwise.strict(),
            pytest.raises(StrictError, match="scaled_dot_product_attention"),
        ):
            F.scaled_dot_product_attention(*mine)
        with sequence_exchange(way), shardwise.strict(), context_parallel(simulate(2)):
            F.scaled_dot_product_attention(*mine)
