"""Autograd, torch.func, and hooks of tensors, modules and optimizers."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter, methodcaller
from pkgutil import resolve_name
from typing import Any

import torch

from shardwise.torch_private.taking import take
from shardwise.torch_private.tensors import (
    _track_views,
    are_transforms_active,
    count_dispatch_modes,
    without_torch_function,
)

# --- torch.func -----------------------------------------------------------------------------------------------------
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
_forward_ad = torch.autograd.forward_ad
_is_grad_enabled = torch.is_grad_enabled
without_transforms: Callable[[], Any] = _without_transforms  # a context manager that gives the transforms it hides
with_transforms: Callable[[Any], Any] = _with_transforms  # and one that brings them back


def records_cuda() -> bool:
    """Whether autograd can record tensors that say they are on CUDA: torch is built for it, and there is a GPU. Asks
    below `torch.cuda`, which answers for another device while a script is played."""
    return torch.backends.cuda.is_built() and torch._C._cuda_getDeviceCount() > 0


def is_transforming() -> bool:
    """Whether a transform of torch.func or a level of forward-mode differentiation is under way."""
    return are_transforms_active() or _forward_ad._current_level >= 0


def original_views() -> AbstractContextManager[None]:
    """Inside, views are made whose autograd node is made anew from their own op after a write to their base."""
    return _track_views(True)


_view_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = take(
    "torch.Tensor._view_func", "gradients of a copied view of a view after a write"
)


def view_anew(view: torch.Tensor) -> torch.Tensor:
    """Another view, like this one, of what it is a view of; of what is no view, itself."""
    return view if view._base is None else _view_func(view, view._base)


def is_recorded(value: torch.Tensor) -> bool:
    """Whether autograd sees what is done with a tensor, or may: a transform may differentiate any."""
    return (_is_grad_enabled() and value.requires_grad) or are_transforms_active() or _forward_ad._current_level >= 0


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
_saved_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None] = take(
    "torch._C._autograd._top_saved_tensors_default_hooks", "writes around checkpoints"
)
enable_saved_hooks: Callable[[], None] = take(
    "torch._C._autograd._saved_tensors_hooks_enable", "the fuzzer, after errors that leave torch's hooks forbidden"
)
keeps_graph: Callable[[], bool] = take(
    "torch._C._autograd._get_current_graph_task_keep_graph", "writes through .data between a call and its gradient"
)  # whether the backward pass that is under way leaves the graph for another one
function_of: Callable[[Any], Any] = attrgetter("_forward_cls")  # the autograd Function that a `ctx` belongs to


def is_saving_for_hooks() -> bool:
    """Whether what autograd keeps now goes to hooks, as a checkpoint's: torch then looks at no version of it."""
    return _saved_hooks(True) is not None


def is_saving_for_own_hooks() -> bool:
    """Whether what autograd keeps now goes to hooks that are not torch's own: those may change it."""
    hooks = _saved_hooks(True)
    return hooks is not None and not all((f.__module__ or "").startswith("torch.") for f in hooks)


def with_hook_errors_last() -> AbstractContextManager[None]:
    """Inside, an error of the hook that takes what autograd keeps is raised at the end. So a checkpoint ends its
    recomputation, as soon as it has all that the backward pass needs."""
    hooks = _saved_hooks(True)
    return nullcontext() if hooks is None else _errors_last(*hooks)


@contextmanager
def _errors_last(pack: Callable[..., Any], unpack: Callable[..., Any]) -> Iterator[None]:
    raised: list[Exception] = []

    def take_or_note(tensor: torch.Tensor) -> Any:
        try:
            return tensor if raised else pack(tensor)
        except Exception as error:
            raised.append(error)
            return tensor

    with torch.autograd.graph.saved_tensors_hooks(take_or_note, unpack):
        yield
    if raised:
        raise raised.pop()


def take_undefined_grad(replacement: Callable[[Any], Any]) -> None:
    """Replace the class of the node that drops a gradient, with which gradcheck tests backward functions."""
    original = resolve_name("torch._C._functions.UndefinedGrad")
    torch._C._functions.UndefinedGrad = replacement(original)  # type: ignore[misc]


take("torch.autograd.graph._get_grad_fn_or_grad_acc", "register_multi_grad_hook")


def take_nodes(unwrapped: Callable[[torch.autograd.graph.Node], torch.autograd.graph.Node]) -> None:
    """Have torch's own functions on graphs take unwrapped(node) for the node of a tensor."""
    find = resolve_name("torch.autograd.graph._get_grad_fn_or_grad_acc")
    torch.autograd.graph._get_grad_fn_or_grad_acc = lambda t: unwrapped(find(t))  # type: ignore[assignment]


_BEFORE_ALL_OTHERS = 2**64 - 1


def comes_first(value: torch.Tensor) -> bool:
    """Whether a backward pass goes to the node of a tensor as soon as it can, before all others that wait: torch does
    so with a node that only says that there is no derivative."""
    return value.grad_fn is not None and number_of_node(value.grad_fn) == _BEFORE_ALL_OTHERS


def set_number_of_node(node: torch.autograd.graph.Node, number: int) -> None:
    """Give an autograd node another sequence number. Of the nodes that are ready, the one of the highest runs first."""
    node._set_sequence_nr(number)  # type: ignore[attr-defined]


def take_backward_passes(around: Callable[..., AbstractContextManager[None]], is_needed: Callable[[], object]) -> None:
    """Have every backward pass, of plain tensors too, run inside of ``around(roots, seeds)`` where that is needed."""
    run = resolve_name("torch.autograd._engine_run_backward")

    @functools.wraps(run)
    def run_inside(roots: object, seeds: object, *args: object, **kwargs: object) -> object:
        if not is_needed():
            return run(roots, seeds, *args, **kwargs)
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


current_backward: Callable[[], int] = take(
    "torch._C._current_graph_task_id", "parameters of data_parallel that reentrant checkpoints share"
)  # a number for the backward pass that runs on this thread; another one inside of a checkpoint that is reentrant


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have autograd call this when the backward pass that is running ends."""
    _engine.queue_callback(callback)


take("torch.Tensor._backward_hooks", "hooks on parameters of data_parallel")
take("torch.Tensor._post_accumulate_grad_hooks", "hooks on parameters of data_parallel")


CheckpointFrame: type[Any] = take("torch.utils.checkpoint._CheckpointFrame", "writes to the inputs of a checkpoint")


def checkpoint_saver() -> type[Any] | None:
    """The autograd Function with which torch 2.11 keeps the inputs of a checkpoint; None where their record does."""
    return getattr(torch.utils.checkpoint, "_NoopSaveInputs", None)


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
    return list(itertools.chain.from_iterable(map(_hooks_of_gradients, tensors)))


_hooks_of_gradients = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


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
    """The step of an optimizer's class, without the hooks around it and with grad mode as it is."""
    return inspect.unwrap(inspect.getattr_static(type(optimizer), "step"))
