"""Functions with statements that ask for values: those run eagerly, what is around them is captured."""

import pytest
import torch
from torch import nn

import shardwise
from shardwise import DTensor
from tests.captures.common import batches, both, laid_out, module


def trained(body_of):
    """A step made by `body_of(model, optimizer, log)`; what is left are parameters and the log."""

    def make():
        model, log = module(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        calls = [lambda f, x=x: f(laid_out(x)) for x in batches(7)]
        return body_of(model, optimizer, log), calls, lambda: [*model.parameters(), *log]

    return make


def item_at_the_end(model, optimizer, log):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def printed_in_the_middle(model, optimizer, log):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        print(f"loss {loss.full_tensor():.3f}")
        optimizer.step()
        return loss.detach()

    return step


def norm_asked_for(model, optimizer, log):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        optimizer.step()
        log.append(norm)
        return loss.detach(), norm

    return step


def skipped_where_not_finite(model, optimizer, log):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if not torch.isfinite(loss) or loss < 0.05:
            log.append(-1.0)
            return None
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def size_from_values(model, optimizer, log):
    def step(x, scale=2.0):
        optimizer.zero_grad()
        y = model(x) * scale
        if x.shape[0] > 3:
            extra = y.square().sum()
        chosen = y[y > 0].sum()
        loss = chosen + extra
        loss.backward()
        optimizer.step()
        log.append(loss.item())
        return loss.detach()

    return step


def variable_that_is_missing_at_first(model, optimizer, log):
    def step(x):
        if x.shape[0] > 100:
            never = 1
        value = model(x).detach().square().mean()
        late = 0.0
        late += value.item()
        if x.shape[0] > 100:
            late += never
        result = value * 2
        return late, result

    return step


SPLIT = [item_at_the_end, printed_in_the_middle, norm_asked_for, skipped_where_not_finite, size_from_values]
SPLIT += [variable_that_is_missing_at_first]


@pytest.mark.parametrize("body", SPLIT, ids=lambda body: body.__name__)
def test_statements_between_captured_parts(body, capsys):
    captured = both(trained(body))
    assert captured.replays >= 5 and captured.captures <= 4 and sum(captured.eager.values()) <= 4
    assert "eager between captured parts, 6 times: line" in " ".join(captured.explain().split())
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]


def a_list_that_later_parts_change(model, optimizer, log):
    def step(x):
        values = []
        values.append(model(x).detach().sum())
        total = values[0].item()
        values.append(total)
        log.append(len(values))
        return values[1]

    return step


def a_second_name_of_a_list(model, optimizer, log):
    def step(x):
        history = log
        loss = model(x).detach().square().mean()
        history.append(loss.item())
        return loss * 2

    return step


def a_variable_that_is_deleted(model, optimizer, log):
    def step(x):
        loss = model(x).detach().square().mean()
        number = loss.item()
        del loss
        return number

    return step


def a_variable_that_a_function_shares(model, optimizer, log):
    def step(x):
        loss = model(x).detach().square().mean()
        doubled = lambda: loss * 2  # noqa: E731
        number = loss.item()
        loss = loss + 1
        return doubled(), number

    return step


def numbers_as_arguments_of_ops(model, optimizer, log):
    def step(x):
        loss = model(x).detach().square().mean()
        number = float(loss)
        scaled = x * number
        if number > 0.04:
            scaled = scaled + 1
        return scaled

    return step


@pytest.mark.parametrize(
    "body",
    [
        a_list_that_later_parts_change,
        a_second_name_of_a_list,
        a_variable_that_is_deleted,
        a_variable_that_a_function_shares,
        numbers_as_arguments_of_ops,
    ],
    ids=lambda body: body.__name__,
)
def test_same_answers(body):
    assert both(trained(body)).eager


class Trainer:
    """A method as a step, with state of its own."""

    def __init__(self):
        self.model, self.count, self.seen = module(nn.Linear(8, 8)), 0, []
        self.scale = 1.0

    def step(self, x, *others, bias=0.5, **more):
        y = self.model(x).detach() * self.scale + bias
        top = y.max().item()
        self.seen.append(top)
        self.count += 1
        return y + len(others) + len(more), top


def test_a_method():
    def make():
        trainer = Trainer()

        def scaled(f, x):
            trainer.scale = 3.0
            return f(x, 1, bias=2.0, other=1)

        calls = [lambda f, x=x: f(laid_out(x)) for x in batches(5)]
        calls += [lambda f, x=x: scaled(f, laid_out(x)) for x in batches(4)]
        return trainer.step, calls, lambda: [*trainer.seen, trainer.count]

    captured = both(make)
    assert captured.replays


def test_other_defaults_and_code():
    x = laid_out(torch.ones(4, 8))

    def step(x, scale=2.0):
        y = (x * scale).sum()
        return y.item()

    def other(x, scale=2.0):
        return -1.0

    call = shardwise.capture(step)
    assert [call(x) for _ in range(3)] == [64.0] * 3
    step.__defaults__ = (3.0,)
    assert [call(x) for _ in range(3)] == [96.0] * 3
    step.__code__ = other.__code__
    assert [call(x) for _ in range(3)] == [-1.0] * 3


def test_whole_raises_still():
    def step(x: DTensor):
        y = x * 2
        return y.sum().item()

    with pytest.raises(shardwise.CaptureError, match=r"Tensor.item.*test_split.py"):
        shardwise.capture(step, whole=True)(laid_out(torch.ones(4, 8)))
