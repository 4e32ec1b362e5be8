"""`estimate`: play a step on a mesh without values and report what it costs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from shardwise.comm.record import Entry
from shardwise.comm.record import Recorder as Listener
from shardwise.errors import MeshError, OutlineError
from shardwise.forecast.hardware import Hardware
from shardwise.forecast.memory import Memory
from shardwise.forecast.progress import Bar
from shardwise.forecast.recorder import Recorder
from shardwise.forecast.report import Report
from shardwise.forecast.timing import play
from shardwise.mesh import OutlinedMesh
from shardwise.simulated_mesh import active_mesh
from shardwise.torch_private.tensors import fake_mode
from shardwise.wrapper import Wrapper


def estimate(
    step: Callable[..., Any],
    *args: object,
    hardware: str | Path | Hardware = "h100-sxm",
    mesh: OutlinedMesh | None = None,
    warmup: int = 1,
    tokens: int | None = None,
    told: Callable[[int, int], None] | None = None,
    **kwargs: object,
) -> Report:
    """Play one step of a program on an outlined mesh: what it takes in memory, bytes and time on one rank.

    Args:
        step: The function to play, as step(*args, **kwargs): one training step, for example.
        hardware: A name (`h100-sxm`, `h200-sxm`, `a100-sxm-80gb`), a JSON file that `shardwise calibrate` wrote, or a
            `Hardware`.
        mesh: The outlined mesh; by default that of the enclosing ``with mesh:``, or of a tensor among the arguments.
        warmup: How many steps to play first, so that the step that counts finds the optimizer's state. The peak of
            memory is that of all of them.
        tokens: How many tokens all ranks together process in a step, for tokens per second.
        told: Is told of progress now and then, as told(steps that are done, ops so far). By default a bar is shown
            where stderr is a terminal.

    Returns:
        A report with `.memory`, `.bytes`, `.time`, `.fits`, `.check(ledger, peak)` and `.save(path)`.

    Raises:
        OutlineError: There is no outlined mesh, or the step asks for a value that nobody said what to assume of.

    Example:
        >>> import shardwise, torch
        >>> from shardwise import Replicate, Shard
        >>> with shardwise.outline((64, 8), axis_names=("dp", "tp")) as mesh:
        ...     w = shardwise.zeros(8192, 8192, device_mesh=mesh, placements=[Replicate(), Shard(0)])
        ...     x = shardwise.zeros(512, 8192, device_mesh=mesh, placements=[Shard(0), Replicate()])
        ...     report = shardwise.estimate(lambda: (x @ w).relu())
        >>> report.bytes
        {('all_reduce', 'tp'): 458752}
    """
    if mesh is not None and not isinstance(mesh, OutlinedMesh):
        raise MeshError(f"estimate: mesh must be what shardwise.outline(...) gives, or None; got {mesh!r}")
    hardware, mesh = Hardware.load(hardware), mesh or _mesh_of(step, (args, kwargs))
    recorder = Recorder(mesh.mode)
    entries: list[Entry] = []
    done = 0
    with ExitStack() as stack:
        tell = told or stack.enter_context(Bar(warmup + 1)).told
        recorder.told = lambda ops: tell(done, ops)
        if fake_mode() is not mesh.mode:
            stack.enter_context(mesh)
        gc.collect()
        stack.enter_context(recorder.recording())
        for done in range(1, warmup + 1):
            step(*args, **kwargs)
            tell(done, recorder.moment)
        first = len(recorder.events)
        listener = Listener(entries.append)
        listener.open()
        stack.callback(listener.close)
        step(*args, **kwargs)
    time = play(recorder.events[first:], hardware)
    return Report(mesh, hardware, Memory(recorder.tracker.changes, warmup > 0), entries, time, tokens)


def _mesh_of(step: object, arguments: object) -> OutlinedMesh:
    active = active_mesh()
    if isinstance(active, OutlinedMesh):
        return active
    tensors: list[Any] = []
    for x in tree_iter(arguments):
        tensors += (
            [x] if isinstance(x, torch.Tensor) else list(x.parameters()) if isinstance(x, torch.nn.Module) else []
        )
    for x in tensors:
        source = x._layout.mesh.source if isinstance(x, Wrapper) else None
        if isinstance(source, OutlinedMesh):
            return source
    raise OutlineError(
        "estimate: no outlined mesh is active; call it inside of `with outline(...) as mesh:`, or give mesh="
    )
