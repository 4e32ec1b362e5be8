"""Ranks that hold nothing raise what the others raise, and do not go on without them."""

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import Replicate, Shard
from shardwise.comm.messages import clocks
from shardwise.strategy.empty_ranks import of_one_each
from tests.workers import device_mesh, run_ranks

CALLS = {  # torch has no kernel for these, and does not say so of empty tensors
    "bool @ bool": lambda x, w: x @ w,
    "in place": lambda x, w: x.to(torch.int32).exponential_(),
    "max_pool1d of bool": lambda x, w: F.max_pool1d(x[:, None], 2),
    "max_pool3d of bool, a plane of which is cut": lambda x, w: F.max_pool3d(x[None, :, :, None], (2, 1, 1)),
    "conv1d of bool": lambda x, w: F.conv1d(x[:, None], w[None, :1, :2].expand(1, 1, 2)),
    "softmax of int": lambda x, w: torch.softmax(x.to(torch.int64), -1),
    "linalg.inv of half": lambda x, w: torch.linalg.inv(x.half()[:, :, None] * torch.eye(3).half()),
}


def raised(rank, world_size, name):
    """What each rank raises, and whether the ranks still work together."""
    mesh = device_mesh((world_size,))
    sizes = (4,) + (0,) * (world_size - 1)
    x = shardwise.distribute_tensor(torch.ones(4, 3, dtype=torch.bool), mesh, [Shard(0, sizes=sizes)])
    w = shardwise.distribute_tensor(torch.ones(3, 3, dtype=torch.bool), mesh, [Replicate()])
    found = []
    for _ in range(2):  # the second time from what is cached
        try:
            CALLS[name](x, w)
        except Exception as error:
            found.append(type(error).__name__)
    assert x.full_tensor().all()
    return found


@pytest.mark.parametrize("name", CALLS)
def test_all_ranks_raise(name):
    x, w = torch.ones(4, 3, dtype=torch.bool), torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(Exception) as plain:  # noqa: B017
        CALLS[name](x, w)
    assert run_ranks(raised, 3, name) == [[plain.type.__name__] * 2] * 3


def raised_where_one_rank_writes(rank, world_size):
    mesh = device_mesh((world_size,))
    x = shardwise.distribute_tensor(torch.ones(6, dtype=torch.complex64), mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match="not implemented for 'ComplexFloat'"):
        x.scatter_reduce(0, torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.complex64), "amax")
    return x.scatter(0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.complex64)).full_tensor().sum()


def test_all_ranks_raise_where_one_has_something_to_write():
    assert run_ranks(raised_where_one_rank_writes, 3) == [5, 5, 5]


def twice_differentiated(rank, world_size):
    """The kernel of attention on CPUs has no second derivative, also where a rank has no batch."""
    mesh = device_mesh((world_size,))
    place = lambda value, at: shardwise.distribute_tensor(value, mesh, [at]).requires_grad_()
    x = place(torch.randn(4, 2, 2), Shard(1, sizes=(2, 0, 0)))
    weights = [place(torch.randn(size), Replicate()) for size in ((6, 2), (6,), (2, 2), (2,))]
    out, _ = F.multi_head_attention_forward(
        x, x, x, 2, 1, weights[0], weights[1], None, None, False, 0.0, weights[2], weights[3], need_weights=False
    )
    (once,) = torch.autograd.grad((out * out).sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad((once * once).sum(), [x])
    return once.full_tensor()


def test_no_rank_differentiates_what_others_cannot():
    first, *others = run_ranks(twice_differentiated, 3)
    assert all(torch.equal(first, other) for other in others)


def float8_and_back(x):
    (x.to(torch.float8_e4m3fn).to(torch.float64) * 2).sum().backward()


def gradient_of_zeros_twice(x):
    loss = torch.sgn(x).sum()  # its gradients cannot be written, so that no second one can be added
    loss.backward(retain_graph=True)
    loss.backward()


def write_to_what_is_kept(x):
    kept = torch.softmax(x, 1)
    with torch.no_grad():
        kept.sin_()
    kept.sum().backward()


def no_derivative(x):
    """Torch goes to a node without a derivative before all others, so that no rank moves the gradient of the window."""
    cut = shardwise.distribute_tensor(torch.ones(4, dtype=x.dtype), x.device_mesh, [Shard(0)]).requires_grad_()
    index = torch.zeros(2, 3, dtype=torch.int64)
    alone = torch.scatter(torch.zeros_like(x), 1, index, x, reduce="add")
    loss = (cut.unfold(0, 2, 1) * 2).sum() + (alone * 3).sum()
    torch.autograd.grad(loss, [x, cut])


BACKWARD = {  # and what all ranks raise
    float8_and_back: "",
    gradient_of_zeros_twice: "ZeroTensors are immutable",
    write_to_what_is_kept: "modified by an inplace operation",
    no_derivative: "derivative for aten::scatter is not implemented",
}


def raised_in_backward(rank, world_size, call):
    """What each rank raises; all must have come to as many collectives, or the next one would wait for ever."""
    mesh = device_mesh((world_size,))
    whole = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x = shardwise.distribute_tensor(whole, mesh, [Shard(0, sizes=(2, 0, 0))], src_data_rank=None).requires_grad_()
    try:
        call(x)
        said = ""
    except RuntimeError as error:
        said = str(error)
    return said, {clock.name: clock.count for clock in clocks.values()}, x.full_tensor().equal(whole)


@pytest.mark.parametrize("call", BACKWARD, ids=lambda call: call.__name__)
def test_all_ranks_raise_in_backward(call):
    found = run_ranks(raised_in_backward, 3, call, timeout=60)
    assert [BACKWARD[call] in said and bool(said) == bool(BACKWARD[call]) for said, _, _ in found] == [True] * 3
    assert len({str(counts) for _, counts, _ in found}) == 1
    assert all(right for _, _, right in found)


VALUES = torch.tensor([[0.3, -1.2, 0.7], [1.1, 0.4, -0.6]], dtype=torch.float64)
EYE = torch.eye(3, dtype=torch.float64)


def view_that_is_written(x):
    y = x[:, 1:]
    with torch.no_grad():
        x.mul_(2)
    return y * y


DIFFERENTIATED = {  # of tensors without elements, torch drops the graph of most of these gradients
    "cumprod": lambda x: (x * 1).cumprod(1),
    "cummax": lambda x: x.cummax(1).values,
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "det": lambda x: torch.linalg.det(x[:, :, None] * EYE + EYE),
    "conv1d": lambda x: F.conv1d(x[:, None], EYE[:1, None, :2]),
    "a product with rows": lambda x: torch.ones(2, 3, dtype=x.dtype) @ (x * x).T,
    "linear": lambda x: F.linear(EYE * x.new_ones(3, requires_grad=True), x),
    "a view": view_that_is_written,
}


def second(x, call):
    """The gradient of a call, and its own gradients."""
    out = call(x)
    weights = (torch.ones_like(out) * 1.5).detach().requires_grad_()
    (once,) = torch.autograd.grad(out, [x], weights, create_graph=True)
    if not once.requires_grad:
        return [once, None, None]
    return [once, *torch.autograd.grad((once * once).sum(), [x, weights], allow_unused=True)]


def twice(rank, world_size):
    """Second derivatives of all calls, with the graphs that a rank has which holds nothing."""
    mesh, found = device_mesh((world_size,)), {}
    for name, call in DIFFERENTIATED.items():
        x = shardwise.distribute_tensor(VALUES.clone(), mesh, [Shard(0, sizes=(0, 2))]).requires_grad_()
        found[name] = [grad if grad is None else grad.full_tensor() for grad in second(x, call)]
    return found


def test_all_ranks_build_the_same_graph():
    for found in run_ranks(twice, 2):
        for name, call in DIFFERENTIATED.items():
            want = second(VALUES.clone().requires_grad_(), call)
            for mine, plain in zip(found[name], want, strict=True):
                zeros = torch.zeros(()) if plain is None else plain
                torch.testing.assert_close(torch.zeros_like(zeros) if mine is None else mine, zeros, msg=name)


def computed(rank, world_size):
    """What torch has kernels for goes on, also where zeros would be refused for their values."""
    mesh = device_mesh((world_size,))
    x = shardwise.distribute_tensor(2 * torch.eye(3).expand(2, 3, 3), mesh, [Shard(0, sizes=(2, 0, 0))])
    torch.manual_seed(4)
    before = torch.random.get_rng_state()
    found = [torch.linalg.cholesky(x), torch.linalg.inv(x), F.conv1d(x, torch.ones(1, 3, 2))]
    assert torch.equal(before, torch.random.get_rng_state())
    return [t.full_tensor() for t in found]


def test_kernels_that_there_are():
    x = 2 * torch.eye(3).expand(2, 3, 3)
    want = [torch.linalg.cholesky(x), torch.linalg.inv(x), F.conv1d(x, torch.ones(1, 3, 2))]
    for found in run_ranks(computed, 3):
        torch.testing.assert_close(found, want)


# -- kernels that take no empty tensors ----------------------------------------------------------------------------
def test_of_one_each():
    """The kernel sees one element where there is none; of its result nothing is left but the graph."""
    seen = []

    def kernel(x, y):
        seen.append((*x.shape, *y.shape))
        return x @ y, (x @ y).sum(1)

    call = of_one_each(kernel, [("m", "k"), ("k", "n")], [("m", "n"), ("m",)])
    x, y = torch.empty(0, 3, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    out, sums = call(x, y)
    assert seen == [(1, 3, 3, 2)] and (out.shape, sums.shape) == ((0, 2), (0,))
    of_x, of_y = torch.autograd.grad(out.sum() + sums.sum(), [x, y], create_graph=True)
    assert of_x.shape == (0, 3) and of_x.requires_grad and not of_y.any()
    # a factor that no result has stays empty: what the kernel makes of it could not be cut away
    out, _ = call(torch.empty(2, 0), torch.empty(0, 2))
    assert seen[1:] == [(2, 0, 0, 2)] and torch.equal(out, torch.zeros(2, 2))


TABLE = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)
NEVER_EMPTY = {
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
    "embedding": lambda x: F.embedding((x > 0).long(), TABLE[:3] * x.sum()),
    "max pool": lambda x: F.max_pool2d(x[:, None, :, None], (2, 1)),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x[:, None, :, None].expand(-1, -1, -1, 2), (2, 2)),
    "resized": lambda x: F.interpolate(x[:, None], size=5, mode="linear"),
    "determinant": lambda x: torch.linalg.det(x[:, :, None] * x[:, None] + 2 * EYE),
    "fft": lambda x: torch.fft.fft(x, dim=1).abs(),
    "cummax": lambda x: x.cummax(1).values,
}


@pytest.mark.parametrize("name", NEVER_EMPTY)
def test_simulated_ranks_that_hold_nothing(name):
    """Values, gradients and second derivatives are those of plain torch, along either dim."""
    values = torch.sin(torch.arange(6, dtype=torch.float64)).view(2, 3)
    f = NEVER_EMPTY[name]

    def derived(x):
        (once,) = torch.autograd.grad(f(x).square().sum(), [x], create_graph=True)
        try:
            (twice,) = torch.autograd.grad(once.square().sum(), [x])
        except RuntimeError as error:
            assert "not implemented" in str(error) or "does not require grad" in str(error)
            twice = once * 0
        return f(x), once, twice

    want = derived(values.clone().requires_grad_())
    for dim in (0, 1):
        x = shardwise.distribute_tensor(values, shardwise.simulate(5), [Shard(dim)]).requires_grad_()
        for found, wanted in zip(derived(x), want, strict=True):
            torch.testing.assert_close(found.full_tensor(), wanted)
