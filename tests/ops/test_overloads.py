"""Calls that the database of operators does not make: aten's overloads as they are, odd numbers and odd shapes."""

import math

import pytest
import torch

from shardwise import Partial, Replicate, Shard, simulate
from shardwise.testing import check_rule, spread_out
from tests.values import compare, seeded

ATEN = torch.ops.aten


def x(*shape, seed=0):
    return seeded(shape, seed=seed)[0]


A, B, IMAGE = x(5, 7), x(7, 4, seed=1), x(2, 3, 4, 5, seed=2)
PLACES = torch.randint(0, 5, (3, 7), generator=torch.Generator().manual_seed(0))


def written(*, into):
    """The call of a form that writes, with its outs among the operands."""

    def call(form, args, outs):
        with torch.no_grad():
            result = form(*args, **dict(zip(into, outs, strict=True)))
        assert all(a is b for a, b in zip(result if len(into) > 1 else [result], outs, strict=True))
        return outs

    return call


OUTS = {
    "mul": (ATEN.mul.out, (A, A), [A], "out"),
    "mm": (ATEN.mm.out, (A, B), [A @ B], "out"),
    "max": (ATEN.max.dim_max, (A, 1), A.max(1), "max max_values"),
    "sort": (ATEN.sort.values, (A, 0), A.sort(0), "values indices"),
    "silu_backward": (ATEN.silu_backward.grad_input, (A, A), [A], "grad_input"),
    "flip": (ATEN.flip.out, (A, [1]), [A], "out"),
    "full_like": (ATEN.full_like.out, (A.long(), 2), [A], "out"),
    "native_layer_norm": (
        ATEN.native_layer_norm.out,
        (A, [7], None, None, 1e-5),
        torch.native_layer_norm(A, [7], None, None, 1e-5),
        "out0 out1 out2",
    ),
}


@pytest.mark.parametrize("name", OUTS)
def test_out(name):
    """Every result has a name of its own to be given by, and is written where it lies."""
    form, args, like, names = OUTS[name]
    outs = [torch.zeros_like(t) for t in like]
    check_rule(written(into=names.split()), [(form, args, outs)], limit=8, grad=False)


def test_out_of_a_list():
    """Those return nothing."""
    a = spread_out(A, simulate(3), [Shard(0)])
    outs = [spread_out(torch.zeros(5), simulate(3), [Shard(0)]).double() for _ in range(7)]
    assert ATEN.unbind_copy.int_out(a, 1, out=outs) is None
    for out, want in zip(outs, A.unbind(1), strict=True):
        compare(out, want, "unbind_copy", 0)


CALLS = {
    # a number that is added wherever the index says: what each rank adds is no part of a sum with x in it
    "scatter of a number": (lambda a, i: torch.scatter(a, 0, i, 2.0, reduce="add"), (A, PLACES)),
    "scatter_ of a number": (lambda a, i: a.clone().scatter_(0, i, 2.0, reduce="multiply"), (A, PLACES)),
    "polygamma_": (lambda a: ATEN.polygamma_.default(a.exp(), 1), (A,)),
    "narrow.Tensor": (lambda a, start: ATEN.narrow.Tensor(a, 1, start, 3), (A, torch.tensor(2))),
    "pinv": (lambda a, tol: ATEN.linalg_pinv.atol_rtol_float(a, rtol=tol.detach()), (A, torch.tensor(1e-3).double())),
    "nll_loss_forward": (lambda a, i, w: ATEN.nll_loss_forward(a[0], i[0, 0], w[0], 0, -100), (A, PLACES, A.exp())),
    "unique_consecutive": (lambda a: ATEN.unique_consecutive.default(a.round(), return_counts=True), (A,)),
    "stft": (lambda a: ATEN.stft.default(a, 4, 2, return_complex=True), (A,)),
    "embedding of complex": (lambda t, i: ATEN.embedding.default(t, i, 2), (B.to(torch.complex128), PLACES)),
    "embedding of integers": (lambda t, i: ATEN.embedding.default(t, i[0]), (PLACES, PLACES % 3)),
    "embedding of truths": (lambda t, i: torch.embedding(t, i), (B > 0, PLACES)),
    "embedding_bag": (
        lambda t, i, at: ATEN.embedding_bag.default(t, i, at),
        (B, PLACES[0], torch.tensor([0, 2, 2, 5])),
    ),
    "upsample by factors": (lambda a: ATEN.upsample_nearest2d.vec(a, None, [2.0, 1.5]), (IMAGE,)),
    "upsample to a size": (lambda a: ATEN.upsample_nearest2d.default(a, [5, 7], 2.5), (IMAGE,)),
    "upsample smoothly": (lambda a: ATEN.upsample_bilinear2d.vec(a, None, False, [2.0, 1.5]), (IMAGE,)),
    "stft.center": (lambda a: ATEN.stft.center(a, 4, 2, return_complex=True), (A,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_call(name):
    call, args = CALLS[name]
    check_rule(call, [args], limit=12)


def test_bound_of_random_numbers():
    """randint_like takes it as a tensor."""
    a, high = spread_out(A, simulate(3), [Shard(0)]), spread_out(torch.tensor(3), simulate(3), [Partial("max")])
    torch.manual_seed(0)
    got = ATEN.randint_like.Tensor(a, high)
    torch.manual_seed(0)
    compare(got, torch.randint_like(a, 3).redistribute(placements=[Replicate()]).full_tensor(), "", 0)
    assert got.min() >= 0 and got.max() == 2


@pytest.mark.parametrize("call", [lambda t: t * math.inf, lambda t: -math.inf * t, lambda t: t / 0.0, lambda t: t / 0])
def test_parts_and_infinities(call):
    """Parts of both signs have no sum any more: it is finished first, also if another number went before."""
    parts = spread_out(A, simulate(3), [Partial()])
    assert (parts * 2.0 / 4.0).placements == (Partial(),)
    compare(call(parts), call(A), "", 0)


def test_linear_with_another_bias():
    """torch adds what can be broadcast."""
    weight, row = x(4, 7, seed=3), x(1, 4, seed=4)
    samples = [(A, weight, row), (A[0], weight, row), (A, weight, row[0, 0])]
    check_rule(torch.nn.functional.linear, samples, limit=10)


@pytest.mark.parametrize("placements", [[Replicate()], [Shard(0)], [Shard(1)], [Partial()]], ids=str)
def test_where_nothing_is(placements):
    """Indices and masks that do not fit raise, on every layout."""
    a = spread_out(A, simulate(3), placements)
    for dim in (0, 1):
        with pytest.raises(RuntimeError, match="index 7 is out of bounds"):
            a.scatter(dim, torch.tensor([[0, 7, 1]]), 1.0)
    for mask in (torch.ones(4, dtype=torch.bool), torch.ones(1, 7, dtype=torch.bool)):
        for value in (1.0, A[0]):
            with pytest.raises(IndexError, match="mask"):
                a.clone()[mask] = value


def test_mask_of_another_type():
    """torch casts a number that goes where a mask is true."""
    check_rule(lambda i, a, v: i.index_put((a > 0,), v), [(PLACES, A[:3], torch.tensor(2.5))], limit=10)


@pytest.mark.parametrize("placements", [[Replicate()], [Shard(0)]], ids=str)
def test_errors_are_those_of_values(placements):
    """torch's meta kernels have others."""
    a = spread_out(A, simulate(3), placements)
    with pytest.raises(RuntimeError, match="Expected both inputs to be Half, Float or Double tensors"):
        torch.polar(a, a > 0)
    with pytest.raises(RuntimeError, match="'weight' must be 2-D"):
        torch.embedding(a[None], a[0].long())
    with pytest.raises(IndexError, match="indexing tensors could not be broadcast together"):
        a[torch.tensor([0, 1]), torch.tensor([0, 1, 2])]
    with pytest.raises(NotImplementedError, match="not implemented for 'Bool'"):
        torch.frac(a > 0)


def test_what_only_a_meta_kernel_refuses():
    """One row of classes with its target in a list."""
    check_rule(lambda a, i: torch.nn.functional.nll_loss(a[0], i[0, :1]), [(A, PLACES)], limit=10)
