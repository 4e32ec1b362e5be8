"""The tensors of a call: where they are among its arguments, as the operands that rules see, and as the meta tensors
that give shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import combinations
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.errors import MeshError
from shardwise.layout import Layout
from shardwise.mesh import Mesh
from shardwise.strategy.memory import correct_memory, meta_like
from shardwise.strategy.spec import Operand
from shardwise.torch_private.tensors import schema_of, storage_id
from shardwise.wrapper import Wrapper

Path = tuple[Any, ...]  # where a tensor stands: the number or name of an argument, then positions in lists


def op_name(func: Callable[..., Any]) -> str:
    """The name of an op in messages: without namespace and overload."""
    schema = schema_of(func)
    if schema is not None:
        return schema.name.removeprefix("aten::")
    name = getattr(func, "__name__", str(func))
    if name == "__getitem__":
        return "x[...]"
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any], kind: type = Wrapper) -> Iterator[tuple[Path, Any]]:
    """Every distributed tensor among the arguments with the path to it, in order; lists and tuples are looked into."""
    for key, value in (*enumerate(args), *kwargs.items()):
        yield from _tensors(value, (key,), kind)


def _tensors(value: object, path: Path, kind: type) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, kind):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _tensors(item, (*path, i), kind)


def fetch(args: Sequence[Any], kwargs: Mapping[str, Any], path: Path) -> Any:
    """The value at `path`."""
    value = kwargs[path[0]] if isinstance(path[0], str) else args[path[0]]
    for i in path[1:]:
        value = value[i]
    return value


def put(args: list[Any], kwargs: dict[str, Any], path: Path, value: object) -> None:
    """Set the value at `path`. Tuples on the way to it become lists."""
    holder: Any = kwargs if isinstance(path[0], str) else args
    for key in path[:-1]:
        if not isinstance(holder[key], list):
            holder[key] = list(holder[key])
        holder = holder[key]
    holder[path[-1]] = value


_FEW = 2**20  # elements: calls up to this size may be run to find out what torch does


def _elements_in(result: object) -> int:
    return sum(tensor.numel() for tensor in tree_flatten(result)[0] if isinstance(tensor, torch.Tensor))


def _zeros_for(tensor: Wrapper) -> torch.Tensor:
    """A tensor on the host with the global shape and strides. It requires grad, and is a leaf, if `tensor` does and is.
    Its values are zeros; in matrices of floats those of the diagonal are ones, since an op may need an inverse."""
    layout = tensor._layout
    zeros = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype).zero_()
    if len(layout.shape) > 1 and (layout.dtype.is_floating_point or layout.dtype.is_complex):
        memory = zeros.as_strided((zeros.untyped_storage().nbytes() // zeros.itemsize,), (1,))
        places = torch.arange(len(memory)).as_strided(layout.shape, layout.stride)
        memory[places.diagonal(dim1=-2, dim2=-1)] = 1  # each place once, which copy_ refuses for expanded tensors
    if not torch.is_grad_enabled() or not tensor.requires_grad:
        return zeros
    zeros.requires_grad_()
    if tensor.is_leaf:
        return zeros
    copied = zeros.clone()
    if copied.stride() == zeros.stride():
        return copied
    line = torch.zeros(zeros.untyped_storage().nbytes() // zeros.itemsize, dtype=layout.dtype, requires_grad=True)
    with torch.no_grad():
        line.copy_(zeros.detach().as_strided(line.shape, (1,)))
    return line.clone().as_strided(layout.shape, layout.stride)


def common_mesh(name: str, layouts: Sequence[Layout]) -> Mesh:
    """The mesh of all operands of the op `name`; raises MeshError if there are several."""
    mesh = layouts[0].mesh
    for layout in layouts[1:]:
        if layout.mesh is not mesh:
            raise MeshError(
                f"{name}: operands are on different meshes, {mesh!r} and {layout.mesh!r}; lay one of them out on the "
                f"other's mesh: distribute_tensor(x.full_tensor(), mesh, placements)"
            )
    return mesh


class CallShape:
    """A call: its tensors, the operands that stand for them in rules, and (after `run_meta`) their meta tensors."""

    def __init__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        found = list(tensors_in(args, kwargs))
        self.func, self.args, self.kwargs, self.name = func, args, kwargs, op_name(func)
        self.paths = [path for path, _ in found]
        self.tensors = [tensor for _, tensor in found]
        self.layouts: list[Layout] = [t._layout for t in self.tensors]
        self.mesh = common_mesh(self.name, self.layouts)
        self.metas: list[torch.Tensor] = []
        self._index_of: dict[int, int] = {}  # by a meta tensor's id
        self._in_memory: dict[int, int] | None = None  # by its storage
        self.operands = [Operand(layout, i) for i, layout in enumerate(self.layouts)]

    def with_tensors(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the tensors replaced."""
        spare = iter(values)
        return tree_map_only(Wrapper, lambda _: next(spare), (tuple(self.args), dict(self.kwargs)))

    def check(self) -> object:
        """Raise torch's own error if torch refuses the call for its shapes or dtypes. The result on meta tensors; None
        where torch cannot compute it."""
        if not {"device", "generator"}.isdisjoint(self.kwargs):
            return self.meta_result()
        try:
            return self._run_meta_or_raise()
        except NotImplementedError:
            return None
        except Exception as error:
            if asks_for_a_value(error) and numbers_in(self):
                raise
            if "meta" not in str(error):
                self.refuse(error)
            return None

    def meta_result(self) -> object:
        """The result on meta tensors; None where torch cannot compute it: if the call is wrong, it raises by itself."""
        if "out" in self.kwargs:
            return None
        given, self.kwargs = self.kwargs, {k: v for k, v in self.kwargs.items() if k != "generator"}
        if self.kwargs.get("device") is not None:  # else a real tensor would be made
            self.kwargs["device"] = "meta"
        try:
            return self.run_meta()
        except Exception:
            return None
        finally:
            self.kwargs = given

    def refuse(self, error: Exception) -> None:
        """Raise the error that the call raises on zeros, if it raises one: meta kernels, which raised `error`, refuse
        some calls that others compute. Where zeros would take much memory, `error` itself is raised."""
        if sum(math.prod(layout.shape) for layout in self.layouts) > _FEW:
            raise error
        self._run_on_zeros()

    def _run_on_zeros(self) -> None:
        """Run the call on zeros, which autograd records as it would record the call: it has errors of its own."""
        self.on_zeros(self.func)

    def on_zeros(self, func: Callable[..., Any], without: Collection[str] = ()) -> tuple[Any, dict[str, Any]]:
        """The result of `func` with the call's arguments, except for the named ones; its tensors are zeros. And the
        named arguments that it was called with."""
        args, kwargs = self.with_tensors([_zeros_for(tensor) for tensor in self.tensors])
        kwargs = {name: value for name, value in kwargs.items() if name not in without}
        if kwargs.get("out") is not None and kwargs.get("device") is not None:
            kwargs["device"] = "cpu"  # as the zeros
        with torch.random.fork_rng(devices=()), ExitStack() as stack:
            # hides this from saved-tensor hooks of the program, such as a checkpoint's; under torch.func there are none
            with suppress(RuntimeError):
                stack.enter_context(saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach))
            return func(*args, **kwargs), kwargs

    def run_meta(self, numbers: Collection[int] = ()) -> Any:
        """The result of the call on meta tensors; `numbers` are the 0-d tensors that it is given as numbers."""
        self.metas = [t.item() if i in numbers else meta_like(t._layout) for i, t in enumerate(self.tensors)]
        self._index_of, self._in_memory = {id(meta): i for i, meta in enumerate(self.metas)}, None
        args, kwargs = self.with_tensors(self.metas)
        with torch.no_grad():
            result = self.func(*args, **kwargs)
            correct_memory(self.func, self.layouts[0].device.type, result, args, kwargs)
        return result

    def _run_meta_or_raise(self) -> object:
        """The result of `run_meta`. Raises if torch refuses a call without elements, which meta kernels may compute."""
        result = self.run_meta()
        if all(0 in layout.shape for layout in self.layouts) and _elements_in(result) < _FEW:
            self._run_on_zeros()
        return result

    def described(self) -> Any:
        """The result of `run_meta`, with the errors that torch raises for real tensors (see `refuse`).
        NotImplementedError where meta kernels refuse a call that torch can compute."""
        try:
            return self._run_meta_or_raise()
        except NotImplementedError:
            raise
        except Exception as error:
            if asks_for_a_value(error) or not {"device", "generator"}.isdisjoint(self.kwargs):
                raise
            self.refuse(error)
            raise NotImplementedError(f"{self.name}: torch cannot tell the shape of what it computes") from error

    def base_of(self, out: object) -> int | None:
        """The number of the operand that `out`, a result of `run_meta`, is or is a view of; None for a new tensor."""
        if not isinstance(out, torch.Tensor):
            return None
        same = self._index_of.get(id(out))
        if same is not None:
            return same
        if self._in_memory is None:  # detach() has no `_base`
            tensors = [(i, meta) for i, meta in enumerate(self.metas) if isinstance(meta, torch.Tensor)]
            self._in_memory = {storage_id(meta): i for i, meta in reversed(tensors)}
        return self._in_memory.get(storage_id(out))


def asks_for_a_value(error: Exception) -> bool:
    """Whether a call on meta tensors failed because it needs the value of one."""
    return any(text in str(error) for text in ("item() cannot be called on meta", "from tensor with meta storage"))


def numbers_in(call: CallShape) -> set[int]:
    """Which of the call's 0-d tensors must be passed as numbers for torch to accept the call: as few as possible."""
    scalars = [i for i, tensor in enumerate(call.tensors) if not tensor.shape and len(call.tensors) > 1]
    for some in (some for n in range(len(scalars)) for some in combinations(scalars, n + 1)):
        try:
            call.run_meta(some)
        except TypeError:
            continue
        except Exception as error:
            if asks_for_a_value(error):
                continue
        return set(some)
    return set()
