"""The recorder: what the rank that is played does, in order: kernels, communications, allocations."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_iter

from shardwise.comm.outline import Passage, Watcher, watchers
from shardwise.comm.record import of_thread, user_line
from shardwise.comm.without_values import DEVICE, Absent
from shardwise.forecast.kernels import kernel_of
from shardwise.forecast.memory import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    INPUTS,
    PARAMETERS,
    STATE,
    TEMPORARY,
    Tracker,
    takes_memory,
)
from shardwise.forecast.timing import Began, Event, Looked, Waited
from shardwise.protocols import Args, Kwargs, Op, Result
from shardwise.torch_private.autograd import current_node, number_of_node, sequence_number
from shardwise.torch_private.tensors import DispatchMode, FakeTensor, schema_of, take_resize
from shardwise.wrapper import Wrapper

_ROOT = __name__.partition(".")[0]
_MODULES = f"{_ROOT}.parallel"
_PASSED_OVER = ("torch", "contextlib", "unittest", f"{_ROOT}.forecast", f"{_ROOT}.comm", f"{_ROOT}.torch_private")
_NO_KERNELS = (
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
    "alias",
)


class Recorder(DispatchMode, Watcher):  # type: ignore[misc]
    """Inside, everything that the rank does is noted: `events` in order, and every storage in `tracker`."""

    def __init__(self, mode: Absent) -> None:
        super().__init__()
        self.mode = mode  # only tensors of this mesh count
        self.events: list[Event] = []
        self.moment = -1  # before the step
        self.tracker = Tracker(lambda: self.moment, mode)
        self._where: dict[
            int, tuple[str, str]
        ] = {}  # by the number of an autograd node: line and module of its forward
        self._path: list[str] = []
        self._names: dict[int, str] = {}
        self._stepping = 0
        self._allocating: str | None = None
        self._views = self._modules = 0  # since the last op
        self._phase = ""  # of the last op
        self.told: Callable[[int], None] | None = None  # is told now and then of how many ops there were

    # -- on and off -------------------------------------------------------------------------------------------------
    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """From here on everything is noted; what is alive already is the memory before the step."""
        self.take_stock()
        hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        with ExitStack() as stack:
            for hook in hooks:
                stack.callback(hook.remove)
            stack.enter_context(take_resize(self._resized))
            watchers.append(self)
            stack.callback(watchers.remove, self)
            stack.enter_context(mock.patch.object(self.mode, "looked", self._looked))
            stack.enter_context(self)
            self.moment = 0
            yield self
        self.take_stock()

    def begin_here(self) -> None:
        """What was recorded until now is forgotten: what is alive is the memory before the step."""
        self.events.clear()
        self.moment = -1
        self.take_stock()
        self.tracker.forget_past(INPUTS)
        self.moment = 0

    def take_stock(self) -> None:
        """Which storages there are, and what for."""
        found = gc.get_objects()
        # by `type`: to ask an object for its class may run code of its own
        kinds = set(map(type, found))
        of_modules = {kind for kind in kinds if issubclass(kind, nn.Module)}
        of_optimizers = {kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)}
        modules = [x for x in found if type(x) in of_modules and "_parameters" in vars(x)]
        optimizers = [x for x in found if type(x) in of_optimizers and "param_groups" in vars(x)]
        params = [p for module in modules for p in module._parameters.values() if p is not None]
        params += [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self.tracker.claim((p.grad for p in params if p.grad is not None), GRADIENTS)
        for optimizer in optimizers:
            self._claim_state(optimizer)
        self.tracker.claim(params, PARAMETERS)
        for x in found:
            # a tensor whose making failed has no mode yet
            if type(x) is FakeTensor and getattr(x, "fake_mode", None) is self.mode and takes_memory(x):
                known = self.tracker.knows(x.untyped_storage())
                self.tracker.see(x, INPUTS if self.moment < 0 or known else TEMPORARY)
        del found

    def _claim_state(self, optimizer: torch.optim.Optimizer) -> None:
        self.tracker.claim((x for x in tree_iter(dict(optimizer.state)) if isinstance(x, torch.Tensor)), STATE)

    # -- what happens -----------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Op, types: Args, args: Args = (), kwargs: Kwargs | None = None) -> Result:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        kwargs = kwargs or {}
        ours = next((t for t in types if issubclass(t, Wrapper)), None)
        if ours is not None:  # a distributed tensor: what it does with its local tensors is what counts
            with self:
                return ours.__torch_dispatch__(func, types, args, kwargs)
        out = func(*args, **kwargs)
        if func.namespace != "prim":
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Op, args: Args, kwargs: Kwargs, out: Result) -> None:
        outs = [x for x in tree_iter(out) if isinstance(x, FakeTensor) and takes_memory(x)]
        fresh = [x for x in outs if not self.tracker.knows(x.untyped_storage())]
        line, module, phase = self._place()
        for x in fresh:
            self.tracker.see(x, self._category(phase), line, module)
        name = func.overloadpacket.__name__
        is_written = schema_of(func).is_mutable
        if name in _NO_KERNELS or not (fresh or is_written):
            self._views += bool(outs)
            return
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not any(map(takes_memory, (*outs, *tensors))):
            return
        self.moment += 1
        if self.told is not None and self.moment % 500 == 0:
            self.told(self.moment)
        written = outs or [x for x in tree_iter(args[:1]) if isinstance(x, torch.Tensor)]
        kernel = kernel_of(func, args, kwargs, out, written)
        kernel.line, kernel.module, kernel.phase, kernel.distributed = line, module, phase, self.mode.calls > 0
        kernel.of_library = _is_of_library()
        kernel.begins_again = phase == "recomputed" != self._phase
        self._phase = phase
        kernel.views, kernel.modules, self._views, self._modules = self._views, self._modules, 0, 0
        self.events.append(kernel)

    def _place(self) -> tuple[str, str, str]:
        """Line, module and phase of what runs now; in a backward pass, of the forward that it is of."""
        node = current_node()
        if node is None:
            where = user_line(), self._path[-1] if self._path else ""
            if torch.is_grad_enabled():
                self._where[sequence_number() - 1] = where
            return *where, "optimizer" if self._stepping else "forward"
        if torch.is_grad_enabled() and self._path:
            where = user_line(), self._path[-1]
            self._where[sequence_number() - 1] = where
            return *where, "recomputed"
        line, module = self._where.get(number_of_node(node)) or (user_line(), "")
        return line, module, "backward"

    def _category(self, phase: str) -> str:
        if self._allocating == "buffer":
            return BUFFERS
        note = of_thread.note
        if self._allocating == "result" and note is not None and note.op in ("data_parallel", "fully_shard"):
            return GRADIENTS if note.backward else GATHERED
        return ACTIVATIONS if phase in ("forward", "recomputed") else TEMPORARY

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """A storage of the library's own changed its size: the memory of gathered parameters comes and goes so."""
        self.tracker.see_storage(storage, GATHERED)
        block = self.tracker.block_of(storage)
        if block is not None and not block.fixed:
            block.category, block.fixed = GATHERED, True

    # -- communication, as `comm/outline.py` tells it ---------------------------------------------------------------
    def begin(self, passage: Passage) -> None:
        line = passage.note.source if passage.note is not None and passage.note.source else user_line()
        self.events.append(Began(passage, line))

    def wait(self, passage: Passage) -> None:
        self.events.append(Waited(passage))

    def _looked(self) -> None:
        """The program looks at a value: it waits for what it has started."""
        self.events.append(Looked())

    @contextmanager
    def allocating(self, what: str) -> Iterator[None]:
        before, self._allocating = self._allocating, what
        try:
            yield
        finally:
            self._allocating = before

    # -- modules and optimizers -------------------------------------------------------------------------------------
    def _enter_module(self, module: nn.Module, inputs: object) -> None:
        if not self._path:
            top = type(module).__name__
            self._names |= {id(m): f"{top}.{name}" if name else top for name, m in module.named_modules()}
        self._modules += 1
        self._path.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, module: nn.Module, inputs: object, output: object) -> None:
        if self._path:
            self._path.pop()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._stepping += 1
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.tracker.claim((p.grad for p in params if p.grad is not None), GRADIENTS)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._stepping -= 1
        self._claim_state(optimizer)


def _is_of_library() -> bool:
    """Whether what runs now was started by the library's own modules and hooks: the innermost frame that is neither
    torch's nor of those who watch is one of theirs."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(_PASSED_OVER):
            return name.startswith(_MODULES)
        frame = frame.f_back
    return False
