"""Models as people write them are captured as a whole, train and infer with the bits of an eager run, and compile."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import Replicate, Shard, distribute_module, distribute_tensor
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.captures.common import MESH, batches, both, laid_out, module


class Block(nn.Module):
    """A block with the names and the plain inputs of Hugging Face's models."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.width = width // heads
        self.norm = nn.RMSNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o_proj, self.up_proj = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width)
        self.down_proj = nn.Linear(2 * width, width)

    def forward(self, hidden_states, attention_mask=None):
        x = self.norm(hidden_states)
        projected = (layer(x) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.view(*x.shape[:-1], -1, self.width).transpose(1, 2) for y in projected)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(*x.shape[:-1], -1)
        x = hidden_states + self.o_proj(y)
        return x + self.down_proj(F.silu(self.up_proj(self.norm(x))))


def styled_block():
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj", "up_proj"), ColwiseParallel())
    rows = dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel())
    return parallelize_module(Block(), MESH["tp"], {**columns, **rows}), lambda: torch.randn(3, 5, 16)


def lstm():
    made = distribute_module(nn.LSTM(8, 8, batch_first=True), MESH)
    rows = [Shard(0), Replicate()]
    return lambda x: made(x)[0], lambda: distribute_tensor(torch.randn(3, 5, 8), MESH, rows), list(made.parameters())


def with_noise():
    net = module(nn.Linear(8, 8))
    return (
        lambda x: net(x) + torch.bernoulli(net(x).sigmoid().detach()),
        lambda: laid_out(torch.randn(5, 8)),
        [*net.parameters()],
    )


@pytest.mark.parametrize("make", [styled_block, lstm, with_noise], ids=lambda make: make.__name__)
def test_a_step_is_one_program(make):
    def made():
        torch.manual_seed(0)
        model, data, *given = make()
        parameters = given[0] if given else list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        inputs = [data() for _ in range(4)]

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, [lambda f, x=x: f(x) for x in inputs], lambda: parameters

    captured = both(made, whole=True)
    assert captured.captures == 1 and captured.replays >= 2


def test_probabilities_are_checked_in_replays():
    captured = shardwise.capture(torch.bernoulli, whole=True)
    captured(laid_out(torch.full((5, 8), 0.5)))
    assert captured(laid_out(torch.ones(5, 8))).full_tensor().sum() == 40 and captured.replays == 1
    with pytest.raises(RuntimeError, match="p_in"):
        captured(laid_out(torch.full((5, 8), 1.5)))


# -- gradients that come from outside --------------------------------------------------------------------------------
def differentiated(change):
    """`change(net)`, called behind backward passes that run eagerly; what it gives and the gradients are compared."""

    def made():
        net = module(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def call(f, x):
            net.zero_grad()
            net(laid_out(x)).square().sum().backward()
            return f(), [p.grad for p in net.parameters()]

        return lambda: change(net), [lambda f, x=x: call(f, x) for x in batches(4)], lambda: ()

    return made


def halved(net):
    for p in net.parameters():
        p.grad.mul_(0.5)


@pytest.mark.parametrize(
    "change",
    [
        halved,
        lambda net: [p.grad * 2 for p in net.parameters()],
        lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.1),
    ],
    ids=["halved", "read", "clipped"],
)
def test_gradients_are_read_anew(change):
    captured = both(differentiated(change))
    assert captured.captures == 1 and captured.replays >= 2


def test_gradients_behind_a_statement_that_is_eager():
    def made():
        net = module(nn.Linear(8, 8))

        def func(x):
            net.zero_grad()
            loss = net(x).square().mean()
            if not torch.isfinite(loss):
                return None
            loss.backward()
            gradients = [p.grad.clone() for p in net.parameters()]
            return loss.detach(), gradients

        return func

    calls = [lambda f, x=x: f(laid_out(x)) for x in batches(8)]
    assert both(made, calls).replays > 0


def test_a_gradient_that_was_not_there():
    weight = torch.ones(8, requires_grad=True)

    def call(f, i, x):
        weight.grad = None
        if i > 1:
            (weight * x).sum().backward()
        return f(laid_out(x))

    calls = [lambda f, i=i, x=x: call(f, i, x) for i, x in enumerate(batches(4))]
    captured = both(lambda: (lambda x: x if weight.grad is None else x * weight.grad, calls, lambda: ()))
    assert (captured.captures, captured.replays) == (2, 2)


def test_a_leaf_that_is_replaced_after_its_gradient_was_read():
    def made():
        owner = {"weight": distribute_tensor(torch.ones(8), MESH, [Replicate(), Replicate()]).requires_grad_()}

        def func(x):
            (x * owner["weight"]).sum().backward()
            found = owner["weight"].grad * 2
            owner["weight"] = (owner["weight"].detach() * 1.5).requires_grad_()
            return found

        return func

    assert both(made).replays == 0
