"""Writes: in-place ops, inplace=True, out=, and views written through. What plain torch shows afterwards, we show too, or
the write is refused with a RuleError."""

import random

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, RuleError, Shard, simulate
from shardwise.testing import spread_out
from tests.random.common import as_torch_draws
from tests.values import compare, layouts_of, seeded

MESHES = [(3,), (2, 2)]
LAYOUTS = [[Replicate()], [Shard(0)], [Shard(1)], [Shard(0, sizes=(0, 5, 0))], [Partial()]]


def x(*shape, seed=0):
    return seeded(shape, seed=seed)[0]


A, B, ROW = x(5, 7), x(5, 7, seed=1), x(7, seed=2)

WRITES = {
    "add_": lambda a: a.add_(B, alpha=2),
    "mul_ itself": lambda a: a.detach().mul_(a.detach()),
    "addmv_": lambda a: a[:, 0].contiguous().addmv_(a, ROW, alpha=0.5),
    "silu": lambda a: F.silu(a, inplace=True),
    "relu by position": lambda a: F.relu(a, True),
    "elu": lambda a: F.elu(a, 0.3, inplace=True),
    "leaky_relu": lambda a: F.leaky_relu(a, 0.3, inplace=True),
    "dropout": lambda a: F.dropout(a, 0.5, True, True),
    "eq_": lambda a: a.eq_(0.5),
    "normal_": lambda a: a.normal_(),
    "bernoulli_": lambda a: a.bernoulli_(0.5),
    "cumsum_": lambda a: a.cumsum_(0),
    "tril_": lambda a: a.tril_(),
    "index_fill_": lambda a: a.index_fill_(0, torch.tensor([0, 3]), 2.0),
    "masked_fill_": lambda a: a.masked_fill_(a > 0, 2.0),
    "index_add_": lambda a: a.index_add_(0, torch.tensor([1]), A[:1]),
    "set item": lambda a: a.__setitem__((slice(1, 3), 2), 4.0),
    "set mask": lambda a: a.__setitem__(a > 0, -1.0),
    "foreach": lambda a: torch._foreach_add_([a, a.clone()], 2.0),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("grad", [False, True])
@as_torch_draws
def test_write(name, grad):
    """The target holds what torch's holds, the result is the target, and gradients pass."""
    for placements in LAYOUTS:
        leaf = A.clone().requires_grad_(grad)
        mine = spread_out(A, simulate(3), placements, requires_grad=grad)
        want, got = leaf * 1, mine * 1
        torch.manual_seed(0)
        result = WRITES[name](want)
        torch.manual_seed(0)
        answer = WRITES[name](got)
        compare(got, want, f"{name} on {placements}", 1e-10)
        if result is want:
            assert answer is got, placements
        elif isinstance(result, torch.Tensor):
            compare(answer, result, f"{name} on {placements}", 1e-10)
        if want.requires_grad and want.grad_fn is not None:
            (wanted,) = torch.autograd.grad((want * B).sum(), leaf)
            (gotten,) = torch.autograd.grad((got * spread_out(B, simulate(3), [Replicate()])).sum(), mine)
            compare(gotten, wanted, f"gradient of {name} on {placements}", 1e-10)


OUTS = {
    "add": lambda a, **out: torch.add(a, 2.0, **out),
    "mm": lambda a, **out: torch.mm(a, A.t(), **out),
    "max": lambda a, **out: torch.max(a, 1, **out),
    "sort": lambda a, **out: torch.sort(a, 0, **out),
    "svd": lambda a, **out: torch.linalg.qr(a, **out),
}


@pytest.mark.parametrize("name", OUTS)
@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_out(name, placements):
    want = OUTS[name](A)
    mesh = simulate(3)
    several = not isinstance(want, torch.Tensor)
    outs = [spread_out(torch.zeros_like(w), mesh, [Shard(0)]) for w in (want if several else [want])]
    answer = OUTS[name](spread_out(A, mesh, placements), out=tuple(outs) if several else outs[0])
    for out, got, w in zip(outs, answer if several else [answer], want if several else [want], strict=True):
        assert got is out
        compare(out, w, name, 1e-9)


def test_out_of_another_type():
    a = spread_out(A, simulate(3), [Shard(0)])
    assert torch.add(a, 1.5, out=a.to(torch.complex128)).dtype is torch.complex128
    with pytest.raises(RuntimeError, match=r"result type Double can't be cast to the desired output type Long"):
        torch.add(a, 1.5, out=a.long())
    with pytest.raises(RuntimeError, match="Expected out tensor to have dtype double, but got float instead"):
        torch.bmm(a[None], a.t()[None], out=torch.zeros_like(a[None, :, :5]).float())


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_out_is_resized(placements):
    """As in torch, which warns where elements are lost; the out is laid out as the result is."""
    a = spread_out(A, simulate(3), placements)
    out = spread_out(torch.empty(0, dtype=torch.float64), simulate(3), [Replicate()])
    assert torch.sum(a, 1, out=out) is out
    compare(out, A.sum(1), str(placements), 1e-10)
    out = spread_out(torch.zeros(2, 3, dtype=torch.complex128), simulate(3), [Shard(0)])
    with pytest.warns(UserWarning, match=r"An output with one or more elements was resized since it had shape \[2, 3\]"):
        torch.add(a, 1, out=out)
    compare(out, A.to(torch.complex128) + 1, str(placements), 1e-10)
    values, places = (spread_out(torch.empty(0, dtype=t), simulate(3), [Shard(0)]) for t in (A.dtype, torch.int64))
    torch.max(a, 1, out=(values, places))
    compare(places, A.max(1).indices, str(placements), 0)
    view = spread_out(A, simulate(3), [Shard(1)])[:, ::2]
    with pytest.raises(
        RuleError, match=r"add: out has shape \(5, 4\) and is part of another tensor, the result \(5, 7"
    ):
        torch.add(a, 1, out=view)
    for cut in (0, 1):  # a view on each rank, and one that had to be copied: torch would write on in the whole memory
        rows = spread_out(A, simulate(3), [Shard(cut)])
        with pytest.raises(RuleError, match=r"add: out has shape \(\d, 7\) and is part of another tensor"):
            torch.add(a, 1, out=rows[1:] if cut else rows[:1])


def test_out_is_plain():
    """It counts as Replicate, and shares its memory."""
    a, out = spread_out(A, simulate(3), [Shard(0)]), torch.zeros_like(A)
    torch.add(a, 1, out=out)
    compare(out, A + 1, "", 1e-10)
    total = torch.empty(0, dtype=torch.float64)
    torch.sum(a, 1, out=total)
    compare(total, A.sum(1), "resized", 1e-10)


def test_out_of_a_factory():
    """What is made has the type of `out`."""
    for make in (
        lambda **out: torch.zeros(4, **out),
        lambda **out: torch.full((4,), 3, **out),
        lambda **out: torch.arange(4, **out),
        lambda **out: torch.linspace(0, 3, 4, **out),
    ):
        for dtype in (torch.int64, torch.float32):
            want = make(out=torch.ones(4, dtype=dtype))
            out = spread_out(torch.ones(4, dtype=dtype), simulate(3), [Shard(0)])
            assert make(out=out) is out
            compare(out, want, str(dtype), 0)
    out = spread_out(torch.zeros(2, dtype=torch.float32), simulate(3), [Shard(0)])
    many = spread_out(torch.tensor([50.0, -50.0], dtype=torch.float64), simulate(3), [Shard(0)])
    assert [value > 0 for value in torch.normal(many, 1.0, out=out).tolist()] == [True, False]


def test_out_has_no_gradient():
    a = spread_out(A, simulate(3), [Shard(0)], requires_grad=True)
    with pytest.raises(RuntimeError, match=r"add\(\): functions with out=... arguments don't support automatic"):
        torch.add(a, 1, out=a.detach().clone())
    with pytest.raises(RuntimeError, match=r"add\(\): functions with out=... arguments don't support automatic"):
        torch.add(a.detach(), 1, out=a * 1)
    compare(torch.gt(a, 0, out=a.detach() > 5), A > 0, "what has none", 0)
    with torch.no_grad():
        compare(torch.add(a, 1, out=a.detach().clone()), A + 1, "without", 1e-10)


# A chain of views, then a write to one of them: every tensor made on the way shows what torch's shows.
CHAINS = {
    "slice": [lambda a: a[1:4], lambda a: a[:, 2:]],
    "transpose then contiguous": [lambda a: a.t(), lambda a: a.contiguous()],
    "contiguous of a step": [lambda a: a[::2], lambda a: a.contiguous()],
    "reshape that copies": [lambda a: a[1:], lambda a: a.mT, lambda a: a.reshape(-1)],
    "reshape that views": [lambda a: a.reshape(-1), lambda a: a[3:9]],
    "flatten": [lambda a: a.t(), lambda a: a.flatten()],
    "flatten of flat": [lambda a: a.reshape(35), lambda a: a.flatten()],
    "select": [lambda a: a[2], lambda a: a[1:3]],
    "unsqueeze expand": [lambda a: a.unsqueeze(0), lambda a: a.squeeze(0)],
    "chunk": [lambda a: a.chunk(2, 1)[1], lambda a: a.view_as(a)],
    "detach": [lambda a: a.detach(), lambda a: a[0:2]],
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_views_written(name, mesh):
    """Any member of the chain is written, in every layout; a copy where torch has a view is refused, never stale."""
    generator, world, refused = random.Random(len(name)), simulate(mesh), 0
    for trial in range(12):
        placements = layouts_of(A, mesh, generator)
        want, got = [A.clone()], [spread_out(A, world, placements)]
        for step in CHAINS[name]:
            want.append(step(want[-1]))
            got.append(step(got[-1]))
        written = trial % len(want)
        want[written].mul_(2).add_(1)
        try:
            got[written].mul_(2).add_(1)
            for g, w in zip(got, want, strict=True):
                compare(g, w, f"{name}: {written} written, {placements}", 1e-10)
        except RuleError:
            refused += 1
    assert refused < 12


def test_flatten_of_flat_is_the_tensor_itself():
    a = spread_out(x(6), simulate(3), [Shard(0)])
    assert a.flatten() is a and a.contiguous() is a


def test_split_parts_are_written_apart():
    """What torch's recurrent cells do: parts that autograd does not take for views of one tensor."""
    for placements in LAYOUTS:
        leaf, mine = A.clone().requires_grad_(), spread_out(A, simulate(3), placements, requires_grad=True)
        for t in (leaf, mine):
            one, two = torch.unsafe_chunk(t * 1, 2, 1)
            (one.sigmoid_().sum() + two.tanh_().sum()).backward()
        compare(mine.grad, leaf.grad, str(placements), 1e-10)


def test_other_shapes():
    for placements in LAYOUTS:
        for change in (
            lambda t: t.resize_(3, 7),
            lambda t: t.t().resize_(4, 2, 3),
            lambda t: t.as_strided_((2, 3), (1, 4), 2),
        ):
            mine = spread_out(A, simulate(3), placements)
            compare(change(mine.clone()), change(A.clone()), str(placements), 1e-10)
        grown = spread_out(A, simulate(3), placements).resize_(6, 7)
        compare(grown[:5], A, str(placements), 1e-10)
        assert grown.shape == (6, 7)


def test_refused():
    a = spread_out(A, simulate(3), [Shard(0)])
    assert a.clone().resize_(5, 7).shape == (5, 7)
    with pytest.raises(
        RuleError, match=r"resize_ of a distributed tensor from \(4, 5\) to \(3, 7\): it is part of another"
    ):
        a[:, ::2].t().resize_(3, 7)
    with pytest.raises(RuntimeError, match="cannot resize variables that require grad"):
        a.clone().requires_grad_().resize_(3, 7)
    with pytest.raises(RuleError, match="set_ gives a tensor other memory"):
        a.set_(A)
    with pytest.raises(RuleError, match="give it a DTensor of the same dtype"):
        a.set_(a.float())
    other = spread_out(A + 1, simulate(3), [Shard(1)])
    assert a.set_(other) is a and a.placements == other.placements
    other.zero_()
    assert not a.full_tensor().any(), "they share memory"
    a = spread_out(A, simulate(3), [Shard(0)])
    with pytest.raises(RuleError, match="part of another"):
        a[:2].resize_(4, 5)
    with pytest.raises(RuleError, match="storage offset 3 .* reads memory that is not part of it"):
        a[1:].as_strided((2, 2), (1, 2), 3)
    with pytest.raises(RuleError, match="reads memory that is not part of it"):
        a[:, ::2].as_strided((2, 2), (1, 2))


def test_as_strided_reads_the_memory_of_one_device():
    for placements in LAYOUTS:
        a = spread_out(A, simulate(3), placements)
        for view in (lambda t: t, lambda t: t.t(), lambda t: t.reshape(7, 5)):
            compare(view(a).as_strided((3, 4), (2, 3)), view(A).as_strided((3, 4), (2, 3)), str(placements), 1e-10)


def test_inference_mode():
    """View ops without a rule, on tensors from outside."""
    for placements in LAYOUTS:
        a = spread_out(A, simulate(3), placements)
        with torch.inference_mode():
            compare(a.diagonal() * 2, A.diagonal() * 2, str(placements), 1e-10)
            compare(a.unfold(0, 2, 1).sum(-1), A.unfold(0, 2, 1).sum(-1), str(placements), 1e-10)


@pytest.mark.parametrize("places", [[Replicate()], [Shard(0)], [Shard(1)], [Partial()]], ids=str)
@pytest.mark.parametrize("name", ["addmm", "addbmm", "baddbmm", "addr"])
def test_whole_numbers_are_written_too(name, places):
    mesh, count = simulate((3,)), {"addmm": (2, 2, 2), "addbmm": (2, 3, 3), "baddbmm": (3, 3, 3), "addr": (2, 1, 1)}
    tensors = [torch.arange(4**n).view((4,) * n) % 5 for n in count[name]]
    want = getattr(tensors[0].clone(), name + "_")(*tensors[1:], beta=2, alpha=-1)
    target, *others = [spread_out(t, mesh, places if t.dim() > 1 else [Replicate()]) for t in tensors]
    assert getattr(target, name + "_")(*others, beta=2, alpha=-1) is target
    assert torch.equal(target.full_tensor(), want)


@pytest.mark.parametrize("reduce_op", ["max", "min", "product", "avg"])
def test_rows_are_set_where_a_reduction_is_pending(reduce_op):
    rows = torch.tensor([3, 0])
    want, got = A.clone(), spread_out(A, simulate((3,)), [Partial(reduce_op)])
    for target in (want, got):
        target[rows] = target[rows.flip(0)] * 2
        target[:, 1] = 0.5
    torch.testing.assert_close(got.full_tensor(), want)


@pytest.mark.parametrize("places", [[Shard(0)], [Partial("bor")], [Partial("max")]], ids=str)
def test_a_result_that_does_not_fit_is_not_written(places):
    whole = torch.tensor([1, 2, 3])
    target = spread_out(whole, simulate((2,)), places)
    for write in (lambda: target.exp_(), lambda: target.div_(2), lambda: torch._foreach_sqrt_([target])):
        with pytest.raises(RuntimeError, match="cast"):
            write()
    assert torch.equal(target.full_tensor(), whole)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Partial("max")], [Shard(0, sizes=(0, 5, 0))]], ids=str)
def test_several_views_at_once(placements, grad):
    """Each can be written while the others live, and all see a write to their base."""
    for take in (lambda t: t.unbind(0), lambda t: t.unbind(1), lambda t: t.split(2), lambda t: t[:, :1].unbind(1)):
        shown = []
        for leaf in (A.clone().requires_grad_(grad), spread_out(A, simulate(3), placements, requires_grad=grad)):
            base = leaf * 1
            views = take(base)
            if not grad:  # torch forbids it where it is recorded
                views[-1].add_(5)
                views[0].mul_(3)
            base.mul_(2)
            shown.append((base, *([] if grad else views)))
            if grad:
                shown[-1] += torch.autograd.grad((base * base).sum(), leaf)
        for got, want in zip(shown[1], shown[0], strict=True):
            compare(got, want, str(placements), 1e-10)
