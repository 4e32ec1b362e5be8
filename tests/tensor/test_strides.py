"""What a distributed tensor says of its memory is what plain torch says, and ops that go by strides go by those: also
where the local tensors lie otherwise in memory (made by a kernel that keeps another order, or arrived from elsewhere)."""

import random

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Partial, Replicate, Shard, ShardwiseError, distribute_tensor, simulate
from shardwise.comm.rank_tensor import RankTensor
from shardwise.engine.local_copies import LOCAL_COPIES
from shardwise.testing.spread import spread_out

LAYOUTS = {
    "R": ((3,), [Replicate()]),
    "S0": ((3,), [Shard(0)]),
    "S1 uneven": ((3,), [Shard(1, sizes=(1, 0, 3))]),
    "P": ((3,), [Partial()]),
    "S0 S1": ((2, 2), [Shard(0), Shard(1)]),
    "R S0": ((2, 2), [Replicate(), Shard(0)]),
}

MADE = {
    "new": lambda t: t * 1,
    "rfft": lambda t: torch.fft.rfft(t, dim=0),
    "sorted": lambda t: t.T.sort(0)[0],
    "nonzero": lambda t: (t > 0).nonzero(),
    "rows": lambda t: (t * 1)[1:],
    "columns": lambda t: (t * 1)[:, 1:3],
    "transposed": lambda t: (t * 1).T,
    "part of transposed": lambda t: (t * 1).T[1:],
    "sum of two orders": lambda t: t.T.contiguous().T + t,
    "permuted": lambda t: (t * 1).reshape(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda t: (t * 1).reshape(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "softmax": lambda t: (t.T.softmax(0) * 64).round(),  # "bytes" below compares every bit
    "scan": lambda t: t.T.cumsum(1),
}


def first_two(y):
    return y.as_strided((2, 2), y.stride()[:2]) if y.dim() > 1 and min(y.shape[:2]) > 1 else y.as_strided((1,), (1,))


VIEWED = {
    "view": lambda y: y.view(-1),
    "reshape": lambda y: y.reshape(-1),
    "flatten": lambda y: y.flatten(),
    "ravel": lambda y: y.ravel(),
    "view of mT": lambda y: y.mT.view(-1),
    "reshape of mT": lambda y: y.mT.reshape(-1),
    "contiguous": lambda y: y.contiguous(),
    "unflatten": lambda y: y.unflatten(0, (1, -1)),
    "merged": lambda y: y.flatten(0, 1) if y.dim() > 1 else y,
    "merged last": lambda y: y.flatten(-2) if y.dim() > 1 else y,
    "as_strided": lambda y: y.as_strided((2,), (1,)),
    "as_strided at": lambda y: y.as_strided((2,), (1,), y.storage_offset()),
    "first two": first_two,
    "real": lambda y: torch.view_as_real(y) if y.is_complex() else y[:1],
    "bytes": lambda y: y.view(torch.int32) if y.dtype == torch.float64 else y[:1],
    "diagonal": lambda y: y.diagonal() if y.dim() == 2 else y[0],
    "unfold": lambda y: y.unfold(0, 1, 1),
}


def write(t):
    t.mul_(3) if t.dtype.is_floating_point or t.dtype.is_complex else t.fill_(7)


def memory(t):
    return t.stride(), t.storage_offset(), t.is_contiguous()


def run(t, made, viewed, written):
    """What is said about memory, and the two tensors after the write; None where torch refuses the view."""
    y = MADE[made](t)
    try:
        v = VIEWED[viewed](y)
    except ShardwiseError:
        raise
    except RuntimeError:
        return [memory(y), "no view"], ()
    said = [memory(y), memory(v)]
    if written == "view":
        write(v)
    elif written == "base":
        write(y)
    return said, (y, v)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_whatever_is_in_memory(layout, made):
    """Strides, offsets, refusals, and who sees whose writes."""
    mesh_shape, placements = LAYOUTS[layout]
    # few bits, so that the parts of a sum add up exactly
    whole = torch.randint(-9, 10, (6, 4), generator=torch.Generator().manual_seed(0)).double() / 4
    for viewed in VIEWED:
        for written in ("view", "base"):
            said, wanted = run(whole.clone(), made, viewed, written)
            mine = spread_out(whole, simulate(mesh_shape), placements)
            heard, got = run(mine, made, viewed, written)
            assert heard == said, (viewed, written)
            for name, g, w in zip(("base", "view"), got, wanted, strict=False):  # none where there is no view
                torch.testing.assert_close(g.full_tensor(), w, rtol=1e-9, atol=1e-9, msg=f"{viewed}, {written}: {name}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_diagonals_are_filled_by_the_strides_of_one_device(layout):
    mesh_shape, placements = LAYOUTS[layout]
    whole = torch.randn(6, 4, dtype=torch.float64)
    for made in (lambda t: t * 1, MADE["sorted"], MADE["rows"], MADE["transposed"], MADE["part of transposed"]):
        for wrap in (False, True):
            want, got = made(whole.clone()), made(spread_out(whole, simulate(mesh_shape), placements))
            for target in (want, got):
                target.fill_diagonal_(9.0, wrap)
            assert got.stride() == want.stride()
            torch.testing.assert_close(got.full_tensor(), want)


def twisted(whole, placements, order):
    """A tensor that says it is contiguous, whose local tensors have their dims in memory in another order."""
    mesh = simulate(3)
    parts = distribute_tensor(whole, mesh, placements).to_local().ranks
    back = sorted(range(whole.dim()), key=order.__getitem__)
    stored = [part.permute(order).contiguous().permute(back) for part in parts]
    return DTensor.from_local(RankTensor(stored), mesh, placements, shape=whole.shape, stride=whole.stride())


@pytest.mark.parametrize("placements", [[Replicate()], [Shard(0)], [Shard(2)]], ids=str)
def test_local_memory_in_another_order(placements):
    """Nothing communicates, gradients flow, and a copy that is gone is forgotten."""
    whole = torch.randn(4, 3, 6, dtype=torch.float64)
    for view in (
        lambda t: t.view(12, 6),
        lambda t: t.flatten(0, 1),
        lambda t: t.contiguous(),
        lambda t: t.reshape(4, 18),
    ):
        got, want = twisted(whole, placements, (2, 0, 1)), whole.clone()
        for t in (got, want):
            leaf = t.clone(memory_format=torch.preserve_format).requires_grad_()
            y = leaf * 2
            seen = view(y)
            seen.mul_(3)
            seen[1].add_(1)
            y.sub_(5)
            t.seen, t.base, t.leaf = seen, y, leaf
            (seen * torch.arange(6.0, dtype=torch.float64).repeat(seen.shape[-1] // 6)).sum().backward()
        for name in ("seen", "base"):
            torch.testing.assert_close(getattr(got, name).full_tensor(), getattr(want, name))
        torch.testing.assert_close(got.leaf.grad.full_tensor(), want.leaf.grad)
        del got, t, seen, y, leaf
    assert not LOCAL_COPIES


STEPS = {
    "transpose": lambda t, r: t.transpose(r.randrange(t.dim()), r.randrange(t.dim())),
    "slice": lambda t, r: t.narrow(d := r.randrange(t.dim()), 0, max(t.shape[d] - 1, 1)),
    "step": lambda t, r: t[..., ::2],
    "from one": lambda t, r: t[1:] if t.shape[0] > 1 else t,
    "contiguous": lambda t, r: t.contiguous(),
    "clone": lambda t, r: t.clone(),
    "like": lambda t, r: torch.zeros_like(t) + 1,
    "add": lambda t, r: t + t.transpose(0, -1).contiguous().transpose(0, -1),
    "outer": lambda t, r: t + t.flatten()[:1],
    "neg": lambda t, r: -t,
    "where": lambda t, r: torch.where(t > 0, t, 0.0),
    "sum": lambda t, r: t.sum(r.randrange(t.dim()), keepdim=True).expand_as(t),
    "softmax": lambda t, r: t.softmax(r.randrange(t.dim())),
    "sort": lambda t, r: t.sort(r.randrange(t.dim()))[0],
    "cumsum": lambda t, r: t.cumsum(r.randrange(t.dim())),
    "flip": lambda t, r: t.flip(r.randrange(t.dim())),
    "roll": lambda t, r: t.roll(1, r.randrange(t.dim())),
    "cat": lambda t, r: torch.cat([t, t], r.randrange(t.dim())).narrow(0, 0, t.shape[0]),
    "stack": lambda t, r: torch.stack([t, t], r.randrange(t.dim() + 1)).select(0, 0),
    "expand": lambda t, r: t.unsqueeze(0).expand(2, *t.shape)[1],
    "reshape": lambda t, r: t.reshape(-1).reshape(t.shape),
    "flatten": lambda t, r: t.flatten(0, 1).unflatten(0, t.shape[:2]) if t.dim() > 1 else t,
    "pad": lambda t, r: F.pad(t, (1, 0)),
    "index": lambda t, r: t[torch.arange(t.shape[0] - 1, -1, -1)],
    "matmul": lambda t, r: t @ t.mT if t.dim() > 1 and t.numel() < 500 else t,
    "fft": lambda t, r: torch.fft.rfft(t, dim=r.randrange(t.dim())).real,
    "int": lambda t, r: t.round().to(torch.int32).to(t.dtype),
    "unfold": lambda t, r: t.unfold(0, 1, 1).squeeze(-1),
    "masked_fill": lambda t, r: t.masked_fill(t > 1, 0.5),
    "norm": lambda t, r: F.layer_norm(t, t.shape[-1:]),
    "dropout": lambda t, r: F.dropout(t, 0.3, training=False),
    "movedim": lambda t, r: t.movedim(0, -1),
}


@pytest.mark.parametrize("seed", range(24))
def test_random_programs_report_torchs_strides(seed):
    """After every step: strides, offset, contiguity in every memory format, and values."""
    choose = random.Random(seed)
    shape = choose.choice([(4, 6), (3, 4, 5), (2, 3, 4, 4), (5, 1, 3)])
    whole = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if len(shape) == 4:
        whole = whole.contiguous(memory_format=torch.channels_last)
    mesh_shape, placements = choose.choice(list(LAYOUTS.values()))
    if mesh_shape == (3,) and placements[0].is_shard() and len(shape) != 2:
        placements = [Shard(choose.randrange(len(shape)))]
    want, got = whole, spread_out(whole, simulate(mesh_shape), placements)
    done = []
    for _ in range(12):
        name, number = choose.choice(list(STEPS)), choose.randrange(10**6)
        done.append(name)
        want, got = (STEPS[name](t, random.Random(number)) for t in (want, got))
        assert memory(got) == memory(want), done
        if want.dim() == 4:
            last = torch.channels_last
            assert got.is_contiguous(memory_format=last) == want.is_contiguous(memory_format=last), done
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-9, atol=1e-9, msg=str(done))


FORMATS = [None, torch.preserve_format, torch.contiguous_format, torch.channels_last]
LIKE = {
    "empty_like": torch.empty_like,
    "zeros_like": torch.zeros_like,
    "full_like": lambda t, **k: torch.full_like(t, 2, **k),
    "rand_like": torch.rand_like,
    "randint_like": lambda t, **k: torch.randint_like(t, 5, **k),
    "clone": torch.clone,
    "to": lambda t, **k: t.to(torch.float32, **k),
    "to copy": lambda t, **k: t.to(t.dtype, copy=True, **k),
    "to cpu": lambda t, **k: t.to(device="cpu", copy=True, **k),
}


@pytest.mark.parametrize("name", LIKE)
def test_memory_formats(name):
    base = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    some = {
        "contiguous": base,
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "transposed": base.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        "holes": base[..., ::2],
        "expanded": base[:1].expand(2, 3, 4, 5),
        "one": base[:, :1],
        "none": base[:, :0],
    }
    for kind, whole in some.items():
        for memory_format in FORMATS:
            options = {} if memory_format is None else {"memory_format": memory_format}
            want = LIKE[name](whole, **options)
            for placements in ([Replicate()], [Shard(1)], [Shard(0)]):
                got = LIKE[name](spread_out(whole, simulate(3), placements), **options)
                assert memory(got) == memory(want), (kind, memory_format, placements)


@pytest.mark.parametrize("placements", [[Replicate()], [Shard(0)], [Partial()]], ids=str)
def test_out_is_resized_as_torch_does(placements):
    a, b = torch.randn(4, 5, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    for call in (
        lambda a, b, out: torch.add(a.T, b, out=out),
        lambda a, b, out: torch.mm(a, b, out=out),
        lambda a, b, out: torch.cat([a, b.T], out=out),
        lambda a, b, out: torch.sum(a.T, 0, out=out),
    ):
        want = call(a, b, torch.empty(0, dtype=torch.float64))
        mine = [spread_out(t, simulate(3), placements) for t in (a, b)]
        got = call(*mine, spread_out(torch.empty(0, dtype=torch.float64), simulate(3), [Replicate()]))
        assert memory(got) == memory(want)
        torch.testing.assert_close(got.full_tensor(), want)


def test_two_views_are_set_to_the_same_memory():
    x = spread_out(torch.randn(4, 5), simulate(3), [Shard(0)])
    assert x.is_set_to(x) and x.is_set_to(x.view(4, 5)) and x[1:].is_set_to(x[1:])
    assert not x.is_set_to(x.T) and not x[1:].is_set_to(x[:3]) and not x.is_set_to(x.clone())


@pytest.mark.parametrize("placements", [[Replicate()], [Shard(0)], [Shard(1)]], ids=str)
def test_gradients_lie_in_memory_as_their_leaves(placements):
    """AccumulateGrad's contract: the strides of a leaf without holes, else row by row."""
    base = torch.randn(4, 6, dtype=torch.float64)
    for whole in (base, base.T.contiguous().T, base[:, ::2], base[:1].expand(4, 6)):
        want = whole.detach().requires_grad_()
        got = spread_out(whole, simulate(3), placements, requires_grad=True)
        for leaf in (want, got):
            (leaf.T @ leaf).sin().sum().backward()
        assert memory(got.grad) == memory(want.grad)
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_that_kernels_store_by_columns(layout):
    """Singular vectors come from LAPACK by columns; the classes of `one_hot` row by row, whatever the input's order."""
    mesh_shape, placements = LAYOUTS[layout]
    whole = torch.randint(0, 9, (6, 4), generator=torch.Generator().manual_seed(0))
    mine = spread_out(whole, simulate(mesh_shape), placements)
    found = {
        "svd": lambda t: torch.linalg.svd(t.double()),
        "thin svd": lambda t: torch.linalg.svd(t.T.to(torch.complex64), full_matrices=False),
        "old svd": lambda t: torch.svd(t.double().reshape(2, 3, 4)),
        "one_hot": lambda t: (F.one_hot(t.T), F.one_hot(t.T, 12)),
    }
    for name, call in found.items():
        assert [y.stride() for y in call(mine)] == [y.stride() for y in call(whole)], name
