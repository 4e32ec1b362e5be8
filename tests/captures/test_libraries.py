"""What libraries read, keep and do behind a captured call: no replay gives an old answer, whatever they were asked."""

import functools
import inspect
import json
import logging
import os.path
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import shardwise
from tests.captures.common import batches, both, laid_out, module

DATA = [laid_out(x) for x in batches(4)]
NUMBER = 2.0
SHOWN = np.array([1.23456789])
LOGGER = "tests.captures.of_libraries"


class Shown:
    text = "ab"

    def __str__(self):
        return self.text


class Encoder(json.JSONEncoder):
    def default(self, item):
        return NUMBER


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


@functools.lru_cache(maxsize=4)
def remembered(factor):
    return NUMBER * factor


@functools.cache
def remembered_forever(factor):
    return NUMBER * factor


def coarse(patch):
    before = np.get_printoptions()["precision"]
    np.set_printoptions(precision=2)
    return lambda: np.set_printoptions(precision=before)


def set_on(owner, name, value):
    return lambda patch: patch.setattr(owner, name, value)


def verbose(patch):
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.DEBUG)
    return lambda: logger.setLevel(logging.NOTSET)


def home(patch):
    patch.setenv("HOME", "/a/much/longer/path")


SHOWS, KNOWN = Shown(), logging.getLogger(LOGGER)
CASES = {
    "numpy_by_percent": (lambda x: x * len("%s" % SHOWN), coarse),  # noqa: UP031
    "numpy_by_function": (lambda x: x * len(np.array2string(SHOWN)), coarse),
    "numpy_asked": (lambda x: x * np.get_printoptions()["precision"], coarse),
    "shown_by_percent": (lambda x: x * len("%s" % SHOWS), set_on(Shown, "text", "abcdef")),  # noqa: UP031
    "encoder": (lambda x: x * json.loads(json.dumps([SHOWS], cls=Encoder))[0], set_on(sys.modules[__name__], "NUMBER", 5.0)),
    "level_of_a_logger": (lambda x: x * (2 if logging.getLogger(LOGGER).isEnabledFor(logging.DEBUG) else 3), verbose),
    "level_of_a_known_logger": (lambda x: x * (2 if KNOWN.isEnabledFor(logging.DEBUG) else 3), verbose),
    "home": (lambda x: x * len(os.path.expanduser("~")), home),
}


@pytest.mark.parametrize("name", CASES)
def test_what_libraries_read(name, monkeypatch):
    func, change = CASES[name]
    found = []
    for captured in (False, True):
        with monkeypatch.context() as patch:
            called = shardwise.capture(func) if captured else func
            results = [called(x).full_tensor() for x in DATA[:2]]
            undo = change(patch)
            found.append([*results, *(called(x).full_tensor() for x in DATA[1:])])
            if undo is not None:
                undo()
    assert all(map(torch.equal, *found))
    assert called.replays >= 3


@pytest.mark.parametrize("kept", [remembered, remembered_forever])
def test_a_function_that_forgets(kept, monkeypatch):
    """What it kept may be older than the variables that its code reads now."""
    found = []
    for captured in (False, True):
        with monkeypatch.context() as patch:
            kept.cache_clear()
            func = lambda x: x * kept(2.0)  # noqa: E731
            called = shardwise.capture(func) if captured else func
            results = [called(x).full_tensor() for x in DATA]
            patch.setattr(sys.modules[__name__], "NUMBER", 5.0)
            results += [called(x).full_tensor() for x in DATA]
            kept.cache_clear()
            found.append(results + [called(x).full_tensor() for x in DATA])
    assert all(map(torch.equal, *found))
    assert called.replays >= 6


def by_frame(x):
    return x * sys._getframe().f_globals["NUMBER"]


def by_inspection(x):
    return x * inspect.currentframe().f_globals["NUMBER"]


def by_path(x):
    return x * (2 if os.path.exists("/nowhere") else 3)


def in_a_thread(x):
    found = []
    thread = threading.Thread(target=lambda: found.append(x * 2))
    thread.start()
    thread.join()
    return found[0]


POOL = ThreadPoolExecutor(1)


def in_a_pool(x):
    return POOL.submit(lambda: x * 2).result()


def seeded(x):
    torch.manual_seed(3)
    return F.dropout(x, 0.5)


def by_module_in_a_module(x):
    return x * len(os.path.os.sep)


def test_modules_that_have_each_other_are_looked_through_once():
    assert both(lambda: by_module_in_a_module).captures == 1


@pytest.mark.parametrize(
    "func, reason",
    [
        (by_frame, "_getframe may give something else"),
        (by_inspection, "currentframe may give something else"),
        (by_path, "exists may give something else"),
        (in_a_thread, "other threads"),
        (in_a_pool, "other threads"),
        (seeded, "names manual_seed"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_no_replay_can_repeat(func, reason):
    captured = both(lambda: func)  # which sets the seed to 3 itself: no state tells that the function does it, too
    assert captured.captures == 0 and reason in next(iter(captured.eager))


def fork_with_the_same_seed(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        noise = F.dropout(x, 0.5)
    return noise + F.dropout(x, 0.5)


def test_a_stream_set_to_where_it_is():
    assert both(lambda: fork_with_the_same_seed).captures == 0


# -- around a call ---------------------------------------------------------------------------------------------------
def test_transforms_around_a_call():
    captured = shardwise.capture(lambda x: x.sin() * 2)
    x, tangent = torch.randn(4, 3), torch.randn(4, 3)
    for _ in range(3):
        captured(x)
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(captured(forward_ad.make_dual(x, tangent))).tangent
    assert torch.equal(got, tangent * x.cos() * 2)
    assert torch.equal(torch.func.vmap(captured)(x), x.sin() * 2)
    torch.testing.assert_close(torch.func.grad(lambda t: captured(t).sum())(x), x.cos() * 2)
    assert any("transform" in reason for reason in captured.eager)


def test_hooks_for_what_autograd_keeps():
    model = module(nn.Linear(8, 4), nn.Tanh())
    packed = []

    def pack(tensor):
        packed.append(1)
        return tensor

    def step(x):
        model.zero_grad()
        model(x).sum().backward()
        return model[0].weight.grad.clone()

    def call(f, x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor * 2):
            f(laid_out(x))
        return model[0].weight.grad, len(packed) > 0

    plain = lambda f, x: f(laid_out(x))  # noqa: E731
    captured = both(lambda: step, [lambda f, x=x, how=how: how(f, x) for x in batches() for how in (plain, call)])
    assert captured.replays >= 3 and any("autograd keeps" in reason for reason in captured.eager)


def test_a_checkpoint_in_a_forward_pass_keeps_its_random_numbers():
    """The backward program draws none: it gets the key, which is no tensor, from the forward program."""
    model = module(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU())

    def call(f, x):
        model.zero_grad()
        x = laid_out(x).requires_grad_()
        y = f(x)
        y.square().sum().backward()
        return y, x.grad, [p.grad for p in model.parameters()]

    forward = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    captured = both(lambda: forward, [lambda f, x=x: call(f, x) for x in batches()])
    assert captured.replays == 3


def test_a_function_of_ones_own_that_is_differentiated_outside():
    def call(f, x):
        x = laid_out(x).requires_grad_()
        f(x).square().sum().backward()
        return x.grad

    captured = both(lambda: Scaled.apply, [lambda f, x=x: call(f, x) for x in batches()])
    assert captured.replays == 3 or captured.eager
    captured = both(lambda: (lambda x: Scaled.apply(x) * 2), [lambda f, x=x: call(f, x) for x in batches()])
    assert captured.replays == 3


# -- views that had to be copied ---------------------------------------------------------------------------------------
def rows(x):
    return x.reshape(3, 16)


@pytest.mark.parametrize("of", ["argument", "variable", "result", "argument and result"])
def test_writes_to_a_view_that_had_to_be_copied(of):
    shape = (6, 8)

    def make():
        held = laid_out(torch.zeros(shape))
        func = {
            "argument": rows,
            "variable": lambda x: rows(held),
            "result": lambda x: (lambda y: (rows(y), y))(x * 2),
            "argument and result": lambda x: (rows(x), x),
        }[of]

        def call(f, x):
            x = laid_out(x)
            got = f(x)
            view = got[0] if isinstance(got, tuple) else got
            view.mul_(3).add_(1)
            held.add_(1)
            return got, x, held

        return func, [lambda f, x=x: call(f, x) for x in batches(shape=shape)], lambda: [held]

    assert both(make).captures == 0


def test_a_copied_view_of_what_nobody_has():
    shape = (6, 8)
    call = lambda f, x: f(laid_out(x)).mul_(3)  # noqa: E731
    captured = both(lambda: (lambda x: rows(x * 2)), [lambda f, x=x: call(f, x) for x in batches(shape=shape)])
    assert captured.replays == 3


def test_lines_of_long_paths_are_whole(tmp_path):
    path = tmp_path / ("a" * 60) / "program.py"
    code = compile("def away(x):\n    return x.redistribute(placements=places)\n", str(path), "exec")
    scope = {"__name__": "program", "places": [shardwise.Shard(1), shardwise.Replicate()]}
    exec(code, scope)
    captured = shardwise.capture(scope["away"])
    captured(DATA[0])
    shown = "".join(part.strip() for line in captured.explain().splitlines() for part in line.split("│")[6:7])
    assert shown == f"{path}:2"
