"""torch.compile on programs with distributed tensors: they are captured, and their local code is compiled.

Importing the package replaces `torch.compile` by a function that decides at each call: where distributed tensors are
among the arguments, or behind the function or module, the call is captured (`captures/`) and the backend compiles what
the ranks do with their local tensors. All other calls are torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from shardwise.errors import CaptureError
from shardwise.protocols import Item
from shardwise.torch_private.tensors import compile_backend, has_no_compiler, mark_inline
from shardwise.wrapper import Wrapper

Function = Callable[..., Any]
_torchs = torch.compile
_MANY = 100  # entries of a container that is not looked through


def take_compile() -> None:
    """Replace torch.compile."""

    @functools.wraps(_torchs)
    def compile_or_capture(model: Item = None, **options: Item) -> Item:
        if model is None:
            return lambda found: compile_or_capture(found, **options)
        made: Item = _torchs(model, **options)
        if options.get("disable") or not callable(made) or isinstance(model, type):
            return made
        if isinstance(model, torch.nn.Module):
            made.forward = _choosing(model, made.forward, options)
            return made
        return _choosing(model, made, options)

    torch.compile = compile_or_capture


def _choosing(func: Function, compiled: Function, options: dict[str, Any]) -> Function:
    """A function that is captured where distributed tensors are met, and else what torch compiled."""
    captured: list[Function] = []

    @functools.wraps(func if not isinstance(func, torch.nn.Module) else compiled)
    def call(*args: Item, **kwargs: Item) -> Item:
        if captured:
            return captured[0](*args, **kwargs)
        if not any(isinstance(x, Wrapper) for x in tree_iter((args, kwargs))) and not _holds_distributed(func):
            return compiled(*args, **kwargs)
        captured.append(_captured(func, options))
        return captured[0](*args, **kwargs)

    mark_inline(call, func)
    return call


def _captured(func: Function, options: dict[str, Any]) -> Function:
    backend = options.get("backend", "inductor")
    # imported when the first program with distributed tensors is compiled: most programs never need them
    captures = import_module("shardwise.captures.captured")
    if backend in ("eager", "aot_eager"):  # what the program does, without a compiler
        return captures.Captured(func, whole=options.get("fullgraph", False))
    compiler = import_module("shardwise.captures.compiled").Compiler
    dynamic = options.get("dynamic")
    made = compile_backend(backend, options.get("mode"), options.get("options"), dynamic)
    others = {key: value for key, value in options.items() if key not in ("fullgraph", "dynamic")}
    compile = compiler(_told(made), functools.partial(_torchs, **others), is_dynamic=dynamic is not False)
    return captures.Captured(func, compile=compile, whole=options.get("fullgraph", False))


def _told(backend: Function) -> Function:
    """The backend, with an error that says what to install."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Function:
        try:
            return backend(graph, inputs)
        except Exception as error:
            if has_no_compiler(error):
                raise CaptureError(
                    f"torch.compile: Inductor needs a C++ compiler on CPUs (g++ or clang++) and Triton on GPUs, and "
                    f"found none: {error}. Install one, or replay without a compiler: "
                    f"torch.compile(..., backend='eager') or shardwise.capture(...)"
                ) from error
            raise

    return compile_graph


def _holds_distributed(func: Function) -> bool:
    """Whether a function knows distributed tensors: as its module's, or by the variables around it."""
    return any(isinstance(x, Wrapper) for x in _known(func))


def _known(func: Item) -> Iterator[torch.Tensor]:
    for item in (func, getattr(func, "__self__", None)):
        yield from _tensors_in(item, 2)
    yield from _tensors_around(getattr(func, "__func__", func), 2)


def _tensors_around(func: Item, depth: int) -> Iterator[torch.Tensor]:
    """Tensors in the variables that a function names."""
    cells = [cell.cell_contents for cell in getattr(func, "__closure__", None) or () if _is_filled(cell)]
    names = getattr(getattr(func, "__code__", None), "co_names", ())
    table = getattr(func, "__globals__", {})
    for value in (*cells, *(table[name] for name in names if name in table)):
        yield from _tensors_in(value, depth)


def _tensors_in(value: Item, depth: int) -> Iterator[torch.Tensor]:
    """Tensors in a value: a module, an optimizer, a small container, a function, an object of the program's."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        yield from (p for group in value.param_groups for p in group["params"])
    elif depth and not isinstance(value, (type, ModuleType)):
        inside: Iterable[Item] = ()
        if isinstance(value, (list, tuple, dict)):
            inside = (value.values() if isinstance(value, dict) else value) if len(value) <= _MANY else ()
        elif (getattr(value, "__module__", None) or "torch").partition(".")[0] in ("torch", "shardwise", "builtins"):
            return
        elif isinstance(value, FunctionType):
            yield from _tensors_around(value, depth - 1)
        else:
            inside = list(vars(value).values()) if hasattr(value, "__dict__") else ()
        for item in inside:
            yield from _tensors_in(item, depth - 1)


def _is_filled(cell: Item) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
