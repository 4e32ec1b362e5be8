"""Tensors without values: shapes, dtypes and lifetimes are true, numbers are not there.

`Absent` is the mode in which such tensors are made. The result of an op that depends on numbers (`item`, `nonzero`,
...) is what the program assumes; without an assumption the op raises and says what to assume.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from shardwise.comm.record import user_line
from shardwise.errors import OutlineError
from shardwise.protocols import Args, Kwargs, Op, Result
from shardwise.torch_private.autograd import records_cuda
from shardwise.torch_private.tensors import (
    AsksForValue,
    FakeMode,
    FakeTensor,
    HasNoSize,
    schema_of,
    without_fake_mode,
)

Number: TypeAlias = int | float | bool | complex
Assumed: TypeAlias = Number | str | Callable[[torch.Tensor], Number]
Assumptions: TypeAlias = Mapping[str, Assumed]

DEVICE = torch.ops.prim.device.default
_ASKED = {"_local_scalar_dense": "item", "equal": "equal", "allclose": "allclose", "is_nonzero": "item"}
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_LOSSES_OF_ROWS = ("multi_margin_loss", "multilabel_margin_loss_forward")
_HINTS = {
    "item": "the number that stands for every value that the program looks at",
    "equal": "whether tensors are equal",
    "experts": "'even': every expert is chosen equally often",
    "ctc_loss": "the length of the longest target, an int",
}


@functools.cache
def _written_lists(func: Op) -> tuple[tuple[int, str], ...]:
    """Positions and names of the lists of tensors that an op writes to. Without values, torch does not count these
    writes; but by them data parallelism recognizes that an optimizer has stepped."""
    arguments = enumerate(schema_of(func).arguments)
    return tuple((i, a.name) for i, a in arguments if _is_written(a) and str(a.type) == "List[Tensor]")


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def device_for(kind: str) -> torch.device:
    """The device that tensors without values report for the kind that was asked for. torch cannot differentiate tensors
    of a device that it was not built for, or that is not there: those report the CPU."""
    asked = torch.device(kind)
    if asked.type in ("cpu", "meta"):
        return torch.device("cpu")
    if asked.type == "cuda" and not records_cuda():
        return torch.device("cpu")
    return torch.device(asked.type, asked.index or 0)


class Absent(FakeMode):  # type: ignore[misc]
    """Inside, every tensor that is made has no values. Tensors that have values enter without them."""

    def __init__(self, assume: Assumptions | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.assume: dict[str, Assumed] = dict(assume or {})
        self.looked: Callable[[], None] | None = None  # called whenever the program looks at a value
        self.calls = 0  # how many calls of distributed tensors are under way
        # returns process groups, where those of a script are simulated, too
        self.group_of: Callable[..., object] | None = None

    def __torch_dispatch__(self, func: Op, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Result:
        if func is DEVICE and isinstance(args[0], FakeTensor):  # torch's C++ asks for it very often
            return args[0].device
        name = func.overloadpacket.__name__
        try:
            made = super().__torch_dispatch__(func, types, args, kwargs)
            for place, said in _written_lists(func):
                torch.autograd.graph.increment_version(args[place] if place < len(args) else (kwargs or {})[said])
            return made if name not in _LOSSES_OF_ROWS else self._loss_of_a_row(made, args)
        except ValueError as error:
            # a view that the strides do not allow; without values torch raises another kind of error
            if func in _VIEWS:
                raise RuntimeError(str(error)) from error
            raise
        except (AsksForValue, HasNoSize):
            pass  # outside of the handler, so that an error of ours is the only one that the program sees
        return self._assumed(name, func, args, kwargs or {})

    def _loss_of_a_row(self, made: Result, args: Args) -> Result:
        """A loss of one row, not reduced: a number in torch, but a list of one by its kernel for shapes."""
        loss = made[0] if isinstance(made, tuple) else made
        if args[0].dim() > 1 or loss.shape != (1,) or (args[1].dim() and not isinstance(made, tuple)):
            return made
        with self:
            loss = loss.reshape(())
        return (loss, *made[1:]) if isinstance(made, tuple) else loss

    def __deepcopy__(self, memo: object) -> Absent:
        """Itself: a copy of a tensor is one of the same rank."""
        return self

    def enter(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor of the program, without its values. Gradients go back to it."""
        if isinstance(value, FakeTensor):
            return value
        if value.requires_grad and torch.is_grad_enabled():
            with self:
                return value.view_as(value)
        return self.from_tensor(value.detach())

    @contextmanager
    def swappable(self) -> Iterator[None]:
        """Inside, tensors without values can be swapped, as `module.to(...)` does with parameters: torch refuses that
        for tensors with weak references, and this mode has weak references to the tensors that it made."""
        swap = torch.utils.swap_tensors

        def forgotten_and_swapped(one: torch.Tensor, other: torch.Tensor) -> None:
            for tensor in (one, other):
                self._forget(tensor)
            swap(one, other)

        with mock.patch.object(torch.utils, "swap_tensors", forgotten_and_swapped):
            yield

    @contextmanager
    def read_by_numpy(self) -> Iterator[None]:
        """In this context, `x.numpy()` and `numpy.asarray(x)` of tensors without values return what the program
        assumes."""
        plain = torch.Tensor.numpy

        def numpy(tensor: torch.Tensor, *, force: bool = False) -> Result:
            has_values = getattr(tensor, "fake_mode", None) is not self
            read = tensor if has_values else assumed_number(self, tensor)
            with without_fake_mode():
                return plain(read, force=force)

        with mock.patch.object(torch.Tensor, "numpy", numpy):
            yield

    @contextmanager
    def deep_copied(self) -> Iterator[None]:
        """In this context, torch does not warn that a deep copy asks a tensor without values for its address."""
        plain = torch.Tensor.__deepcopy__

        def deep_copy(tensor: torch.Tensor, memo: dict[int, object]) -> Result:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
                return plain(tensor, memo)

        with mock.patch.object(torch.Tensor, "__deepcopy__", deep_copy):
            yield

    def _forget(self, tensor: torch.Tensor) -> None:
        made = self.fake_tensor_converter.meta_converter.tensor_memo
        for reference in weakref.getweakrefs(tensor):
            key = getattr(reference, "key", None)
            if key is not None and made.get(key) is tensor:
                del made[key]

    # -- what the program assumes -------------------------------------------------------------------------------
    def assumption(self, name: str, what: torch.Tensor | None = None, asks: str = "") -> Assumed:
        """What the program assumes of `name`, or of the line of the program that asks; OutlineError if nothing."""
        line = user_line()
        short = line.replace("\\", "/").rpartition("/")[2]
        for key in (line, short, name):
            if key in self.assume:
                said = self.assume[key]
                if self.looked is not None:
                    self.looked()
                return said(what) if callable(said) and what is not None else said
        hint = _HINTS.get(name, "the share of the elements that are found (0.0 to 1.0), or how many (an int)")
        shape = "" if what is None else f" of a tensor of shape {tuple(what.shape)}"
        raise OutlineError(
            f"{line} asks for {asks or name!r}{shape}, which depends on values, and an outlined mesh has none; say "
            f"what to assume: outline(..., assume={{{name!r}: ...}}) or assume={{{short!r}: ...}} ({hint})"
        )

    def _assumed(self, name: str, func: Op, args: Args, kwargs: Kwargs) -> Result:
        key, first = _ASKED.get(name, name.lstrip("_").removesuffix("2")), args[0]
        if name in _ASKED:
            return _as_dtype(self.assumption(key, first), first.dtype)
        with self:
            if name == "index":
                return self._indexed(first, args[1])
            found = lambda most: self._count(key, first, most)  # noqa: E731
            if name == "nonzero":
                return first.new_empty((found(first.numel()), first.dim()), dtype=torch.int64)
            if name == "masked_select":
                return first.new_empty(found(torch.broadcast_shapes(first.shape, args[1].shape).numel()))
            if name in ("_unique2", "_unique", "unique_consecutive", "unique_dim"):
                return self._unique(name, first, args, found)
            if name == "bincount":
                length = max(found(first.numel()), args[2] if len(args) > 2 else kwargs.get("minlength", 0))
                weights = args[1] if len(args) > 1 else kwargs.get("weights")
                return first.new_empty(length, dtype=torch.int64 if weights is None else torch.float64)
            if name == "repeat_interleave":
                return first.new_empty(self._count(key, first, None), dtype=torch.int64)
            if name == "_ctc_loss":
                return self._ctc_loss(first, args[1], args[3])
            if name == "linalg_lstsq":
                return _least_squares(first, args[1], kwargs.get("driver"))
        raise OutlineError(
            f"{user_line()}: {func} depends on values, and an outlined mesh has none; play a program without it, or "
            f"call it on tensors that have values, outside of `with mesh:`"
        )

    def _count(self, key: str, what: torch.Tensor, most: int | None) -> int:
        said = self.assumption(key, what)
        if isinstance(said, bool) or not isinstance(said, (int, float)) or said < 0:
            raise OutlineError(f"assume={{{key!r}: {said!r}}}: must be an int, or a share from 0.0 to 1.0")
        if isinstance(said, int):
            return said if most is None else min(said, most)
        if most is None or said > 1:
            raise OutlineError(f"assume={{{key!r}: {said!r}}}: give the number of elements, an int")
        return round(said * most)

    def _ctc_loss(
        self, logs: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor | Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A loss for each row, and what its gradient needs: as long as the longest target."""
        if not isinstance(lengths, torch.Tensor):
            longest = max(lengths, default=0)
        elif targets.dim() > 1:
            longest = targets.shape[1]  # rows are padded to the longest of them
        else:
            longest = self._count("ctc_loss", targets, targets.numel())
        rows = logs.shape[1] if logs.dim() > 2 else 1
        shape = (rows, logs.shape[0], 2 * longest + 1)
        losses = logs.new_empty(rows if logs.dim() > 2 else ())
        return losses, logs.new_empty(shape)

    def _indexed(self, x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """x[mask]: a mask is the indices of its ones."""
        plain: list[torch.Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                plain += index.nonzero().unbind(1)
            else:
                plain.append(index)
        return torch.ops.aten.index(x, plain)

    def _unique(self, name: str, x: torch.Tensor, args: Args, found: Callable[[int], int]) -> tuple[torch.Tensor, ...]:
        if name == "unique_dim":
            dim = args[1] % x.dim()
            n = found(x.shape[dim])
            whole: tuple[int, ...] = (*x.shape[:dim], n, *x.shape[dim + 1 :])
            places: tuple[int, ...] = (x.shape[dim],)
        else:
            n = found(x.numel())
            whole, places = (n,), tuple(x.shape)
        made = x.new_empty(whole), x.new_empty(places, dtype=torch.int64), x.new_empty(n, dtype=torch.int64)
        return made[:2] if name == "_unique" else made


def _least_squares(a: torch.Tensor, b: torch.Tensor, driver: str | None) -> tuple[torch.Tensor, ...]:
    """Solution, residuals, ranks and singular values, of matrices of full rank."""
    rows, columns = a.shape[-2:]
    driver = driver or ("gels" if a.is_cuda else "gelsy")
    is_vector = b.dim() == a.dim() - 1 and b.dim() > 0 and b.shape == a.shape[:-1]
    right = b.unsqueeze(-1) if is_vector else b
    batch = torch.broadcast_shapes(a.shape[:-2], right.shape[:-2])
    solution = a.new_empty((*batch, right.shape[-1], max(rows, columns))).mT.narrow(-2, 0, columns)
    left_over = (*batch, right.shape[-1]) if rows > columns and driver != "gelsy" else (0,)
    values = (*a.shape[:-2], min(rows, columns)) if driver in ("gelsd", "gelss") else (0,)
    return (
        solution.squeeze(-1) if is_vector else solution,
        a.new_empty(left_over),
        a.new_empty(a.shape[:-2] if driver != "gels" else (0,), dtype=torch.int64),
        a.new_empty(values, dtype=a.dtype.to_real()),
    )


def _as_dtype(value: Assumed, dtype: torch.dtype) -> Number:
    if dtype.is_complex:
        return complex(value)  # type: ignore[arg-type]
    if dtype is torch.bool:
        return bool(value)
    return float(value) if dtype.is_floating_point else int(value)  # type: ignore[arg-type]


def assumption_of(x: torch.Tensor, name: str, asks: str) -> Assumed:
    """What the program assumes of `name`, by a tensor without values."""
    mode = getattr(x, "fake_mode", None)
    if not isinstance(mode, Absent):
        raise OutlineError(f"{asks} depends on values, and a tensor on {x.device} has none; use shardwise.outline")
    return mode.assumption(name, None, asks)


def assumed_number(mode: Absent, value: torch.Tensor) -> torch.Tensor:
    """A whole value that the program looks at: the number that it assumes, in all places."""
    said = mode.assumption("item", value)
    with without_fake_mode(), torch.no_grad():
        return torch.full(tuple(value.shape), _as_dtype(said, value.dtype), dtype=value.dtype, device="cpu")


class Elsewhere(TorchFunctionMode):
    """In this context, tensors that the program asks for on one kind of device are made on another kind, which stands
    for it. The same holds for autocast."""

    def __init__(self, asked: str, stands: torch.device) -> None:
        super().__init__()
        self.asked, self.stands = asked, stands
        self._casting: list[ExitStack] = []  # one per time that this context was entered: what to undo at the end

    def __enter__(self) -> Result:
        began = torch.autocast.__init__

        def begin(casting: torch.autocast, device_type: str, *args: object, **kwargs: object) -> None:
            stands = self.stands.type if device_type == self.asked else device_type
            began(casting, stands, *args, **kwargs)  # type: ignore[arg-type]

        undone = ExitStack()
        undone.enter_context(mock.patch.object(torch.autocast, "__init__", begin))
        self._casting.append(undone)
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        self._casting.pop().close()
        super().__exit__(*exc)  # type: ignore[arg-type]

    def __torch_function__(self, func: Op, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Result:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == self.asked:  # x.cuda()
            return args[0].to(self.stands)
        if "device" in kwargs:
            kwargs = kwargs | {"device": self._there(kwargs["device"])}
        if name == "to":
            args = tuple(self._there(arg) for arg in args)
        if any(type(arg) is torch.device for arg in args):
            args = tuple(self._there(arg) if type(arg) is torch.device else arg for arg in args)
        return func(*args, **kwargs)

    def _there(self, device: object) -> Result:
        if isinstance(device, (str, torch.device)):
            try:
                return self.stands if torch.device(device).type == self.asked else device
            except RuntimeError:
                return device
        return self.stands if type(device) is int else device
