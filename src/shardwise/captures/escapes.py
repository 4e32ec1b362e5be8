"""What leaves a program for Python, and what Python does that no op shows: a function mode sees it."""

from __future__ import annotations

import builtins
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Protocol, cast

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_iter

from shardwise.comm.capturing import tape_here
from shardwise.protocols import Args, Item, Kwargs, Op, Result
from shardwise.torch_private.autograd import gradient_hooks, module_hooks

_VALUES = {
    getattr(torch.Tensor, name): name
    for name in (
        "item tolist numpy __bool__ __int__ __float__ __complex__ __index__ __array__ __dlpack__ __repr__ __format__"
    ).split()
}
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
_PLACES = (torch.Tensor.storage_offset, torch.Tensor.data_ptr)
_DATA: Item = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_GRAD: Item = torch.Tensor.grad.__set__  # type: ignore[attr-defined, union-attr]
_READ_GRAD: Item = torch.Tensor.grad.__get__  # type: ignore[attr-defined, union-attr]
_PLAIN = (torch.Tensor, torch.nn.Parameter)

Parameters = Callable[[Any], Iterable[torch.Tensor]]
_ZEROED: list[tuple[Any, Parameters]] = [
    (torch.optim.Optimizer, lambda owner: [p for group in owner.param_groups for p in group["params"]]),
    (torch.nn.Module, lambda owner: owner.parameters()),
]


class Writer(Protocol):
    """What a tape does with what is seen here."""

    paused: int
    is_zeroing: bool

    def refuse(self, reason: str) -> None: ...
    def forget(self) -> None: ...
    def set_grad(self, leaf: torch.Tensor, grad: torch.Tensor | None) -> None: ...
    def note_read(self, leaf: torch.Tensor, grad: torch.Tensor | None) -> None: ...
    def note_no_gradients(self, tensors: Iterable[torch.Tensor]) -> None: ...
    def region(self, label: str, func: Callable[[], Any]) -> Item: ...


class Escapes(TorchFunctionMode):
    """Tells a tape which values are asked for, and which gradients are set. Collects the modules that are called."""

    def __init__(self, tape: Writer) -> None:
        super().__init__()
        self.tape = tape

    def __enter__(self) -> Escapes:
        self._hook = register_module_forward_pre_hook(self._module_is_called)
        _replacements.enter()
        return super().__enter__()

    def __exit__(self, *error: Item) -> None:
        super().__exit__(*error)
        _replacements.leave()
        self._hook.remove()

    def rest(self) -> None:
        """See nothing of what this thread does, until `wake`."""
        super().__exit__(None, None, None)

    def wake(self) -> None:
        super().__enter__()

    def __torch_function__(self, func: Op, types: Args, args: Args = (), kwargs: Kwargs | None = None) -> Result:
        if not self.tape.paused and args and type(args[0]) in _PLAIN:
            if func in _VALUES:
                self.tape.refuse(f"Tensor.{_VALUES[func]}: a value of a tensor is asked for")
            elif func in _PLACES and not _is_of_library(sys._getframe(1)):
                self.tape.refuse(f"Tensor.{func.__name__}: where a tensor lies in memory is asked for")
            elif func == _DATA:
                self.tape.refuse("Tensor.data is set: a tensor gets other memory")
            elif func == _READ_GRAD:
                grad = func(*args, **(kwargs or {}))
                self.tape.note_read(args[0], grad)
                return grad
            elif func == _GRAD:
                result = func(*args, **(kwargs or {}))
                self.tape.set_grad(args[0], args[1])
                return result
        if func in _MAKERS and not self.tape.paused and any(isinstance(x, torch.Tensor) for x in tree_iter(args[0])):
            self.tape.refuse(f"{func.__name__} of tensors: their values are asked for")
        return func(*args, **(kwargs or {}))

    def _module_is_called(self, module: torch.nn.Module, args: object) -> None:
        for hook in module_hooks(module):
            if not _is_known(hook):
                name = f"{type(module).__name__}: {_name_of(hook)}"
                self.tape.refuse(f"a hook on a module, {name}, may do more than compute")


class _Replacements:
    """What stands in the place of some of Python's and torch's functions while anything is written down, in whichever
    thread: each looks whether the thread that calls it is one that writes, and is the function itself where not."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._replaced: list[tuple[Any, str, Any]] = []

    def enter(self) -> None:
        """Put them in place, unless they are."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._replaced = [(c, name, c.__dict__[name]) for c, name in _python_methods()]
            for cls, name, method in self._replaced:
                setattr(cls, name, _as_region(method))
            for cls, parameters in _ZEROED:
                self._replaced.append((cls, "zero_grad", cls.zero_grad))
                cls.zero_grad = _zeroing(cls.zero_grad, parameters)
            for owner, name, stand_in in ((torch.utils, "swap_tensors", _swap), (builtins, "print", _print)):
                self._replaced.append((owner, name, getattr(owner, name)))
                setattr(owner, name, functools.partial(stand_in, getattr(owner, name)))

    def leave(self) -> None:
        """Take them away with the last one that needed them."""
        with self._lock:
            self._users -= 1
            if not self._users:
                for owner, name, method in self._replaced:
                    setattr(owner, name, method)
                self._replaced = []


_replacements = _Replacements()


def _writer() -> Writer | None:
    """The tape that this thread writes on."""
    return cast("Writer | None", tape_here())


def _as_region(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is one statement: it looks at values, or changes numbers that no op shows."""

    @functools.wraps(method)
    def call(owner: Item, *args: Item, **kwargs: Item) -> Item:
        again = functools.partial(method, owner, *args, **kwargs)
        tape = _writer()
        if tape is None:
            return again()
        name = f"{type(owner).__name__}.{method.__name__}"
        if any(isinstance(arg, torch.Tensor) for arg in (*args, *kwargs.values())):
            tape.refuse(f"{name} looks at a tensor")
        return tape.region(name, again)

    return call


def _zeroing(method: Callable[..., None], parameters: Parameters) -> Callable[..., None]:
    """`zero_grad`, which writes down for every parameter that it has no gradient now: torch's own leaves out those
    that have none already, and a later call may begin with some."""

    @functools.wraps(method)
    def call(owner: Item, *args: Item, **kwargs: Item) -> None:
        tape = _writer()
        if tape is None:
            method(owner, *args, **kwargs)
            return
        tape.is_zeroing = True  # whatever it finds, there are no gradients afterwards
        try:
            without = [parameter for parameter in parameters(owner) if parameter.grad is None]
            method(owner, *args, **kwargs)
        finally:
            tape.is_zeroing = False
        if kwargs.get("set_to_none", args[0] if args else True):
            tape.note_no_gradients(without)

    return call


def _print(printing: Callable[..., None], *args: Item, **kwargs: Item) -> None:
    """Words are printed again in each run; a tensor among them has refused to be written down."""
    again = functools.partial(printing, *args, **kwargs)
    tape = _writer()
    if tape is None:  # another thread prints, or what is written down prints by itself
        again()
    else:
        tape.region("print", again)


def _swap(swapping: Callable[..., None], *args: Item, **kwargs: Item) -> None:
    """Tensors become others without an op, also in torch's own code that loads or casts a module."""
    tape = _writer()
    if tape is not None:
        tape.refuse("a tensor is swapped with another (torch.utils.swap_tensors), which no op shows")
        tape.forget()
    swapping(*args, **kwargs)


def _is_of_library(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("shardwise", "torch")


def _python_methods() -> Iterator[tuple[type, str]]:
    """Methods of torch that train without ops, or look at values on the way."""
    for name in ("step", "update", "unscale_"):
        yield torch.amp.GradScaler, name
    waiting: list[type] = [LRScheduler]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if "step" in cls.__dict__:
            yield cls, "step"


def _is_known(hook: Callable[..., Any]) -> bool:
    """Whether a hook is of the library or of torch: it computes, and its state is the same after each step."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").partition(".")[0] in ("shardwise", "torch")


def _is_for_program(hook: Callable[..., Any]) -> bool:
    """Whether it is one by which the library calls a hook of the program."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").startswith("shardwise.autograd")


def _name_of(hook: Callable[..., Any]) -> str:
    return resolve_name(hook) or getattr(hook, "__qualname__", repr(hook))


def has_foreign_hooks(leaf: torch.Tensor) -> str:
    """The name of a hook of the program's on a plain tensor; empty if it has none."""
    return next((_name_of(hook) for hook in gradient_hooks(leaf) if not _is_known(hook) or _is_for_program(hook)), "")
