"""Private names of torch: all there, all in one package, each with the feature that needs it."""

import ast
import functools
import re
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise.torch_private import taking, tensors

ROOT = Path(shardwise.__file__).parent


@pytest.mark.parametrize("path", sorted(taking.USED_FOR))
def test_torch_still_has_it(path):
    """If this fails, the feature in the message breaks with this version of torch."""
    try:
        taking.resolve_name(path)
    except AttributeError:
        pytest.fail(f"torch {torch.__version__} has no {path}: {taking.USED_FOR[path]} does not work")


def test_every_name_says_what_needs_it():
    assert all(len(feature) > 5 for feature in taking.USED_FOR.values())


def test_a_name_that_is_gone_breaks_its_feature_alone():
    missing = taking.take("torch._C._no_such_name", "something that nobody needs")
    del taking.USED_FOR["torch._C._no_such_name"]
    assert not isinstance(3, missing)
    with pytest.raises(NotImplementedError, match=r"something that nobody needs needs torch\._C\._no_such_name"):
        missing()


def test_overloads_say_what_they_call():
    """If this fails, replays of captured programs take a call of Python more per op; nothing else changes."""
    add = torch.ops.aten.add.Tensor
    assert tensors.without_python(add) is not add
    assert tensors.without_python(add)(torch.ones(2), torch.ones(2), alpha=3).tolist() == [4, 4]
    assert tensors.without_python(torch.add) is torch.add


@functools.cache
def ours():
    """Every name that our own source defines or sets; and of sys, named tuples, a slot that is set by name."""
    names = {"_getframe", "_current_frames", "_fields", "_hash"}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


ALLOWED = re.compile(r"torch\.utils\._pytree|torch\.ops\.|torch\.distributed\._shard")
# Attributes of torch's objects that are not listed in torch_private/, see its docstring.
ON_OBJECTS = {"_version", "_base", "_parameters", "_buffers"}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_else_touches_them(path):
    if path.parent.name == "torch_private":
        return
    tree = ast.parse(path.read_text())
    # the operator databases of torch's tests are what the proof goes through; Dynamo is told by the name of its module
    known = {"testing/subjects.py", "dynamo.py"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch")]
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"torch(\.\w+)+", ast.unparse(node)):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"_[a-z]\w+", node.attr) and node.attr not in ours():
            names = [] if "torch.ops" in ast.unparse(node) or "aten" in ast.unparse(node) else [f"x.{node.attr}"]
        else:
            continue
        found += [
            n
            for n in names
            if re.search(r"\._[a-zA-Z]", n) and not ALLOWED.match(n) and n.removeprefix("x.") not in ON_OBJECTS
        ]
    assert not found or str(path.relative_to(ROOT)) in known, found
