"""Every public function and class, called with wrong values for each of its arguments: an error that says which, or a
result; never an error of Python's from somewhere inside."""

import builtins
import contextlib
import inspect
import io
import sys
import traceback
import warnings

import pytest
import torch

import shardwise
from shardwise import (
    Shard,
    ShardwiseError,
    checkpoint,
    debug,
    distribute_tensor,
    experimental,
    optim,
    parallel,
    sharded,
    simulate,
)

MESH = simulate(2)
TENSOR = distribute_tensor(torch.ones(4, 3), MESH, [Shard(0)])
PACKAGES = (shardwise, debug, parallel, optim, checkpoint, experimental, shardwise.random, sharded)
RIGHT = {
    "tensor": torch.ones(4, 3), "local_tensor": torch.ones(2, 3), "device_mesh": MESH, "mesh": MESH, "shape": (2,),
    "placements": [Shard(0)], "size": (4, 3), "sizes": (2, 2), "dim": 0, "seed": 1, "layout": TENSOR.layout,
    "src_layout": TENSOR.layout, "dst_layout": TENSOR.layout, "dtensor": TENSOR, "ranks": [torch.ones(1)],
    "params": [torch.nn.Parameter(TENSOR)], "func": torch.sin, "fill_value": 1, "logits": torch.ones(4, 3),
}  # fmt: skip
WRONG = [
    None, 3, -1, 2.5, "x", b"y", (), [], {}, object(), torch.ones(2), TENSOR, MESH, Shard(0), int, lambda: 0, True,
    [None], {"a": 1}, torch.float32,
]  # fmt: skip
CLEAR = (TypeError, ValueError, NotImplementedError, ShardwiseError)
OTHERS = {
    "DeviceMesh",
    "Generator",
    "init_device_mesh",
    "Muon",
    "calibrate",
}  # constructors of torch's own; one that measures


def public():
    for package in PACKAGES:
        for name in package.__all__:
            value = getattr(package, name)
            is_error = isinstance(value, type) and issubclass(value, BaseException)
            if callable(value) and not inspect.ismodule(value) and not is_error and name not in OTHERS:
                yield pytest.param(value, id=f"{package.__name__.removeprefix('shardwise.')}.{name}")


def calls(function):
    """Keyword arguments, one of them wrong."""
    parameters = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    for wrong in parameters:
        for value in WRONG:
            right = {p.name: RIGHT.get(p.name) for p in parameters if p.default is p.empty}
            if "module" in right:
                right["module"] = torch.nn.Linear(3, 3)
            yield {**right, wrong.name: value}


def unclear(function, *args, **kwargs):
    """What is wrong with the error of a call: None, or its text and where it came from."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = "shardwise" in last.filename
        on_purpose = "raise" in (last.line or "") if ours else isinstance(error, (*CLEAR, RuntimeError))
        of_torch = "argument '" in str(error)  # from its C++, which has no line of its own
        if not on_purpose and not of_torch:
            return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
    return None


@pytest.mark.parametrize("function", public())
def test_wrong_arguments(function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some of them write files
    found = {}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for kwargs in calls(function):
            message = unclear(function, **kwargs)
            if message is not None:
                found.setdefault(message, kwargs)
        if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(function).parameters.values()):
            for value in WRONG:
                message = unclear(function, value)
                if message is not None:
                    found.setdefault(message, value)
    assert not found, "\n".join(f"{message} for {kwargs}" for message, kwargs in found.items())


def test_a_star_import_hides_nothing():
    names = {name for package in PACKAGES for name in package.__all__}
    assert not [name for name in names if hasattr(builtins, name) or name in sys.stdlib_module_names]
    assert shardwise.random.manual_seed is shardwise.manual_seed
