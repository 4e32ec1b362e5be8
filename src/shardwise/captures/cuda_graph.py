"""A captured program as a CUDA graph: the GPU repeats all of its kernels at once, and Python only starts them.

A graph reads and writes fixed memory. Arguments are copied into it, results out of it. Gradients are left in it, where
the next run overwrites them: so a run whose gradients of the last time somebody still holds goes without the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.captures.aliasing import Memory
from shardwise.captures.program import Flattened, OptimizerStep, Program, SetGrad, Statement
from shardwise.torch_private.tensors import storage_users

Run = Callable[..., tuple[torch.Tensor, ...]]


class GraphedRun:
    """A function of a program's plain inputs that is written down by CUDA at its second call and repeated from then on.

    Attributes:
        why_not: Why there is no graph; empty where there is one, or will be.
    """

    def __init__(self, program: Program, run: Run) -> None:
        self._program, self._run = program, run
        self.why_not = _why_not(program)
        self._is_warm = False
        self._graph: _Graph | None = None

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the program."""
        if self.why_not:
            return self._run(*tensors)
        if self._graph is not None:
            if self._graph.can_run():
                return self._graph.run(tensors)
            self._graph = None
            return self._run(*tensors)
        if not self._is_warm:  # libraries choose kernels and take memory at their first call
            self._is_warm = True
            return _on_own_stream(self._run, tensors)
        try:
            self._graph = _Graph(self._program, self._run, tensors)
        except RuntimeError as error:
            self.why_not = f"CUDA cannot write it down: {str(error).splitlines()[0]}"
            return self._run(*tensors)
        return self._graph.run(tensors)


class _Graph:
    """What CUDA has written down, and the memory that it works on."""

    def __init__(self, program: Program, run: Run, tensors: Sequence[torch.Tensor]) -> None:
        self._inputs = [t.detach().clone() for t in tensors]
        self._graph = torch.cuda.CUDAGraph()
        self._optimizers = [s.func.optimizer for s in program.statements if isinstance(s.func, OptimizerStep)]
        self._state = [(t, t.data_ptr()) for t in program.state.values()]
        leaves = dict.fromkeys(s.args[0] for s in program.statements if isinstance(s.func, SetGrad))
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = run(*self._inputs)
        found = [program.state[leaf] for leaf in leaves]
        self._options = list(map(_options, self._optimizers))
        self._gone = [leaf for leaf in found if leaf.grad is None]
        self._grads = [(leaf, leaf.grad, storage_users(leaf.grad)) for leaf in found if leaf.grad is not None]

    def can_run(self) -> bool:
        """Whether nobody else holds a gradient of the last run, parameters are where they were, and optimizers have
        the options and tensors of then."""
        for leaf, grad, users in self._grads:
            if storage_users(grad) != users - (leaf.grad is not grad):
                return False
        if any(tensor.data_ptr() != place for tensor, place in self._state):
            return False
        return all(map(_are_same, map(_options, self._optimizers), self._options))

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copy arguments in, let the GPU run, copy results out."""
        for static, given in zip(self._inputs, tensors, strict=True):
            static.copy_(given)
        self._graph.replay()
        for leaf, grad, _ in self._grads:
            if leaf.grad is not grad:
                leaf.grad = grad
        for leaf in self._gone:
            leaf.grad = None
        return tuple(out.clone() for out in self._outputs)


def _why_not(program: Program) -> str:
    """Why a program cannot be a CUDA graph; empty if it can."""
    for statement in program.statements:
        if reason := _why_not_this(statement):
            return f"{statement.label} ({statement.source}): {reason}"
    if any(isinstance(s.func, SetGrad) and s.args[0] not in program.state for s in program.statements):
        return "it sets the gradient of an argument"
    memory = Memory(program)
    if memory.share(program.inputs, (ref for s in program.statements for ref in s.writes)):
        return "it writes to an argument"
    if memory.share(program.outputs, (*program.inputs, *program.state)):
        return "a result is in memory that was there before"
    if not program.state or not all(t.is_cuda for t in program.state.values()):
        return "it works with tensors that are not on a GPU"
    return ""


def _why_not_this(statement: Statement) -> str:
    func = statement.func
    if isinstance(func, OptimizerStep):
        groups = func.optimizer.param_groups
        return "" if all(group.get("capturable") for group in groups) else "the optimizer is not capturable=True"
    if statement.is_op or isinstance(func, Flattened):
        return "it draws random numbers" if statement.draws else ""
    if isinstance(func, SetGrad) or (statement.moves and not statement.outside):
        return ""
    return "it runs Python"


def _options(optimizer: torch.optim.Optimizer) -> list[object]:
    """The options of an optimizer, and the tensors that it keeps."""
    found = [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    return found + [value for kept in optimizer.state.values() for value in kept.values()]


def _are_same(now: list[object], before: list[object]) -> bool:
    """Whether all are the same tensors, or equal numbers."""
    return len(now) == len(before) and all(
        one is other or (not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and one == other)
        for one, other in zip(now, before, strict=True)
    )


def _on_own_stream(run: Run, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run as CUDA wants it before it writes something down."""
    here, own = torch.cuda.current_stream(), torch.cuda.Stream()
    own.wait_stream(here)
    with torch.cuda.stream(own):
        found = run(*tensors)
    here.wait_stream(own)
    return found
