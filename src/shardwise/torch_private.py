"""The only file that touches private names of torch, each with the feature that needs it.

A name that a torch release has dropped does not stop the import: what stands in its place raises when it is used, and
names the feature that is lost. `tests/test_torch_private.py` fails for each such name, and for a private name that is
used anywhere else. Two kinds are not listed here: `torch.utils._pytree`, which torch's own documentation shows, and
attributes that every tensor and module has had since torch 1.0 (`_version`, `_base`, `_parameters`, `_buffers`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
without_modes: Any = take("torch.utils._python_dispatch._disable_current_modes", "random keys in a TorchDispatchMode")
DispatchMode: Any = take("torch.utils._python_dispatch.TorchDispatchMode", "CommDebugMode")
without_fake_mode: Any = take("torch._subclasses.fake_tensor.unset_fake_temporarily", "programs under FakeTensorMode")
FakeTensor: Any = take("torch._subclasses.fake_tensor.FakeTensor", "random ops under FakeTensorMode")
_get_dispatch_mode: Any = take("torch._C._get_dispatch_mode", "make_fx refuses a move between processes")
_mode_keys: Any = take("torch._C._TorchDispatchModeKey", "make_fx refuses a move between processes")


# The mode in which make_fx is writing a graph; None elsewhere.
tracing_mode: Callable[[], Any] = functools.partial(_get_dispatch_mode, _mode_keys.PROXY)


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


def is_transforming() -> bool:
    """Whether a transform of torch.func or a level of forward-mode differentiation is under way."""
    return are_transforms_active() or torch.autograd.forward_ad._current_level >= 0


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
DelayedError: Any = take("torch._C._functions.DelayedError", "double backward through a once_differentiable Function")
take("torch._C._functions.UndefinedGrad", "torch.autograd.gradcheck")
number_of_node: Callable[[Any], int] = methodcaller("_sequence_nr")  # the sequence number of an autograd node
function_of: Callable[[Any], Any] = attrgetter("_forward_cls")  # the autograd Function that a `ctx` belongs to


def take_undefined_grad(replacement: Callable[[Any], Any]) -> None:
    """Replace the class of the node that drops a gradient, with which gradcheck tests backward functions."""
    original = resolve_name("torch._C._functions.UndefinedGrad")
    torch._C._functions.UndefinedGrad = replacement(original)  # type: ignore[misc]


def give_node_class(function: Any, base: type) -> None:
    """Have the nodes of an autograd Function be of a class that derives from `base` (the `ctx` that a user's Function
    sees on distributed tensors)."""
    node = function._backward_cls
    own = {"_forward_cls": function, "_autograd_function_id": node._autograd_function_id}
    function._backward_cls = type(node.__name__, (base,), own)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have autograd call this when the backward pass that is running ends."""
    _engine.queue_callback(callback)


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """The hooks before and after a step of one optimizer (two ordered dicts), for optimizers stepped on local tensors:
    those must be the last before and the first after a step."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


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
foreach_types: list[type] = take("torch.utils._foreach_utils._foreach_supported_types", "optimizers choose foreach")


def schema_of(func: Any) -> Any:
    """The schema of an aten overload; None of anything else."""
    return getattr(func, "_schema", None)


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


# --- torch.distributed ----------------------------------------------------------------------------------------------
remote_device: Any = take("torch.distributed._remote_device", "placements such as 'rank:1/cuda:0'")
default_group: Any = take("torch.distributed.distributed_c10d._get_default_group", "ShardedTensor of the default group")
default_store: Any = take("torch.distributed.distributed_c10d._get_default_store", "messages between two ranks")
functional_collectives: Any = take("torch.distributed._functional_collectives", "CommDebugMode: c10d_functional")
AsyncCollectiveTensor: Any = take(
    "torch.distributed._functional_collectives.AsyncCollectiveTensor", "tensors of torch's DTensor that still wait"
)
_mesh_resources: Any = take("torch.distributed.device_mesh._mesh_resources", "`with mesh:` of a DeviceMesh")


def active_device_mesh() -> Any:
    """The DeviceMesh of the innermost ``with mesh:`` of this thread; None outside of one."""
    try:
        return _mesh_resources.get_current_mesh()
    except (AttributeError, RuntimeError):
        return None


flatten_mesh: Any = take("torch.distributed.device_mesh.DeviceMesh._flatten", "to_sharded() on a part of the world")
rpc_is_running: Callable[[], bool] = take(
    "torch.distributed.rpc._is_current_rpc_agent_set", "remote shards, RPC workers"
)
_rpc_agent: Any = take("torch.distributed.rpc.api._get_current_rpc_agent", "remote shards, RPC workers")
_rref_future: Any = take("torch.distributed.rpc.PyRRef._get_future", "waiting for remote shards")


def rpc_workers() -> list[Any]:
    """Every RPC worker, with its `name` and `id`."""
    return _rpc_agent().get_worker_infos()


def wait_for_rrefs(rrefs: list[Any]) -> None:
    """Wait until all remote references are made, or raise where one could not be."""
    torch.futures.wait_all([_rref_future(rref) for rref in rrefs])
