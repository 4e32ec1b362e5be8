"""Whole training steps, captured: bits as in eager runs, on every kind of layout and data parallelism."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Replicate, Shard, distribute_tensor, simulate
from shardwise.parallel import data_parallel
from tests.captures.common import MESH, ROWS, batches, both, laid_out, module


def tensor_parallel():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 15), nn.GELU(), nn.Dropout(0.2), nn.Linear(15, 8), nn.LayerNorm(8))

    def cut(name, layer, mesh):
        if name in ("0", "3"):
            for kind, dim in (("weight", 0), ("bias", 0)) if name == "0" else (("weight", 1),):
                value = getattr(layer, kind).detach()
                setattr(layer, kind, nn.Parameter(distribute_tensor(value, mesh, [Replicate(), Shard(dim)])))

    return shardwise.distribute_module(model, MESH, cut)


def micro_step_of(model):
    """Gradients of one part of a batch; the optimizer steps elsewhere."""

    def micro(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return micro


def step_of(model, optimizer, total=torch.mean):
    def step(x):
        optimizer.zero_grad()
        loss = total(model(x).square())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("zeroed", ["optimizer", "model"])
def test_mixed_shapes_are_captured_once_each(zeroed):
    """Also the first, whose call began without gradients: those that begin with some set them to None as well."""
    losses = []
    for wrapped in (lambda step: step, shardwise.capture):
        shardwise.manual_seed(0)
        model = tensor_parallel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        owner = optimizer if zeroed == "optimizer" else model

        def step(x, model=model, optimizer=optimizer, owner=owner):
            owner.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = wrapped(step)
        rows = [1 + i % 4 for i in range(12)]
        data = [distribute_tensor(torch.full((n, 8), n / 3), MESH, [Shard(0), Replicate()]) for n in rows]
        losses.append([run(x).full_tensor().item() for x in data])
    assert losses[0] == losses[1] and (run.captures, run.replays) == (4, 8)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop"])
def test_a_step(kind):
    def make():
        model = tensor_parallel()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05)
        return step_of(model, optimizer), None, lambda: list(model.parameters())

    captured = both(make)
    assert captured.replays == 3 and not captured.eager  # though gradients are there from the second call on
    assert "clip" not in captured.code and f"{kind}_step(" in captured.code


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_ranks_that_hold_nothing(rows):
    def make():
        model = tensor_parallel()
        step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.05), torch.sum)
        calls = [lambda f, x=x: f(laid_out(x)) for x in batches(4, (rows, 8))]
        return step, calls, lambda: list(model.parameters())

    assert both(make).replays == 3


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "parameters"])
def test_data_parallel(shard):
    mesh = simulate(3)

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        model = data_parallel(model, mesh, shard, units=lambda name, layer: isinstance(layer, nn.Linear))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        step = step_of(model, optimizer)
        calls = [lambda f, x=x: f(distribute_tensor(x, mesh, [Shard(0)])) for x in batches(5)]
        return step, calls, lambda: list(model.parameters())

    captured = both(make)
    assert captured.replays >= 2 and not captured.eager


def test_gradients_that_are_not_reduced_yet():
    mesh = simulate(2)

    def make():
        torch.manual_seed(0)
        model = data_parallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), mesh, "optimizer")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def call(f, pair):
            with model.no_sync():
                first = f(distribute_tensor(pair[0], mesh, [Shard(0)]))
            second = f(distribute_tensor(pair[1], mesh, [Shard(0)]))
            optimizer.step()
            optimizer.zero_grad()
            return first, second

        found = batches(8)
        calls = [lambda f, i=i: call(f, found[i : i + 2]) for i in range(0, 8, 2)]
        return micro_step_of(model), calls, lambda: list(model.parameters())

    both(make)


def test_a_changing_learning_rate():
    def make():
        model = module(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        def call(f, x):
            loss = f(laid_out(x))
            scheduler.step()
            return loss

        calls = [lambda f, x=x: call(f, x) for x in batches(6)]
        return step_of(model, optimizer), calls, lambda: list(model.parameters())

    assert both(make).replays == 5


def test_scheduler_and_scaler_inside():
    def make():
        model = module(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            return loss.detach()

        calls = [lambda f, x=x: f(laid_out(x)) for x in batches(6)]
        return step, calls, lambda: [*model.parameters(), scaler.get_scale(), scheduler.get_last_lr()[0]]

    captured = both(make)
    assert captured.replays >= 3 and not captured.eager


def test_accumulated_gradients():
    def make():
        model = module(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def call(f, pair):
            losses = [f(laid_out(x)) for x in pair]
            optimizer.step()
            optimizer.zero_grad()
            return losses

        found = batches(8)
        calls = [lambda f, i=i: call(f, found[i : i + 2]) for i in range(0, 8, 2)]
        return micro_step_of(model), calls, lambda: list(model.parameters())

    captured = both(make)
    assert (captured.captures, captured.replays) == (2, 6)


def test_gradients_set_to_zero_and_used_twice():
    def make():
        model = module(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad(set_to_none=False)
            for part in (x, x * 2):
                model(part).square().mean().backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()

        return step, None, lambda: list(model.parameters())

    assert both(make).replays == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_repeat_their_numbers(reentrant):
    def make():
        model = module(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, None, lambda: list(model.parameters())

    both(make)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside):
    def make():
        model = module(nn.Linear(8, 8), nn.LayerNorm(8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            with torch.autocast("cpu", torch.bfloat16, enabled=inside or torch.is_autocast_enabled("cpu")):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        def call(f, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
                return f(laid_out(x))

        calls = [lambda f, x=x: call(f, x) for x in batches()]
        return step, calls, lambda: list(model.parameters())

    assert both(make).replays == 3


def test_freezing_loading_and_replacing_parameters():
    def make():
        model = module(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        start = {name: value.detach().clone() for name, value in model.state_dict().items()}

        def call(f, i, x):
            if i == 3:
                model[0].bias.requires_grad_(False)
            if i == 4:
                model[0].bias.requires_grad_(True)
            if i == 5:
                model.load_state_dict(start)
            if i == 6:
                model.load_state_dict({name: value.clone() for name, value in start.items()}, assign=True)
                optimizer.param_groups[0]["params"] = list(model.parameters())
            if i == 8:
                model[0].weight.data = model[0].weight.data * 2
            return f(laid_out(x))

        calls = [lambda f, i=i, x=x: call(f, i, x) for i, x in enumerate(batches(10))]
        return step_of(model, optimizer), calls, lambda: list(model.parameters())

    captured = both(make)
    assert captured.replays >= 2 and not captured.eager


def test_results_that_are_differentiated_outside():
    def make():
        model = tensor_parallel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

        def call(f, x):
            x = laid_out(x).requires_grad_()
            y = f(x * 2)  # from a graph outside
            optimizer.zero_grad()
            F.mse_loss(y, torch.zeros_like(y)).backward()
            optimizer.step()
            return y, x.grad

        calls = [lambda f, x=x: call(f, x) for x in batches(5)]
        return model, calls, lambda: list(model.parameters())

    captured = both(make)
    assert (captured.captures, captured.replays) == (1, 4)
    with pytest.raises(RuntimeError, match="once_differentiable|second"):
        x = laid_out(batches()[0]).requires_grad_()
        first = torch.autograd.grad(captured(x * 2).square().sum(), x, create_graph=True)[0]
        first.sum().backward()


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1), (0, 2)])
def test_results_of_which_some_are_differentiated(which):
    """Parameters that the others depend on get no gradient, which an optimizer tells from zeros."""

    def make():
        model = module(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def call(f, x):
            found = f(laid_out(x))
            sum(found[i].square().sum() for i in which).backward()
            none = [p.grad is None for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            return *found, *none

        def run(x):
            y = model[0](x)
            return y.relu(), model[1](y), model[2](x)

        return run, [lambda f, x=x: call(f, x) for x in batches()], lambda: list(model.parameters())

    assert both(make).replays == 3


def test_a_loss_that_was_differentiated_inside():
    model = module(nn.Linear(8, 8))
    captured = shardwise.capture(step_of(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    for _ in range(4):
        loss = captured(laid_out(batches()[0]))
        assert loss.requires_grad
        with pytest.raises(RuntimeError, match="second time"):
            (loss + model[0].bias.sum()).backward()
        model.zero_grad()
    assert captured.replays


def test_a_result_beside_a_backward_pass_keeps_its_gradient():
    def make():
        model = module(nn.Linear(8, 8))

        def run(x):
            model(x).square().mean().backward()
            return model(x)

        def call(f, x):
            (f(laid_out(x)).sum() * 2).backward()

        calls = [lambda f, x=x: call(f, x) for x in batches()]
        return run, calls, lambda: [p.grad for p in model.parameters()]

    assert "differentiated outside" in next(iter(both(make).eager))


def test_statistics_of_batch_norm():
    def make():
        model = module(nn.Linear(8, 8), nn.BatchNorm1d(8))

        def call(f, x):
            y = f(laid_out(x))
            y.square().sum().backward()
            return y.detach()

        calls = [lambda f, x=x: call(f, x) for x in batches()]
        return model, calls, lambda: [*model.state_dict().values(), *(p.grad for p in model.parameters())]

    assert both(make).replays == 3


def test_eight_shapes_are_eight_programs():
    weight = laid_out(torch.randn(8, 8), [Replicate(), Shard(1)])
    captured = shardwise.capture(lambda x: (x @ weight).relu().sum())
    sizes = [1, 2, 3, 4, 5, 6, 7, 9]
    inputs = {n: laid_out(torch.randn(n, 8), ROWS) for n in sizes}
    want = {n: (x @ weight).relu().sum().full_tensor() for n, x in inputs.items()}
    for i in range(200):
        n = sizes[(i * 5) % 8]
        assert torch.equal(captured(inputs[n]).full_tensor(), want[n])
    assert (captured.captures, captured.replays) == (8, 192)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("make_net", [lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), lambda: nn.Linear(8, 8)])
def test_autocast_and_a_backward_pass_outside(make_net, inside):
    """Attention that drops casts in its backward pass too, where that runs inside of autocast."""

    def make():
        torch.manual_seed(0)
        net = shardwise.distribute_module(make_net(), MESH)

        def call(f, x):
            net.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = f(laid_out(x))
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            return loss, [p.grad for p in net.parameters()]

        run = lambda x: net(x).float().square().mean()  # noqa: E731
        return run, [lambda f, x=x: call(f, x) for x in batches(3, (4, 5, 8))], lambda: ()

    captured = both(make)
    assert captured.replays == 2 or "autocast changes what the backward pass does" in next(iter(captured.eager))
