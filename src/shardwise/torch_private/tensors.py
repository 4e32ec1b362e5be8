"""Tensor classes, modes, functions and operators, and how torch prints numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import torch

from shardwise.torch_private.taking import USED_FOR, take

# --- tensor classes -------------------------------------------------------------------------------------------------
make_wrapper: Callable[..., Any] = take("torch.Tensor._make_wrapper_subclass", "tensors of a global shape, no memory")
ignore_torch_function: Any = take("torch._C._disabled_torch_function_impl", "tensor classes that only dispatch sees")
assert_later: Callable[[torch.Tensor, str], None] = take("torch._assert_async", "capture: checks of probabilities")
without_torch_function: Any = take("torch._C.DisableTorchFunctionSubclass", "torch's own attributes of DTensors")
without_function_modes: Callable[[], AbstractContextManager[None]] = take(
    "torch._C.DisableTorchFunction", "capture: what a tape asks of tensors itself"
)
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


class QuickDispatchMode(DispatchMode):  # type: ignore[misc]
    """A dispatch mode whose every call is not wrapped for Dynamo, which skips this package anyway."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


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

_unwrapped: Any = take("torch._C._functorch.get_unwrapped", "torch.func: what a tensor of a transform holds")
_is_batched: Callable[[Any], bool] = take("torch._C._functorch.is_batchedtensor", "torch.vmap")


def held_by_transforms(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """What a tensor of torch.func's transforms holds in the end, and whether a vmap is among them."""
    is_batched = False
    while is_transformed(tensor):
        is_batched = is_batched or _is_batched(tensor)
        tensor = _unwrapped(tensor)
    return tensor, is_batched


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


_LIST_DEVICES = "torch.optim.optimizer._get_foreach_kernels_supported_devices"
_list_devices: Callable[[], list[str]] = take(_LIST_DEVICES, "outline: optimizers choose list ops as on a GPU")


@contextmanager
def optimizers_use_list_ops_on(kind: str) -> Iterator[None]:
    """Inside, optimizers that are not told choose list ops for tensors without values on devices of this kind, as they
    do for others on a GPU."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch(_LIST_DEVICES, lambda: [*_list_devices(), kind]))
        for types in _foreach_types:
            types.append(FakeTensor)
            stack.callback(types.remove, FakeTensor)
        yield


def schema_of(func: object) -> Any:
    """The schema of an aten overload; None of anything else."""
    return getattr(func, "_schema", None)


_CALLED_BY_OVERLOADS = "_op"  # the attribute with the function of C++


def without_python(func: Callable[..., Any]) -> Callable[..., Any]:
    """What an aten overload calls, so that a replay saves a call of Python per op; anything else as it is."""
    bare: Callable[..., Any] = getattr(func, _CALLED_BY_OVERLOADS, func)
    return bare


is_zero_tensor: Callable[[torch.Tensor], bool] = take("torch._is_zerotensor", "gradients that travel between ranks")
_zeros_without_memory: Callable[..., torch.Tensor] = take(
    "torch._efficientzerotensor", "gradients on ranks that hold nothing"
)


def zero_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take no memory and cannot be written, as autograd makes them for gradients that are always zero."""
    return _zeros_without_memory(tuple(shape), dtype=dtype, device=device)


def in_memory(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient that another rank can be sent: autograd has zeros that take no memory."""
    return gradient.clone() if is_zero_tensor(gradient) else gradient


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


def mark_sizes(tensor: torch.Tensor, dims: Iterable[int]) -> None:
    """Tell torch.compile that these sizes of a tensor change; where its code needs them fixed, they are."""
    USED_FOR["torch._dynamo.maybe_mark_dynamic"] = "torch.compile: sizes that change"
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def keeping_order() -> AbstractContextManager[None]:
    """Inside, Inductor keeps collectives in the order of the graph, which is that of all ranks."""
    USED_FOR["torch._inductor.config.patch"] = "torch.compile: collectives in the same order on all ranks"
    found: AbstractContextManager[None] = resolve_name("torch._inductor.config.patch")(reorder_for_locality=False)
    return found


def with_fixed_floats() -> AbstractContextManager[None]:
    """Inside, numbers that torch.compile meets are constants of what it makes: it begins anew where it finds out late
    that it cannot do with others."""
    USED_FOR["torch._dynamo.config.patch"] = "torch.compile: steps of optimizers"
    found: AbstractContextManager[None] = resolve_name("torch._dynamo.config.patch")(specialize_float=True)
    return found


def is_of_compiler(error: BaseException) -> bool:
    """Whether torch.compile raised an error because it cannot compile something: nothing of that has run."""
    USED_FOR["torch._dynamo.exc.TorchDynamoException"] = "torch.compile: steps of optimizers that it cannot compile"
    return isinstance(error, resolve_name("torch._dynamo.exc.TorchDynamoException"))


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


def is_plain(x: object) -> bool:
    """Whether something is a tensor of torch's own and no subclass of it, with values or without."""
    return type(x) is torch.Tensor or type(x) is FakeTensor


def address_of(x: torch.Tensor) -> object:
    """Where a plain tensor begins in memory; one without values has none, but shares what it has with its views."""
    return (x.untyped_storage()._cdata, x.storage_offset()) if type(x) is FakeTensor else x.data_ptr()


def is_abstract(x: torch.Tensor) -> bool:
    """Whether a tensor has no values."""
    return x.device.type == "meta" or isinstance(x, FakeTensor)


def storage_number(storage: torch.UntypedStorage) -> int:
    """What tells a storage from all others that are alive."""
    return storage._cdata


def tensor_number(tensor: torch.Tensor) -> int:
    """Which tensor of C++ an object stands for: another one after `torch.utils.swap_tensors`."""
    with without_torch_function():  # no op of the program's
        return tensor._cdata  # type: ignore[attr-defined]


share_memory: Callable[[torch.Tensor, torch.Tensor], bool] = take(
    "torch._C._is_alias_of", "torch's errors of writes into memory that another operand shares"
)


def are_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no two of many tensors share memory; of no transform's."""
    return len({tensor.untyped_storage()._cdata for tensor in tensors}) == len(tensors)


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
