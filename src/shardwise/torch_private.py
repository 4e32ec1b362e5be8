"""The only file that touches private names of torch, each with the feature that needs it.

A name that a torch release has dropped does not stop the import: what stands in its place raises when it is used, and
names the feature that is lost. `tests/test_torch_private.py` fails for each such name, and for a private name that is
used anywhere else. Two kinds are not listed here: `torch.utils._pytree`, which torch's own documentation shows, and
attributes that every tensor and module has had since torch 1.0 (`_version`, `_base`, `_parameters`, `_buffers`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter, methodcaller
from pkgutil import resolve_name
from typing import Any

import torch

USED_FOR: dict[str, str] = {}
"""Private name of torch -> the feature that needs it."""


def take(path: str, feature: str) -> Any:
    """What torch has at `path`, or a class that raises when it is called and is nobody's type."""
    USED_FOR[path] = feature
    try:
        return resolve_name(path)
    except AttributeError:

        def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(
                f"{feature} needs {path}, which torch {torch.__version__} does not have. "
                "Use a torch version in the supported range (see pyproject.toml)"
            )

        return type("Missing", (), {"__new__": refuse})


# --- tensor classes -------------------------------------------------------------------------------------------------
make_wrapper: Callable[..., Any] = take("torch.Tensor._make_wrapper_subclass", "tensors of a global shape, no memory")
ignore_torch_function: Any = take("torch._C._disabled_torch_function_impl", "tensor classes that only dispatch sees")
without_torch_function: Any = take("torch._C.DisableTorchFunctionSubclass", "torch's own attributes of DTensors")
with_torch_function: Any = take("torch._C._EnableTorchFunction", "rules of functions in __torch_dispatch__")
requires_grad_in_cpp: Any = take("torch._C.TensorBase.requires_grad", "requires_grad as C++ sees it")
has_same_memory_kind: Any = take("torch._has_compatible_shallow_copy_type", "module.to() of sharded parameters")
typed_storage: Any = take("torch.Tensor._typed_storage", "the storage of a ShardedTensor raises clearly")

# --- modes ----------------------------------------------------------------------------------------------------------
is_any_autocast_enabled: Callable[[], bool] = take("torch._C._is_any_autocast_enabled", "autocast")
is_forward_grad_enabled: Callable[[], bool] = take("torch._C._is_fwd_grad_enabled", "seeing that a Function is applied")
are_transforms_active: Callable[[], bool] = take("torch._C._are_functorch_transforms_active", "torch.func")
is_transformed: Callable[[Any], bool] = take("torch._C._functorch.is_functorch_wrapped_tensor", "torch.func")
make_dual: Any = take("torch._C._VariableFunctions._make_dual", "forward-mode differentiation")
unpack_dual: Any = take("torch._C._VariableFunctions._unpack_dual", "forward-mode differentiation")
count_dispatch_modes: Callable[[], int] = take("torch._C._len_torch_dispatch_stack", "ops under a TorchDispatchMode")
_dispatch_stack: Callable[[], list[Any]] = take(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "capture: which program a thread writes down"
)
_TRACKING = "torch.autograd.grad_mode._force_original_view_tracking"
_track_views: Callable[[bool], AbstractContextManager[None]] = take(_TRACKING, "views on ranks that hold nothing")
_function_modes: Callable[[], list[Any]] = take(
    "torch.overrides._get_current_function_mode_stack", "capture: torch.device(...) around a call"
)
DeviceMode: type = take("torch.utils._device.DeviceContext", "capture: torch.device(...) around a call")
set_grad_mode: Callable[[bool], None] = take("torch._C._set_grad_enabled", "capture: replays without autograd")
below_autograd: Callable[[], AbstractContextManager[None]] = take(
    "torch._C._AutoDispatchBelowAutograd", "capture: replays without autograd's checks"
)
without_modes: Any = take("torch.utils._python_dispatch._disable_current_modes", "random keys in a TorchDispatchMode")
DispatchMode: Any = take("torch.utils._python_dispatch.TorchDispatchMode", "CommDebugMode")
without_fake_mode: Any = take("torch._subclasses.fake_tensor.unset_fake_temporarily", "programs under FakeTensorMode")
FakeTensor: Any = take("torch._subclasses.fake_tensor.FakeTensor", "random ops under FakeTensorMode")
FakeMode: type = take("torch._subclasses.fake_tensor.FakeTensorMode", "outline: tensors without values")
AsksForValue: type[Exception] = take(
    "torch._subclasses.fake_tensor.DataDependentOutputException", "outline: values asked for"
)
HasNoSize: type[Exception] = take(
    "torch._subclasses.fake_tensor.DynamicOutputShapeException", "outline: sizes from values"
)
_get_dispatch_mode: Any = take("torch._C._get_dispatch_mode", "make_fx refuses a move between processes")
_mode_keys: Any = take("torch._C._TorchDispatchModeKey", "make_fx refuses a move between processes")


def dispatch_modes() -> list[Any]:
    """The dispatch modes of this thread, the innermost last."""
    return _dispatch_stack() if count_dispatch_modes() else []


_attention = [
    take(f"torch._C._get_{kind}_sdp_enabled", "capture: sdpa_kernel(...) around a call")
    for kind in ("flash", "mem_efficient", "math", "cudnn")
]


def attention_kernels() -> tuple[bool, ...]:
    """Which kernels of attention may be used."""
    return tuple([is_enabled() for is_enabled in _attention])


def function_modes() -> list[Any]:
    """The function modes of this thread, the innermost last."""
    return _function_modes()


# The mode in which make_fx is writing a graph; None elsewhere.
tracing_mode: Callable[[], Any] = functools.partial(_get_dispatch_mode, _mode_keys.PROXY)
# The mode in which tensors have no values; None elsewhere.
fake_mode: Callable[[], Any] = functools.partial(_get_dispatch_mode, _mode_keys.FAKE)


# --- torch.func -----------------------------------------------------------------------------------------------------
_unwrapped: Any = take("torch._C._functorch.get_unwrapped", "torch.func: what a tensor of a transform holds")
_is_batched: Callable[[Any], bool] = take("torch._C._functorch.is_batchedtensor", "torch.vmap")
_without_transforms: Any = take(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", "plans and parts of functions in torch.func"
)
_with_transforms: Any = take(
    "torch._functorch.pyfunctorch.temporarily_restore_interpreter_stack", "aten ops inside of torch.func"
)
_dual_level: Any = take("torch.autograd.forward_ad._current_level", "forward-mode differentiation")
for _name in ("_wrap_for_grad", "_unwrap_for_grad", "_add_batch_dim", "_remove_batch_dim"):
    take(f"torch._C._functorch.{_name}", "torch.func: distributed tensors enter and leave a transform")
take("torch.autograd.functional._jacfwd", "functional.jacobian(strategy='forward-mode')")
take("torch._vmap_internals._vmap", "functional.jacobian(vectorize=True), gradcheck(check_batched_grad=True)")
without_transforms: Callable[[], Any] = _without_transforms  # a context manager that gives the transforms it hides
with_transforms: Callable[[Any], Any] = _with_transforms  # and one that brings them back


def has_cuda_guards() -> bool:
    """Whether this torch was built for CUDA: without, autograd cannot record tensors that say they are there."""
    return torch.backends.cuda.is_built()


def is_transforming() -> bool:
    """Whether a transform of torch.func or a level of forward-mode differentiation is under way."""
    return are_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def original_views() -> AbstractContextManager[None]:
    """Inside, views are made whose autograd node is made anew from their own op after a write to their base."""
    return _track_views(True)


def is_recorded(value: torch.Tensor) -> bool:
    """Whether autograd sees what is done with a tensor, or may: a transform may differentiate any."""
    return (value.requires_grad and torch.is_grad_enabled()) or is_transforming()


def held_by_transforms(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """What a tensor of torch.func's transforms holds in the end, and whether a vmap is among them."""
    is_batched = False
    while is_transformed(tensor):
        is_batched = is_batched or _is_batched(tensor)
        tensor = _unwrapped(tensor)
    return tensor, is_batched


def take_vmap(replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the vmap that torch.autograd's own functions use (is_grads_batched, functional.jacobian, gradcheck)."""
    original = resolve_name("torch._vmap_internals._vmap")
    made = replacement(original)
    for module in (resolve_name("torch._vmap_internals"), torch.autograd.functional):
        module._vmap = made  # type: ignore[union-attr]


def take_jacfwd(replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what torch.autograd.functional does for strategy="forward-mode"."""
    torch.autograd.functional._jacfwd = replacement(resolve_name("torch.autograd.functional._jacfwd"))


def take_transforms(**replacements: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the C++ functions with which torch.func's transforms take tensors in and give them back, which ask no
    tensor class: each by what its replacement makes of it."""
    modules = [resolve_name("torch._functorch.eager_transforms"), resolve_name("torch._functorch.predispatch")]
    for name, replacement in replacements.items():
        original = resolve_name(f"torch._C._functorch.{name}")
        made = replacement(original)
        for module in modules:
            for there in (name, f"{name}_impl"):
                if getattr(module, there, None) is original:
                    setattr(module, there, made)


_DispatchKey: Any = take("torch._C.DispatchKey", "ops under a TorchDispatchMode")
_DispatchKeySet: Any = take("torch._C.DispatchKeySet", "ops under a TorchDispatchMode")
_included_keys: Any = take("torch._C._dispatch_tls_local_include_set", "ops under a TorchDispatchMode")
_excluded_keys: Any = take("torch._C._dispatch_tls_local_exclude_set", "ops under a TorchDispatchMode")
_force_keys: Any = take("torch._C._ForceDispatchKeyGuard", "ops under a TorchDispatchMode")


@contextmanager
def reentrant() -> Iterator[None]:
    """Calls torch from inside of `__torch_dispatch__` as from outside: recorded by autograd, seen by tensor classes.

    A dispatch mode that showed the op on its way here is off the stack while it does, but torch would look for it: it
    is taken out of the keys too.
    """
    with torch.overrides.enable_reentrant_dispatch():
        included = _included_keys()
        if count_dispatch_modes() or not included.has(_DispatchKey.Python):
            yield
        else:
            modes = _DispatchKeySet(_DispatchKey.Python) | _DispatchKeySet(_DispatchKey.PythonTLSSnapshot)
            with _force_keys(included - modes, _excluded_keys()):
                yield


# --- autograd -------------------------------------------------------------------------------------------------------
_engine: Any = take("torch.autograd.Variable._execution_engine", "what data_parallel does when a backward pass ends")
sequence_number: Callable[[], int] = take("torch.autograd._get_sequence_nr", "CommDebugMode: whose backward runs")
current_node: Callable[[], Any] = take("torch._C._current_autograd_node", "ledgers, random.use on autograd's threads")
will_run: Callable[[Any], bool] = take("torch._C._will_engine_execute_node", "hooks of ShardedTensors of many shards")
BackwardHookFunction: type = take("torch.nn.modules._functions.BackwardHookFunction", "backward hooks of modules")
DelayedError: Any = take("torch._C._functions.DelayedError", "double backward through a once_differentiable Function")
take("torch._C._functions.UndefinedGrad", "torch.autograd.gradcheck")
number_of_node: Callable[[Any], int] = methodcaller("_sequence_nr")  # the sequence number of an autograd node
take("torch._C._functions.AccumulateGrad._set_sequence_nr", "hooks on tensors of simulated ranks")
take("torch.autograd._engine_run_backward", "hooks on tensors of simulated ranks")
function_of: Callable[[Any], Any] = attrgetter("_forward_cls")  # the autograd Function that a `ctx` belongs to


def take_undefined_grad(replacement: Callable[[Any], Any]) -> None:
    """Replace the class of the node that drops a gradient, with which gradcheck tests backward functions."""
    original = resolve_name("torch._C._functions.UndefinedGrad")
    torch._C._functions.UndefinedGrad = replacement(original)  # type: ignore[misc]


def set_number_of_node(node: torch.autograd.graph.Node, number: int) -> None:
    """Give an autograd node another sequence number. Of the nodes that are ready, the one of the highest runs first."""
    node._set_sequence_nr(number)  # type: ignore[attr-defined]


def take_backward_passes(around: Callable[..., AbstractContextManager[None]]) -> None:
    """Have every backward pass, of plain tensors too, run inside of ``around(roots, seeds)``."""
    run = resolve_name("torch.autograd._engine_run_backward")

    @functools.wraps(run)
    def run_inside(roots: object, seeds: object, *args: object, **kwargs: object) -> object:
        with around(roots, seeds):
            return run(roots, seeds, *args, **kwargs)

    torch.autograd._engine_run_backward = run_inside  # type: ignore[assignment]


def give_node_class(function: Any, base: type) -> None:
    """Have the nodes of an autograd Function be of a class that derives from `base` (the `ctx` that a user's Function
    sees on distributed tensors)."""
    node = function._backward_cls
    own = {"_forward_cls": function, "_autograd_function_id": node._autograd_function_id}
    function._backward_cls = type(node.__name__, (base,), own)


def is_used_up(node: torch.autograd.graph.Node | None) -> bool:
    """Whether a backward pass has been through a graph and freed what it saved."""
    seen, waiting = set[Any](), [node]
    while waiting:
        here = waiting.pop()
        if here is None or here in seen:
            continue
        seen.add(here)
        for name in (name for name in dir(here) if name.startswith("_saved_")):
            try:
                getattr(here, name)
            except RuntimeError:  # the words of torch: "Trying to backward through the graph a second time"
                return True
        waiting += [after for after, _ in here.next_functions]
    return False


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have autograd call this when the backward pass that is running ends."""
    _engine.queue_callback(callback)


take("torch.Tensor._backward_hooks", "hooks on parameters of data_parallel")
take("torch.Tensor._post_accumulate_grad_hooks", "hooks on parameters of data_parallel")


CheckpointFrame: type[Any] = take("torch.utils.checkpoint._CheckpointFrame", "writes to the inputs of a checkpoint")


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether a hook waits for the gradient of a plain tensor."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)


def hook_tables(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """Where a module keeps its hooks, forward and backward."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def module_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """The hooks that a module has, forward and backward."""
    return [hook for table in hook_tables(module) for hook in table.values()]


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Where a module keeps its children."""
    return vars(module)["_modules"]


global_hook_tables: tuple[dict[int, Any], ...] = tuple(
    take(f"torch.nn.modules.module._global_{name}_hooks", "capture: hooks on all modules")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
)


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """The hooks that wait for the gradient of a plain tensor."""
    with without_torch_function():
        return [*(tensor._backward_hooks or {}).values(), *(tensor._post_accumulate_grad_hooks or {}).values()]


def gradient_hook_tables(tensors: Iterable[torch.Tensor]) -> list[dict[int, Any] | None]:
    """Where plain tensors keep the hooks that wait for their gradients; None where there were never any."""
    return [t for tensor in tensors for t in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)]


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """The hooks before and after a step of one optimizer (two ordered dicts), for optimizers stepped on local tensors:
    those must be the last before and the first after a step."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


_all_steps: tuple[dict[int, Any], ...] = tuple(
    take(f"torch.optim.optimizer._global_optimizer_{when}_hooks", "compiled steps: hooks on all optimizers")
    for when in ("pre", "post")
)


def is_stepped_as_it_is(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nobody but the library and torch's schedulers (which note that there was a step) takes part in steps."""
    hooks = [hook for table in _all_steps for hook in table.values()]
    own = vars(optimizer).get("step")
    is_known = own is None or hasattr(own, "_wrapped_by_lr_sched")
    return is_known and all((hook.__module__ or "").startswith("shardwise.") for hook in hooks)


def body_of_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], None]:
    """The step of an optimizer's class, without the hooks around it."""
    hooked: Callable[[torch.optim.Optimizer], None] = inspect.getattr_static(type(optimizer), "step")
    return inspect.unwrap(hooked, stop=lambda f: not hasattr(f, "hooked"))


# --- functions and operators ----------------------------------------------------------------------------------------
OpOverload: Any = take("torch._ops.OpOverload", "calls of aten overloads")
OpOverloadPacket: Any = take("torch._ops.OpOverloadPacket", "register_sharding(torch.ops.aten.name)")
all_op_names: Callable[[], list[str]] = take("torch._C._dispatch_get_all_op_names", "shardwise rules --fallback")
has_kernel: Callable[[str, str], bool] = take("torch._C._dispatch_has_kernel_for_dispatch_key", "shardwise rules")
function_namespaces: tuple[Any, ...] = tuple(
    take(f"torch._C.{name}", "rules found by the names of C++ functions") for name in ("_nn", "_special", "_linalg")
)
parse_to: Any = take("torch._C._nn._parse_to", "ShardedTensor.to(...)")
assert_async: Any = take("torch._assert_async", "indices out of range raise without waiting for the GPU")
attention_math: Any = take("torch._scaled_dot_product_attention_math", "attention written out, where no kernel fits")
correct_fan: Any = take("torch.nn.init._calculate_correct_fan", "kaiming_uniform_ of ShardedTensors")
foreach_copy_: Any = take("torch._foreach_copy_", "many copies in one call")
foreach_norm: Any = take("torch._foreach_norm", "norms of lists of tensors")
foreach_max: Any = take("torch._foreach_max", "maxima of lists of tensors")
foreach_mul_: Any = take("torch._foreach_mul_", "clip_grad_norm_")
fused_optimizer_steps: tuple[Any, ...] = tuple(
    take(f"torch.{name}", "optimizers with fused=True")
    for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
)
_foreach_types: tuple[list[type], ...] = tuple(
    take(f"torch.{where}._foreach_supported_types", "clip_grad_norm_ and optimizers choose list ops")
    for where in ("utils._foreach_utils", "optim.optimizer")
)


def use_list_ops_for(kind: type) -> None:
    """Have clip_grad_norm_ and torch.optim call list ops on tensors of this class."""
    for types in _foreach_types:
        types.append(kind)


def schema_of(func: Any) -> Any:
    """The schema of an aten overload; None of anything else."""
    return getattr(func, "_schema", None)


_is_zero_tensor: Callable[[torch.Tensor], bool] = take("torch._is_zerotensor", "gradients that travel between ranks")


def in_memory(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient that another rank can be sent: autograd has zeros that take no memory."""
    return gradient.clone() if _is_zero_tensor(gradient) else gradient


@contextmanager
def take_resize(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside, `tell` hears of every storage whose size was changed by `resize_`."""
    own = "resize_" in torch.UntypedStorage.__dict__
    original = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        found = original(self, size)
        tell(self)
        return found

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
        else:
            del torch.UntypedStorage.resize_


def compile_backend(
    backend: str | Callable[..., Any], mode: str | None, options: dict[str, Any] | None, dynamic: bool | None
) -> Callable[..., Any]:
    """What torch.compile calls with a graph and example inputs, for a backend and options as it takes them."""
    USED_FOR["torch._TorchCompileInductorWrapper"] = "torch.compile of programs with distributed tensors"
    if backend == "inductor":
        made = resolve_name("torch._TorchCompileInductorWrapper")(mode or "default", options, dynamic)
        return lambda graph, inputs: made(graph, inputs)
    found = torch._dynamo.lookup_backend(backend)
    return functools.partial(found, **({"options": options} if options else {}))


def has_no_compiler(error: BaseException | None) -> bool:
    """Whether Inductor failed because there is no compiler on the machine."""
    while error is not None:
        if type(error).__name__ in ("InvalidCxxCompiler", "TritonMissing"):
            return True
        error = error.__cause__ or getattr(error, "inner_exception", None)
    return False


def mark_inline(wrapper: Callable[..., Any], func: Callable[..., Any]) -> None:
    """Have Dynamo, where it traces a call of `wrapper`, trace `func` instead."""
    wrapper._torchdynamo_inline = func  # type: ignore[attr-defined]
    wrapper._torchdynamo_orig_callable = func  # type: ignore[attr-defined]


def is_abstract(x: torch.Tensor) -> bool:
    """Whether a tensor has no values."""
    return x.device.type == "meta" or isinstance(x, FakeTensor)


def storage_number(storage: torch.UntypedStorage) -> int:
    """What tells a storage from all others that are alive."""
    return storage._cdata


def storage_id(tensor: torch.Tensor) -> int:
    """What two tensors have in common if, and only if, they share memory: also where that is empty."""
    return (held_by_transforms(tensor)[0] if is_transformed(tensor) else tensor).untyped_storage()._cdata


_count_users: Callable[[int], int] = take("torch._C._storage_Use_Count", "simulated ranks that begin to differ")


def storage_users(tensor: torch.Tensor) -> int:
    """How many tensors use the memory of this one, itself included."""
    storage = tensor.untyped_storage()
    return _count_users(storage._cdata) - 1


def weights_replaced(recurrent: Any) -> None:
    """Tell an RNN, which keeps a list of its parameters, that they are other tensors now (data_parallel)."""
    recurrent._flat_weights = [getattr(recurrent, name, None) for name in recurrent._flat_weights_names]


FSDP_CLASSES = {
    "torch.distributed.fsdp._fully_shard._fsdp_param": ("FSDPParam", "fully_shard"),
    "torch.distributed.fsdp._flat_param": ("FlatParamHandle", "FullyShardedDataParallel"),
}
"""Module -> the class in it that takes parameters (the first argument of its `__init__`), and who makes it. Both are
imported late, so they are not taken here: FSDP refuses distributed tensors."""

# --- torch.distributed ----------------------------------------------------------------------------------------------
remote_device: Any = take("torch.distributed._remote_device", "placements such as 'rank:1/cuda:0'")
default_group: Any = take("torch.distributed.distributed_c10d._get_default_group", "ShardedTensor of the default group")
default_store: Any = take("torch.distributed.distributed_c10d._get_default_store", "messages between two ranks")
functional_collectives: Any = take("torch.distributed._functional_collectives", "CommDebugMode: c10d_functional")
AsyncCollectiveTensor: Any = take(
    "torch.distributed._functional_collectives.AsyncCollectiveTensor", "tensors of torch's DTensor that still wait"
)
_mesh_resources: Any = take("torch.distributed.device_mesh._mesh_resources", "`with mesh:` of a DeviceMesh")
root_mesh: Callable[[Any], Any] = take(
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh", "tensors on two parts of one mesh meet"
)


def active_device_mesh() -> Any:
    """The DeviceMesh of the innermost ``with mesh:`` of this thread; None outside of one."""
    try:
        return _mesh_resources.get_current_mesh()
    except (AttributeError, RuntimeError):
        return None


def mesh_of_one() -> torch.distributed.device_mesh.DeviceMesh:
    """A mesh of this process alone, without a process group: torch's own DTensors, while ours stand in their place."""
    return torch.distributed.device_mesh.DeviceMesh("cpu", torch.tensor([0]), _init_backend=False, _rank=0)


flatten_mesh: Any = take("torch.distributed.device_mesh.DeviceMesh._flatten", "to_sharded() on a part of the world")
rpc_is_running: Callable[[], bool] = take(
    "torch.distributed.rpc._is_current_rpc_agent_set", "remote shards, RPC workers"
)
_rpc_agent: Any = take("torch.distributed.rpc.api._get_current_rpc_agent", "remote shards, RPC workers")
_rref_future: Callable[[Any], Any] = take("torch.distributed.rpc.PyRRef._get_future", "waiting for remote shards")


def rpc_workers() -> list[Any]:
    """Every RPC worker, with its `name` and `id`."""
    return _rpc_agent().get_worker_infos()


def wait_for_rrefs(rrefs: list[Any]) -> None:
    """Wait until all remote references are made, or raise where one could not be."""
    torch.futures.wait_all([_rref_future(rref) for rref in rrefs])


# --- printing -------------------------------------------------------------------------------------------------------
_body_of: Callable[[torch.Tensor, int], str] = take("torch._tensor_str._tensor_str", "printing distributed tensors")
_body_in: Callable[..., str] = take("torch._tensor_str._tensor_str_with_formatter", "printing distributed tensors")
_Formatter: Callable[[torch.Tensor], object] = take("torch._tensor_str._Formatter", "printing distributed tensors")
_with_options: Any = take("torch._tensor_str.printoptions", "printing distributed tensors")
_print_options: Any = take("torch._tensor_str.PRINT_OPTS", "printing distributed tensors")
_FEW = 40  # values whose width torch finds out in no time; it looks at each of them on its own


def print_limits() -> tuple[float, int, int]:
    """What `torch.set_printoptions` says: threshold, edgeitems, linewidth."""
    return _print_options.threshold, _print_options.edgeitems, _print_options.linewidth


def body_of(values: torch.Tensor, indent: int, threshold: float, edgeitems: int) -> str:
    """The numbers of a tensor as torch prints them, between the brackets; lines after the first are indented."""
    with _with_options(threshold=threshold, edgeitems=edgeitems):
        if values.numel() <= _FEW or values.is_complex() or not values.ndim:
            return _body_of(values, indent)
        values = values.float() if values.is_floating_point() and values.itemsize < 4 else values
        return _body_in(values, indent, values.numel() > threshold, _Formatter(_widest(values)))


def _widest(values: torch.Tensor) -> torch.Tensor:
    """Some of the values, whose text is as wide, and of the same form, as that of all."""
    flat = values.reshape(-1)
    if not flat.is_floating_point():
        return torch.stack([flat.max(), flat.min()])
    flat = flat[flat.isfinite() & (flat != 0)]
    found = [flat[flat != flat.ceil()][:1]]
    for part in (flat[flat > 0], flat[flat < 0]):
        found += [part.max().view(1), part.min().view(1)] if part.numel() else []
    return torch.cat(found)
