"""Look-ups in sharded tables: every tiling, mode and option gives what one device gives."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwise
from shardwise import sharded as S
from shardwise.sharded.ops.lookup import Bags
from tests.sharded.common import chunks, irregular, on_one, sharded, specs_for, values, whole
from tests.workers import run_ranks

ROWS, WIDTH = 9, 5


def summed(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def some_specs(world):
    """Row-, column-, table- and grid-wise, several tiles a rank, any tiles."""
    every = specs_for((ROWS, WIDTH), range(world))
    return [(name, every[name]) for name in ("chunk 0", "turned 1", "one", "grid", "twice", "irregular")]


def own_ids(rank, *size, low=0):
    """Every rank's own, and one of them may have none."""
    return torch.randint(low, ROWS, size, generator=torch.Generator().manual_seed(rank))


def check(function, rank, spec, where, table=None):
    """function(table) on the sharded table equals that on the whole one; gradients of all ranks add up."""
    value = values(ROWS, WIDTH) if table is None else table
    plain, st = value.clone().requires_grad_(), sharded(value, spec, requires_grad=True)
    want, got = function(plain), function(st)
    assert type(got) is torch.Tensor and torch.allclose(got, want), where
    seed = values(*want.shape, seed=rank + 7)
    want.backward(seed)
    got.backward(seed)
    grad = whole(st.grad)
    assert torch.allclose(grad, summed(plain.grad)), where


def embeddings(rank, world):
    for name, spec in some_specs(world):
        for size in [(3, 4), (2, 1, 2), (rank, 2)]:
            ids = own_ids(rank, *size)
            check(lambda t, ids=ids: F.embedding(ids, t), rank, spec, (name, size))
        ids = own_ids(rank, 12)
        check(lambda t, ids=ids: F.embedding(ids, t, padding_idx=int(ids[0])), rank, spec, (name, "padding"))
        check(lambda t, ids=ids: F.embedding(ids, t, padding_idx=-1), rank, spec, (name, "negative padding"))
        check(lambda t, ids=ids: F.embedding(ids, t, scale_grad_by_freq=True), rank, spec, (name, "by frequency"))
        check(lambda t, ids=ids: F.embedding(ids.int(), t), rank, spec, (name, "int32"))
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_embedding(world):
    assert all(run_ranks(embeddings, world))


def bags(rank, world):
    flat, offsets = own_ids(rank, 8), torch.tensor([0, 3, 3, 7])
    last, weights = torch.tensor([0, 3, 8]), values(8, seed=rank).requires_grad_()
    for name, spec in some_specs(world):
        for mode in ("sum", "mean", "max"):
            two = own_ids(rank, 3, 4)
            check(lambda t, i=two, m=mode: F.embedding_bag(i, t, mode=m), rank, spec, (name, mode))
            check(lambda t, m=mode: F.embedding_bag(flat, t, offsets, mode=m), rank, spec, (name, mode, "offsets"))
            check(
                lambda t, m=mode: F.embedding_bag(flat, t, offsets, mode=m, padding_idx=int(flat[1])),
                rank,
                spec,
                (name, mode, "padding"),
            )
        check(lambda t: F.embedding_bag(flat, t, last, mode="sum", include_last_offset=True), rank, spec, "last")
        check(
            lambda t: F.embedding_bag(flat, t, offsets, mode="sum", per_sample_weights=weights), rank, spec, "weights"
        )
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_embedding_bag(world):
    assert all(run_ranks(bags, world))


@contextlib.contextmanager
def forced(pools):
    """Inside, bags are summed by the owners whatever that costs, or never."""
    saved = Bags.price
    Bags.price = lambda self, lookup: -(1 << 40) if pools and self.makes_sense else 1 << 50
    try:
        yield
    finally:
        Bags.price = saved


def both_ways(rank, world):
    flat, offsets = own_ids(rank, 8), torch.tensor([0, 3, 3, 7])
    nothing, no_bags = own_ids(rank, 0), torch.zeros(0, 3, dtype=torch.int64)
    mine = own_ids(rank, 5, 3) if rank else no_bags  # rank 0 has no bags at all
    for (name, spec), pools in itertools.product(some_specs(world), (True, False)):
        with forced(pools):
            for mode in ("sum", "mean"):
                where = (name, pools, mode)
                check(lambda t, m=mode: F.embedding_bag(mine, t, mode=m), rank, spec, where)
                check(lambda t, m=mode: F.embedding_bag(nothing, t, offsets * 0, mode=m), rank, spec, where)
                check(lambda t, m=mode: F.embedding_bag(flat.int(), t, offsets.int(), mode=m), rank, spec, where)
                check(
                    lambda t, m=mode: F.embedding_bag(flat, t, offsets, mode=m, scale_grad_by_freq=True),
                    rank,
                    spec,
                    (where, "by frequency"),
                )
                check(
                    lambda t, m=mode: F.embedding_bag(flat, t, offsets, mode=m, padding_idx=int(flat[1]) - ROWS),
                    rank,
                    spec,
                    (where, "padding"),
                )
            weights_get_gradients(flat, offsets, spec, (name, pools))
    return True


def weights_get_gradients(flat, offsets, spec, where):
    """Those of the table and of the weights, and of the weights alone."""
    for learns in (True, False):
        plain, st = values(ROWS, WIDTH).requires_grad_(learns), sharded(values(ROWS, WIDTH), spec, requires_grad=learns)
        one, other = values(8, seed=3).requires_grad_(), values(8, seed=3).requires_grad_()
        want = F.embedding_bag(flat, plain, offsets, mode="sum", per_sample_weights=one, padding_idx=int(flat[0]))
        got = F.embedding_bag(flat, st, offsets, mode="sum", per_sample_weights=other, padding_idx=int(flat[0]))
        assert torch.allclose(want, got), where
        want.square().sum().backward()
        got.square().sum().backward()
        assert torch.allclose(one.grad, other.grad), where
        if learns:
            assert torch.allclose(whole(st.grad), summed(plain.grad)), where


@pytest.mark.parametrize("world", [2, 4])
def test_bags_at_the_owners_or_here(world):
    assert all(run_ranks(both_ways, world))


def fewer_bytes(rank, world):
    """Few large bags are summed at the owners; many bags of few rows fetch each row once."""
    rows, width, size = 64, 16, 8
    spec, value = chunks(0, range(world)), values(rows, width)
    away = torch.arange(rows).chunk(world)[(rank + 1) % world]
    told = 8 * (world - 1) * (4 + 3)  # limits, prices, and three numbers for the one tile here
    for ids, ids_in, back in (
        (away.repeat(2).view(4, -1), 8 * (2 * len(away) + 4), 4),  # what the neighbour asks for: ids and lengths
        (away[:2].repeat(50).view(50, 2), 8 * 2, 2),
    ):
        for learns in (False, True):
            st = sharded(value, spec, requires_grad=learns)
            with shardwise.debug.ledger() as log:
                got = F.embedding_bag(ids, st, mode="mean")
                if learns:
                    got.sum().backward()
            assert torch.allclose(got, F.embedding_bag(ids, value, mode="mean"))
            moved = [told, ids_in, back * width * size] + [back * width * size] * learns
            assert [(e.op, e.bytes) for e in log] == [("embedding_bag", n) for n in moved]
            assert [e.backward for e in log] == [False] * 3 + [True] * learns
    return True


def test_bags_take_the_cheaper_way():
    assert all(run_ranks(fewer_bytes, 2))


def odd_bags(rank, world):
    """Offsets that make no sense are refused by torch's own words, and nobody waits."""
    st = sharded(values(ROWS, WIDTH), chunks(0, range(world)))
    ids = torch.tensor([1, 2, 3])
    odd = torch.tensor([1, 2]) if rank == 0 else torch.tensor([0, 2])
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"offsets\[0\] has to be 0"):
            F.embedding_bag(ids, st, odd, mode="sum")
    else:
        want = F.embedding_bag(ids, values(ROWS, WIDTH), odd, mode="sum")
        assert torch.allclose(F.embedding_bag(ids, st, odd, mode="sum"), want)
    low = values(ROWS, WIDTH).bfloat16()
    got = F.embedding_bag(ids.view(1, 3), sharded(low, chunks(0, range(world))), mode="sum")
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got, F.embedding_bag(ids.view(1, 3), low, mode="sum"), rtol=2**-7)
    module = torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
    S.shard_parameter(module, "weight", chunks(0, range(world)))
    with forced(True):
        module(ids.view(1, 3)).sum().backward()
    assert module.weight.local_tensor().grad.is_sparse
    return True


def test_odd_bags():
    assert all(run_ranks(odd_bags, 2))


def shortened(rank, world):
    """max_norm rewrites the rows looked up, by whichever rank."""
    for (name, spec), norm in itertools.product(some_specs(world), (2.0, 1.0, float("inf"))):
        plain, st = values(ROWS, WIDTH) * 3, sharded(values(ROWS, WIDTH) * 3, spec)
        everyone = torch.cat([own_ids(r, 3) for r in range(world)])
        F.embedding(everyone, plain, max_norm=1.5, norm_type=norm)
        ids = own_ids(rank, 3)
        got = F.embedding(ids, st, max_norm=1.5, norm_type=norm)
        assert torch.allclose(got, plain[ids]), (name, norm)
        assert torch.allclose(whole(st), plain), (name, norm)
        bag = F.embedding_bag(ids.view(1, -1), st, max_norm=1.0, norm_type=norm, mode="sum")
        F.embedding(everyone, plain, max_norm=1.0, norm_type=norm)
        assert torch.allclose(bag, plain[ids].sum(0, keepdim=True)), (name, norm)
    return True


def test_max_norm():
    assert all(run_ranks(shortened, 2))


def modules(rank, world):
    torch.manual_seed(0)
    for kind in (torch.nn.Embedding, torch.nn.EmbeddingBag):
        local, module = kind(ROWS, WIDTH), kind(ROWS, WIDTH)
        module.load_state_dict(local.state_dict())
        S.shard_parameter(module, "weight", irregular((ROWS, WIDTH), range(world), 1))
        ids = own_ids(rank, 4, 3)
        assert torch.allclose(module(ids), local(ids))
    sparse = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
    full = sparse.weight.detach().clone()
    dist.broadcast(full, 0)
    S.shard_parameter(sparse, "weight", chunks(0, range(world)))
    ids = own_ids(rank, 4)
    sparse(ids).sum().backward()
    tile = sparse.weight.local_tensor()
    assert tile.grad.is_sparse
    counts = summed(torch.bincount(ids, minlength=ROWS).float())
    want = counts[:, None].expand(ROWS, WIDTH)
    offset = sparse.weight.local_shards()[0].metadata.shard_offsets[0]
    assert torch.allclose(tile.grad.to_dense(), want[offset : offset + len(tile)])
    return True


def test_modules_and_sparse_gradients():
    assert all(run_ranks(modules, 2))


def moved(rank, world):
    """Rows travel once, and only those that are elsewhere."""
    spec = chunks(0, range(world))
    st = sharded(values(8, 4), spec)
    here = torch.arange(8).chunk(world)[rank].repeat(3)
    with shardwise.debug.ledger() as log:
        F.embedding(here, st)
    values_in = [e.bytes for e in log][-1]
    assert values_in == 0 and {e.kind for e in log} == {"all_to_all"} and {e.op for e in log} == {"embedding"}
    away = torch.arange(8).chunk(world)[(rank + 1) % world].repeat(3)
    with shardwise.debug.ledger() as log:
        F.embedding(away, st)
    assert [e.bytes for e in log][-1] == 8 // world * 4 * 8
    return True


def test_fewest_bytes():
    assert all(run_ranks(moved, 4))


def wrong(rank, world):
    st = sharded(values(ROWS, WIDTH), chunks(0, range(world)))
    texts = []
    for call, kind in [
        (lambda: F.embedding(torch.tensor([ROWS if rank else 0]), st), IndexError),
        (lambda: F.embedding_bag(torch.tensor([[-1 if rank else 0]]), st), IndexError),
        (lambda: F.embedding([1], st), TypeError),
        (lambda: F.embedding(torch.tensor([1]), sharded(values(2, 2, 2), chunks(0, range(world)))), ValueError),
        (lambda: F.embedding_bag(torch.tensor([1]), st), ValueError),
        (lambda: F.embedding_bag(torch.tensor([[1]]), st, mode="no"), ValueError),
        (lambda: F.embedding_bag(torch.tensor([[1]]), st, torch.tensor([0])), ValueError),
    ]:
        with pytest.raises(kind) as caught:
            call()
        texts.append(str(caught.value))
    assert "index out of range in self: rank 1 looks up row 9 of a table of 9 rows" in texts[0]
    assert "rank 1 looks up row -1" in texts[1]
    # ids that are sharded themselves: over the mesh
    ids = own_ids(0, 6)
    got = F.embedding(sharded(ids, chunks(0, range(world))), st)
    assert torch.allclose(whole(got), values(ROWS, WIDTH)[ids])
    lonely = sharded(values(ROWS, WIDTH), on_one((ROWS, WIDTH), world - 1))
    assert torch.allclose(F.embedding(own_ids(rank, 3), lonely), values(ROWS, WIDTH)[own_ids(rank, 3)])
    return True


def test_what_is_refused():
    assert all(run_ranks(wrong, 2))
