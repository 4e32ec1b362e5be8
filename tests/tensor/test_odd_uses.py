"""Uses of a tensor that programs make in passing: numpy's numbers and arrays, None, lists as indices, gradients from
outside, narrow floats, sequences of different lengths."""

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from shardwise import DTensor, Shard, StrictError, distribute_tensor, simulate, strict
from tests.tensor.common import R, checked_on, laid_out, layouts, on_one_axis, same, x

VALUE = x(5, 4)
INDICES = [
    numpy.array([2, 3]),
    numpy.array([-1, 0]),
    numpy.array([True, False, True, False, False]),
    numpy.array([[True, False, True, False]] * 5),
    numpy.array([[0, 1], [2, 3]]),
    numpy.array([], dtype=numpy.int64),
    numpy.array(3),
    numpy.int64(1),
    (numpy.int64(1), numpy.array([0, 2])),
    (slice(None), numpy.array([1, 2])),
    (numpy.array([0, 1]), 2),
    range(2),
    [],
    [2, 3],
    ((0, 1), (1, 2)),
    (..., [1, 2]),
    [[0, 1], [2, 3]],
    [slice(1, 3), 0],
    [None, 1],
    [torch.tensor(1), torch.tensor(2)],
    [torch.tensor([0, 1]), torch.tensor([1, 2])],
]


def indexing(mesh):
    """Reading and writing at everything that torch takes for an index."""
    for places in layouts(mesh, VALUE):
        for index in INDICES:
            where = f"[{index}] {places}"
            mine = laid_out(VALUE, mesh, places)
            same(mine[index], VALUE[index], where)
            for value in (7, VALUE[index] * 2):
                want, got = VALUE.clone(), mine.clone()
                want[index], got[index] = value, value
                same(got, want, where)


def numbers_of_numpy(mesh):
    """They are arguments like Python's own."""
    calls = [
        lambda t: t.sum(numpy.int64(0)),
        lambda t: t.reshape(numpy.int64(2), numpy.int32(10)),
        lambda t: t.sum((numpy.int64(0), 1)),
        lambda t: t * numpy.float64(2),
        lambda t: numpy.float64(2) * t,
        lambda t: t + numpy.arange(4.0),
        lambda t: t.cumsum(numpy.int64(1)).narrow(0, numpy.int64(1), numpy.int64(2)),
    ]
    for places in layouts(mesh, VALUE):
        for i, call in enumerate(calls):
            same(call(laid_out(VALUE, mesh, places)), call(VALUE), f"{i} {places}")


def compared_with_what_is_no_tensor(mesh):
    mine = laid_out(VALUE, mesh, on_one_axis(mesh, Shard(0)))
    assert (mine == None) is False and (mine != None) is True and (mine == None) is False  # noqa: E711
    assert (mine == "text") is False
    assert mine not in [None, "text"] and [None, "text"].count(mine) == 0
    with pytest.raises(TypeError):
        mine < None  # noqa: B015


def narrow_floats(mesh):
    """Casts to and from float8, which joins no other type, and what only copies."""
    value = (VALUE.abs() * 20).float()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        narrow = value.to(dtype)
        for places in layouts(mesh, value):
            mine = laid_out(value, mesh, places).to(dtype)
            assert mine.dtype == dtype
            for call in (
                lambda t: t,
                lambda t: t.t().contiguous(),
                lambda t: torch.cat([t[1:], t]),
                lambda t: t.clone(),
            ):
                same(call(mine).to(torch.float64), call(narrow).to(torch.float64), f"{dtype} {places}")


def plain_gradients(mesh):
    """A plain gradient counts as replicated, as every plain tensor does."""
    start = x(5, 4, seed=3)
    leaf = VALUE.clone().requires_grad_()
    (leaf.softmax(0) * leaf).backward(start)
    for places in layouts(mesh, VALUE):
        mine = laid_out(VALUE, mesh, places, requires_grad=True)
        (mine.softmax(0) * mine).backward(start)
        same(mine.grad, leaf.grad, places)
        (found,) = torch.autograd.grad((mine.softmax(0) * mine), mine, start)
        same(found, leaf.grad, places)
        with pytest.raises(RuntimeError, match="gradient of shape"):
            mine.softmax(0).backward(start.t())
    with strict(), pytest.raises(StrictError, match="a plain tensor meets"):
        (mine * 1).backward(start)


def numerical_gradients(mesh):
    """gradcheck and gradgradcheck of ops on cut dims. (What they call undefined gradients, C++ makes of the wrapper.)"""
    calls = [lambda t: t.softmax(0), lambda t: t.cumsum(0) @ t.t(), lambda t: torch.nn.functional.layer_norm(t, (3,))]
    for call in calls:
        for dim in (0, 1):
            mine = laid_out(x(4, 3), mesh, on_one_axis(mesh, Shard(dim)), requires_grad=True)
            assert torch.autograd.gradcheck(call, (mine,), check_undefined_grad=False)
            assert torch.autograd.gradgradcheck(call, (mine,), check_undefined_grad=False)


def padded_sequences(mesh):
    """Sequences of different lengths made one tensor: torch's own function writes them into a plain one."""
    values, weights = [x(5, 4), x(3, 4, seed=1), x(1, 4, seed=2)], x(3, 5, 4, seed=3)
    for side, value in (("right", 0.0), ("left", 1.5)):
        leaves = [v.clone().requires_grad_() for v in values]
        want = pad_sequence(leaves, batch_first=True, padding_value=value, padding_side=side)
        (want * weights).sum().backward()
        for places in layouts(mesh, values[0]):
            if any(p.is_shard() and p.pieces is not None for p in places):
                continue  # sizes that fit the first only
            mine = [laid_out(v, mesh, places, requires_grad=True) for v in values]
            got = pad_sequence(mine, batch_first=True, padding_value=value, padding_side=side)
            same(got, want, places)
            (got * weights).sum().backward()
            for m, leaf in zip(mine, leaves, strict=True):
                same(m.grad, leaf.grad, places)
            same(pad_sequence(mine), pad_sequence(leaves), places)


def packed_sequences(mesh):
    """Through recurrent modules and back."""
    value, lengths = x(3, 5, 4), torch.tensor([3, 5, 2])
    for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        module = kind(4, 3, 2, batch_first=True, bidirectional=True, dtype=torch.float64)

        def run(tensor, module=module):
            packed = pack_padded_sequence(tensor, lengths, batch_first=True, enforce_sorted=False)
            out, state = module(packed)
            out, found = pad_packed_sequence(out, batch_first=True)
            assert found.tolist() == lengths.tolist()
            (grad,) = torch.autograd.grad(out.sin().sum(), tensor)
            return out, state[0] if isinstance(state, tuple) else state, grad

        want = run(value.clone().requires_grad_())
        for places in layouts(mesh, value)[::3]:
            got = run(laid_out(value, mesh, places, requires_grad=True))
            for g, w in zip(got, want, strict=True):
                same(g, w, f"{kind.__name__} {places}")


def conjugate_and_negative_bits(mesh):
    """Told as on one device."""
    value = x(5, 4, dtype=torch.complex128)
    calls = [lambda t: t, torch.conj, lambda t: t.conj().clone(), lambda t: t.mH, lambda t: t.conj()[1:] * 2]
    calls += [lambda t: t.conj().imag, lambda t: t.conj().resolve_conj(), lambda t: t.conj().imag.resolve_neg()]
    for places in layouts(mesh, value):
        for call in calls:
            got, want = call(laid_out(value, mesh, places)), call(value)
            assert (got.is_conj(), torch.is_neg(got)) == (want.is_conj(), torch.is_neg(want)), places
            same(got, want.resolve_conj().resolve_neg(), places)


CHECKS = [
    indexing, numbers_of_numpy, compared_with_what_is_no_tensor, narrow_floats, plain_gradients, numerical_gradients,
    padded_sequences, packed_sequences, conjugate_and_negative_bits,
]  # fmt: skip
test_simulated, test_processes = checked_on(__name__, CHECKS, simulated=[(4,), (2, 3)], real=[(2,)])


def test_a_gradient_that_is_no_tensor():
    mine = distribute_tensor(VALUE, simulate((2,)), [R]).requires_grad_()
    with pytest.raises(TypeError, match="must be a tensor, got float"):
        DTensor.backward(mine * 1, 1.0)
