"""Look-ups in sharded tables: every tiling, mode and option gives what one device gives."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwise
from shardwise import sharded as S
from tests.sharded.common import chunks, irregular, on_one, sharded, specs_for, values, whole
from tests.workers import run_ranks

TIME = 90
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
    assert all(run_ranks(embeddings, world, timeout=TIME))


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
    assert all(run_ranks(bags, world, timeout=TIME))


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
    assert all(run_ranks(shortened, 2, timeout=TIME))


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
    assert all(run_ranks(modules, 2, timeout=TIME))


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
    assert all(run_ranks(moved, 4, timeout=TIME))


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
    assert all(run_ranks(wrong, 2, timeout=TIME))
