"""CommDebugMode: how many collectives a program runs, and in which module, as torch's context manager counts them."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from shardwise.comm.rank_tensor import RankTensor
from shardwise.comm.record import Entry, Recorder
from shardwise.debug.trace import ModuleTrace, Operation
from shardwise.engine.call_shape import op_name
from shardwise.layout import Placement
from shardwise.torch_private.autograd import current_node, number_of_node, sequence_number
from shardwise.torch_private.tensors import DispatchMode
from shardwise.wrapper import Wrapper

_functional = torch.ops.c10d_functional
Op = Any  # one of torch.ops
_OPS: dict[str, Op] = {
    "all_gather": _functional.all_gather_into_tensor,
    "all_reduce": _functional.all_reduce,
    "reduce_scatter": _functional.reduce_scatter_tensor,
    "all_to_all": _functional.all_to_all_single,
    "broadcast": torch.ops.c10d.broadcast_,
    "scatter": torch.ops.c10d.scatter_,
    "send_recv": torch.ops.c10d.send,
}
_OPS_OF_DATA_PARALLEL: dict[str, Op] = {  # torch's FSDP2 and DDP call these
    "all_gather": torch.ops.c10d._allgather_base_,
    "all_reduce": torch.ops.c10d.allreduce_,
    "reduce_scatter": torch.ops.c10d._reduce_scatter_base_,
}
_NO_COLLECTIVES = (torch.ops.c10d.barrier, torch.ops.c10d.monitored_barrier_)
_NO_OPERATIONS = ("__get__", "__set__", "__repr__", "__format__", "backward")


class CommDebugMode(TorchFunctionMode):
    """Counts the collectives inside of its ``with`` block, by kind and by module. Entering it starts from zero.

    It counts what distributed tensors communicate, and the collectives of torch that the program itself calls:
    functional ones, and those of torch.distributed (under their names in torch.ops.c10d, as are those of
    `fully_shard`). It does not count the few integers by which ranks compare sizes and random keys, which torch's own
    tensors take on trust; the ledger has them.

    Noise levels of the tables: 0 shows the collectives of each module; 1 its distributed operations too; 2 the plain
    ones too; 3 also those that only look at a tensor differently. Of the backward pass they show the collectives: its
    operations are those of the local tensors' own graphs.

    Example:
        >>> import shardwise, torch
        >>> x = shardwise.ones(8, device_mesh=shardwise.simulate(4), placements=[shardwise.Shard(0)])
        >>> with CommDebugMode() as mode:
        ...     total = x.sum().full_tensor()
        >>> mode.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
        1
    """

    def __init__(self) -> None:
        super().__init__()
        self._reset()

    def _reset(self) -> None:
        self.root = ModuleTrace("Global")
        self._path: list[ModuleTrace] = [self.root]
        self._starts: list[int] = []
        self._names: dict[int, str] = {}

    # -- on and off -----------------------------------------------------------------------------------------
    def __enter__(self) -> CommDebugMode:
        self._reset()
        self._recorder = Recorder(self._record)
        self._recorder.open()
        self._collectives = _Collectives(self) if torch.distributed.is_initialized() else nullcontext()
        self._collectives.__enter__()
        self._hooks = [register_module_forward_pre_hook(self._enter_module)]
        self._watched: set[torch.nn.Module] = set()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        for hook in self._hooks:
            hook.remove()
        self._collectives.__exit__(*exc)
        self._recorder.close()

    # -- what happens ---------------------------------------------------------------------------------------
    def _enter_module(self, module: torch.nn.Module, inputs: object) -> None:
        if module not in self._watched:  # a hook of its own runs after those it has: what styles communicate is its
            self._watched.add(module)
            self._hooks.append(module.register_forward_hook(self._leave_module, always_call=True))
        if len(self._path) == 1:  # the outermost module names those inside
            top = type(module).__name__
            self._names = {id(m): f"{top}.{name}" if name else top for name, m in module.named_modules()}
        name = self._names.get(id(module), type(module).__name__)
        self._path.append(self._path[-1].child(name, module))
        self._starts.append(sequence_number())

    def _leave_module(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        if self._starts:  # a module entered before the mode was is not ours
            self._path.pop().spans.append((self._starts.pop(), sequence_number()))

    def _record(self, entry: Entry) -> None:
        if entry.op != "random" and (entry.op, entry.reason) != ("from_local", "sizes"):
            found = _OPS_OF_DATA_PARALLEL.get(entry.kind) if entry.op == "data_parallel" else None
            self._count(found or _OPS.get(entry.kind, entry.kind), entry.backward)

    def _count(self, op: Op, backward: bool) -> None:
        """Count a collective. One of the backward pass belongs to the module whose forward made its autograd node."""
        node = current_node()
        backward = backward or node is not None
        path = self.root.path_to(number_of_node(node)) if node is not None and len(self._path) == 1 else self._path
        for module in path:
            module.collectives[backward][op] += 1

    def __torch_function__(self, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None) -> Any:
        """Sees the torch functions that the program calls, not those that they call in turn."""
        self._saw(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _saw(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        namespace = str(func).split(".")[0]
        if namespace in ("_c10d_functional", "_c10d_functional_autograd"):
            known = getattr(_functional, op_name(func).rpartition("::")[2].split(".")[0], None)
            if known is not None and known is not _functional.wait_tensor:
                self._count(known, False)
            return
        if getattr(func, "__name__", "") in _NO_OPERATIONS:
            return
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        ours = [x._layout for x in tensors if isinstance(x, Wrapper)]
        mesh, shardings = repr(ours[0].mesh) if ours else "", [str(layout.placements) for layout in ours]
        self._path[-1].operations.append(Operation(op_name(func), [str(_shape(x)) for x in tensors], shardings, mesh))

    # -- answers --------------------------------------------------------------------------------------------
    def get_comm_counts(self) -> dict[Op, int]:
        """Return how often each collective ran, keyed by the ops of torch.ops.c10d_functional."""
        forward, backward = self.root.collectives.values()
        return defaultdict(int, forward + backward)

    @property
    def comm_counts(self) -> dict[Op, int]:
        """`get_comm_counts()`, as an attribute."""
        return self.get_comm_counts()

    @property
    def comm_module_counts(self) -> dict[str, dict[str, dict[Op, int]]]:
        """The same by module and pass, of modules that communicate: {module: {"forward": {op: n}, "backward": ...}}."""
        passes = {"forward": False, "backward": True}
        return {
            m.fqn: {name: defaultdict(int, m.collectives[backward]) for name, backward in passes.items()}
            for m in self.root.walk()
            if any(m.collectives.values())
        }

    def get_total_counts(self) -> int:
        """Return how many collectives ran."""
        return sum(self.get_comm_counts().values())

    def get_parameter_info(self) -> dict[str, dict[str, torch.nn.Parameter]]:
        """Return the parameters of every module that ran: {module: {name: parameter}}."""
        return {m.fqn: dict(m.parameters) for m in self.root.walk() if m.parameters}

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """Return the placements of every distributed parameter: {module.name: placements}."""
        return {
            f"{fqn}.{name}": tuple(p._layout.placements)
            for fqn, params in self.get_parameter_info().items()
            for name, p in params.items()
            if isinstance(p, Wrapper)
        }

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Return the modules as an indented tree, with their collectives.

        Args:
            noise_level: How much is shown, from 0 to 3: see the class.
        """
        return "\n".join(self.root.lines(noise_level)) + "\n"

    def log_comm_debug_tracing_table_to_file(self, file_name: str = "comm_mode_log.txt", noise_level: int = 3) -> None:
        """Write `generate_comm_debug_tracing_table` to a file.

        Args:
            file_name: The file; one that is there is replaced.
            noise_level: How much is shown, from 0 to 3: see the class.
        """
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level))

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write the same tree to a file, as JSON.

        Args:
            file_name: The file; one that is there is replaced.
            noise_level: How much is shown, from 0 to 3: see the class.
        """
        Path(file_name).write_text(json.dumps(self.root.as_json(noise_level), indent=4))

    def __repr__(self) -> str:
        counts = ", ".join(f"{op}: {n}" for op, n in self.get_comm_counts().items())
        return f"CommDebugMode(total={self.get_total_counts()}{', ' + counts if counts else ''})"


def _called_by_us() -> bool:
    """Whether the nearest caller outside of torch and of this file is the library."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.partition(".")[0] != "torch":
            return name.partition(".")[0] == "shardwise"
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _shape(tensor: torch.Tensor) -> Sequence[object]:
    if isinstance(tensor, Wrapper):
        return tensor._layout.shape
    if isinstance(tensor, RankTensor):  # the ranks may differ
        return [tuple(value.shape) for value in tensor.ranks]
    return tuple(tensor.shape)


class _Collectives(DispatchMode):
    """Shows the collectives of torch.distributed, which no function mode sees."""

    def __init__(self, mode: CommDebugMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None) -> Any:
        """Count a call, unless the library made it: `_record` counts what that communicates."""
        op = func.overloadpacket
        if func.namespace == "c10d" and op not in _NO_COLLECTIVES and not _called_by_us():
            self.mode._count(op, False)
        return func(*args, **(kwargs or {}))
