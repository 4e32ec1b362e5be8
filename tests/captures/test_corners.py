"""Functions that do more than compute: replays are right, or the call runs eagerly and says why."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import CaptureError, Replicate, Shard
from shardwise.experimental import local_map
from tests.captures.common import COLUMNS, MESH, ROWS, batches, both, laid_out, module

factor = 1.0


# -- captured -------------------------------------------------------------------------------------------------------
def in_place_state():
    total = laid_out(torch.zeros(8), [Replicate(), Shard(0)])

    def add(x):
        total.add_(x.sum(0))
        return total * 2

    return add, None, lambda: [total]


def in_place_argument():
    def double(x):
        x.mul_(2)
        return x + 1

    def call(f, x):
        own = laid_out(x)
        return f(own), own

    return double, [lambda f, x=x: call(f, x) for x in batches()], lambda: ()


def random_numbers():
    def draw(x):
        noise = shardwise.rand(5, 8, device_mesh=MESH, placements=ROWS)
        return F.dropout(x, 0.5) + noise + torch.randn_like(x) + torch.rand(8)

    return draw


def moves():
    def move(x):
        y = x.redistribute(placements=COLUMNS)
        z = x.redistribute(placements=COLUMNS)
        return (y + z).redistribute(placements=ROWS) + y.redistribute(placements=ROWS)

    return move


def second_derivatives():
    weight = laid_out(torch.arange(64.0).view(8, 8) / 64, COLUMNS).requires_grad_()

    def twice(x):
        (first,) = torch.autograd.grad((x @ weight).tanh().sum(), weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    return twice


def constant():
    def scale(x):
        number = torch.tensor(0.0)
        number += 1.5
        return x * number

    return scale


def masked_write():
    def clip(x):
        x = x.clone()
        x[x > 0] = 0.0
        return x

    return clip


def mixed_results():
    weight = laid_out(torch.ones(8), [Replicate(), Shard(0)])
    return lambda x: {"x": x, "weight": weight, "view": x.T, "number": 3, "nothing": None}


def locals_and_maps():
    mapped = local_map(lambda a: a.sin(), out_placements=ROWS)
    return lambda x: mapped(x) + shardwise.DTensor.from_local(x.to_local() * 2, MESH, ROWS, shape=x.shape)


def looked_up():
    torch.manual_seed(0)
    table = laid_out(torch.randn(16, 8), [Replicate(), Shard(0)]).requires_grad_()

    def attend(tokens):
        x = F.embedding(tokens, table)
        q = x.view(*tokens.shape, 2, 4).transpose(1, 2)
        loss = F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()
        loss.backward()
        found, table.grad = table.grad, None
        return loss.detach(), found

    torch.manual_seed(1)
    tokens = [torch.randint(16, (3, 6)) for _ in range(4)]
    return attend, [lambda f, t=t: f(laid_out(t)) for t in tokens], lambda: ()


def attention_over_a_cut_sequence():
    torch.manual_seed(0)
    weight = laid_out(torch.randn(8, 8), [Replicate(), Replicate()]).requires_grad_()

    def attend(x):
        q = (x @ weight).view(2, 12, 2, 4).transpose(1, 2)
        loss = F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()
        loss.backward()
        found, weight.grad = weight.grad, None
        return loss.detach(), found

    calls = [lambda f, x=x: f(laid_out(x, [Shard(0), Shard(1)])) for x in batches(shape=(2, 12, 8))]
    return attend, calls, lambda: ()


CAPTURED = [in_place_state, in_place_argument, random_numbers, moves, second_derivatives, constant, masked_write]
CAPTURED += [mixed_results, locals_and_maps, looked_up, attention_over_a_cut_sequence]


@pytest.mark.parametrize("make", CAPTURED, ids=lambda make: make.__name__)
def test_replayed(make):
    captured = both(make)
    assert (captured.captures, captured.replays, captured.eager) == (1, 3, {})


def test_plain_tensors_alone():
    def make():
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, [lambda f, x=x: f(x) for x in batches()], lambda: list(model.parameters())

    assert both(make).replays == 3


def test_indices_out_of_range_raise_in_replays_too():
    table = laid_out(torch.randn(16, 8), [Replicate(), Shard(0)])
    captured = shardwise.capture(lambda tokens: F.embedding(tokens, table))
    captured(laid_out(torch.tensor([1, 2])))
    with pytest.raises((RuntimeError, IndexError)):
        captured(laid_out(torch.tensor([1, 16])))


def test_modules_and_variables_around():
    def make():
        model = module(nn.Linear(8, 8), nn.Dropout(0.5))

        def call(f, i, x):
            global factor
            factor = 1.0 + i // 4
            model.train(i % 2 == 0)
            return f(laid_out(x))

        calls = [lambda f, i=i, x=x: call(f, i, x) for i, x in enumerate(batches(8))]
        return lambda x: model(x).detach() * factor, calls, lambda: ()

    captured = both(make)
    assert (captured.captures, captured.replays) == (4, 4)


def test_attributes_of_modules_and_of_the_object_of_a_method():
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x):
            return super().forward(x) * self.scale

    class Trainer:
        def __init__(self):
            self.model, self.shift = module(Scaled(8, 8)), 0
            self.model[0].scale = 1.0

        def run(self, x):
            return self.model(x).detach() + self.shift

    def make():
        trainer = Trainer()

        def call(f, i, x):
            trainer.model[0].scale, trainer.shift = 1.0 + i // 2 % 2, i // 4
            return f(laid_out(x))

        calls = [lambda f, i=i, x=x: call(f, i, x) for i, x in enumerate(batches(8))]
        return trainer.run, calls, lambda: ()

    captured = both(make)
    assert (captured.captures, captured.replays) == (4, 4)


def test_what_changes_all_the_time_runs_eagerly():
    def make():
        def call(f, i, x):
            global factor
            factor = float(i)
            return f(laid_out(x))

        return lambda x: x * factor, [lambda f, i=i, x=x: call(f, i, x) for i, x in enumerate(batches(12))], lambda: ()

    captured = both(make)
    assert "changes all the time" in next(iter(captured.eager))


# -- eager, with a reason -------------------------------------------------------------------------------------------
def value_asked_for():
    return lambda x: x * 2 if x.sum().item() > 0 else x - 1


def branch():
    return lambda x: x * 2 if x.sum() > 0 else x - 1


def printed():
    return lambda x: x * len(f"{x.sum()}")


def size_from_values():
    return lambda x: x[x > 0].sum()


def kept_tensor():
    kept = []

    def keep(x):
        y = x * 2
        kept.append(y)
        return y + 1

    return keep, None, lambda: kept


def kept_view_of_a_result():
    kept = []

    def keep(x):
        y = x * 2
        kept.append(y.to_local())
        return y

    return keep, None, lambda: [len(kept)]


def kept_argument():
    kept = []

    def keep(x):
        kept.append(x)
        return x + 1

    return keep, None, lambda: [len(kept)]


def running_total():
    class Totals:
        value = laid_out(torch.zeros(()), [Replicate(), Replicate()])

    def add(x):
        Totals.value = Totals.value + x.sum()
        return Totals.value

    return add, None, lambda: [Totals.value]


def running_total_that_is_not_returned():
    class Totals:
        value = laid_out(torch.zeros(()), [Replicate(), Replicate()])

    def add(x):
        Totals.value = Totals.value + x.sum()

    return add, None, lambda: [Totals.value]


def module_hook():
    seen = []
    model = module(nn.Linear(8, 8))
    model[0].register_forward_hook(lambda *_: seen.append(1))
    return lambda x: model(x).detach(), None, lambda: [len(seen)]


def parameter_hook():
    seen = []
    model = module(nn.Linear(8, 8))
    model[0].weight.register_hook(lambda grad: seen.append(1))

    def run(x):
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    return run, None, lambda: [len(seen)]


def backward_that_leaves():
    def run(x):
        loss = (x * x).sum()
        loss.backward()
        return loss.detach()

    def call(f, x):
        leaf = laid_out(x).requires_grad_()
        return f(leaf * 2), leaf.grad

    return run, [lambda f, x=x: call(f, x) for x in batches()], lambda: ()


def options_changed():
    model = module(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5

    return step, None, lambda: list(model.parameters())


def own_generator():
    generator = torch.Generator().manual_seed(5)
    return lambda x: x + torch.rand(8, generator=generator)


def numpy():
    return lambda x: x + float(x.full_tensor().numpy().sum())


EAGER = [value_asked_for, branch, printed, size_from_values, kept_tensor, kept_view_of_a_result, kept_argument]
EAGER += [running_total, running_total_that_is_not_returned, module_hook, parameter_hook, options_changed]
EAGER += [own_generator, numpy]


@pytest.mark.parametrize("make", EAGER, ids=lambda make: make.__name__)
def test_eager(make):
    captured = both(make)
    assert captured.captures == captured.replays == 0 and captured.eager
    assert "eager, " in captured.explain()


def test_whole_raises_instead():
    captured = shardwise.capture(value_asked_for(), whole=True)
    with pytest.raises(CaptureError, match="cannot be captured as a whole: .*item.*test_corners.py"):
        captured(laid_out(batches()[0]))


def test_an_argument_without_a_hash_runs_eagerly():
    class Odd:
        __hash__ = None

    captured = shardwise.capture(lambda x, odd: x + 1)
    captured(laid_out(batches()[0]), Odd())
    assert "has no hash" in next(iter(captured.eager))


def test_an_error_in_the_function_leaves_nothing_behind():
    def fail(x):
        y = x + 1
        if len(y) < 5:
            raise ValueError("too short")
        return y

    captured = shardwise.capture(fail)
    with pytest.raises(ValueError, match="too short"):
        captured(laid_out(torch.ones(3, 8)))
    x = laid_out(torch.ones(5, 8))
    assert torch.equal(captured(x).full_tensor(), captured(x).full_tensor())
    assert captured.replays == 1
    assert (x * 2).sum().full_tensor() == 80


def test_a_backward_pass_that_leaves_runs_between_captured_parts():
    captured = both(backward_that_leaves)
    assert captured.captures == 1 and "backward pass inside leaves" in next(iter(captured.regions))
