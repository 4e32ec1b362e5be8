"""Docstrings of public names are in Google form: arguments, results and errors are where editors look for them."""

import ast
import importlib
import inspect
import textwrap

import torch

PACKAGES = ["shardwise"] + [
    f"shardwise.{name}" for name in "checkpoint debug experimental optim parallel random sharded testing".split()
]
TORCHS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.Generator)


def functions():
    """Every public function, and every public method that is not torch's own under the same name."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isfunction(thing):
                yield f"{package}.{name}", thing
            elif inspect.isclass(thing) and thing.__module__.startswith("shardwise"):
                for method, found in vars(thing).items():
                    found = getattr(found, "__func__", found)
                    is_torchs = any(issubclass(thing, theirs) and hasattr(theirs, method) for theirs in TORCHS)
                    if not method.startswith("_") and inspect.isfunction(found) and not is_torchs:
                        yield f"{package}.{name}.{method}", found


FOUND = {func: name for name, func in functions() if func.__module__.startswith("shardwise")}


def statements(tree):
    """The statements of a function, without those of functions inside of it."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            yield node
            yield from statements(node)


def lacks(func):
    """What the docstring of a function does not say."""
    doc, (tree,) = inspect.getdoc(func) or "", ast.parse(textwrap.dedent(inspect.getsource(func))).body
    arguments = [name for name in inspect.signature(func).parameters if name not in ("self", "cls")]
    raises = any(isinstance(node, ast.Raise) and node.exc is not None for node in statements(tree))
    returns = any(isinstance(node, ast.Return) and node.value is not None for node in statements(tree))
    says_what = "Returns:" in doc or "\n\n" not in doc or doc.startswith("Return")  # one line, which tells the result
    found = ["a docstring"] if not doc else []
    found += ["Args"] if arguments and "Args:" not in doc else []
    found += [name for name in arguments if name not in doc]
    found += ["Raises"] if raises and "Raises:" not in doc else []
    return found + (["Returns"] if returns and not says_what else [])


def test_google_form():
    found = {name: lacks(func) for func, name in FOUND.items()}
    assert {name: missing for name, missing in found.items() if missing} == {}
