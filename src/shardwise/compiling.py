"""torch.compile on programs with distributed tensors: they are captured, and their local code is compiled.

Importing the package replaces `torch.compile` by a function that decides at each call: where distributed tensors are
among the arguments, or behind the function or module, the call is captured (`captures/`) and the backend compiles what
the ranks do with their local tensors. All other calls are torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from shardwise.context import of_thread
from shardwise.errors import CaptureError
from shardwise.functions import COMPILED_ON_RANKS
from shardwise.protocols import Item
from shardwise.reachable import tensors_behind
from shardwise.torch_private.tensors import compile_backend, has_no_compiler, mark_inline
from shardwise.wrapper import Wrapper

Function = Callable[..., Any]
_torchs = torch.compile


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
        if getattr(func, "__module__", None) in COMPILED_ON_RANKS:
            with _compiled_on_ranks(func, options):
                return func(*args, **kwargs)
        captured.append(_captured(func, options))
        return captured[0](*args, **kwargs)

    mark_inline(call, func)
    return call


@contextmanager
def _compiled_on_ranks(func: Function, options: dict[str, Any]) -> Iterator[None]:
    """Inside, what a function of torch's compiles for each rank is compiled as the program asked for. Functions that
    torch itself defines on the way and compiles change nothing."""
    outer = of_thread.compiling
    of_thread.compiling = outer if "<locals>" in func.__qualname__ else options
    try:
        yield
    finally:
        of_thread.compiling = outer


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
    return any(isinstance(x, Wrapper) for x in tensors_behind(func))
