"""DTensor: a tensor over a mesh that behaves as if it lived on one device."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise import checkpoint_protocol, surface
from shardwise.comm.bridge import collapse, own_each, regrade, share
from shardwise.comm.record import Note
from shardwise.comm.simulation import RankTensor
from shardwise.context import is_strict, refuse_in_program, relaxed, running_op
from shardwise.engine.cache import register_cache
from shardwise.engine.call import SPECIAL, call_function, call_overload
from shardwise.errors import LayoutError, MeshError, MoveError, RuleError
from shardwise.layout import Layout, Partial, Placement, Replicate, as_placements
from shardwise.layout.placement import REPLICATE, _rebuild_shard
from shardwise.mesh import DeviceMesh, _submesh, as_mesh
from shardwise.move import move, move_across, plan_steps, run_move, start_move
from shardwise.move.limit import current_cap
from shardwise.sizes import layout_of_locals
from shardwise.spec import Spec
from shardwise.torch_private import foreach_types, make_dual, make_wrapper, without_torch_function
from shardwise.wrapper import Wrapper, notes_of, wrap

_REDISTRIBUTE = Note("redistribute")


class DTensor(Wrapper):
    """A tensor of global shape whose values lie on the ranks of a mesh, as its placements say.

    Make one with `distribute_tensor`, `DTensor.from_local` or the factories. Everything torch does with a tensor works
    on it; autograd runs in the local tensors.
    """

    def __new__(cls, local_tensor: torch.Tensor, spec: Spec, *, requires_grad: bool = False) -> DTensor:
        """What each rank holds, as `spec` (the `_spec` of a DTensor) says: a leaf. `from_local` asks for less, and is
        differentiable."""
        if not isinstance(spec, Spec) or spec.tensor_meta is None:
            raise LayoutError(f"DTensor: spec must be the _spec of a DTensor, got {spec!r}; or use DTensor.from_local")
        local = local_tensor.detach() if isinstance(local_tensor, torch.Tensor) else local_tensor
        shape, stride, _ = spec.tensor_meta
        made = cls.from_local(local, spec.mesh, spec.placements, shape=shape, stride=stride)
        return made.requires_grad_(requires_grad)

    # -- where it lives -------------------------------------------------------------------------------------
    @property
    def device_mesh(self) -> Any:
        return self._layout.mesh.source

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._layout.placements

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """The interned layout: tiles, local shapes, offsets. torch's own Python code, which asks for the kind of memory
        and may look the answer up in a set, hears torch.strided."""
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return torch.strided if asking.startswith("torch.") else self._layout  # type: ignore[return-value]

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self._layout.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._layout.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._layout.device

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._layout.shape)

    def dim(self) -> int:
        return len(self._layout.shape)

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self.shape if dim is None else self.shape[dim]

    @property
    def _spec(self) -> Spec:
        return Spec.of(self._layout)

    @property
    def _local_tensor(self) -> torch.Tensor:
        """The memory of `to_local()` without its graph, for programs that know torch's private name for it."""
        return self.detach().to_local()  # type: ignore[attr-defined]

    # -- in and out -----------------------------------------------------------------------------------------
    @staticmethod
    def from_local(
        local_tensor: torch.Tensor | None = None,
        device_mesh: Any = None,
        placements: Sequence[Any] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Any] | None = None,
        assume_even: bool = False,
        local: torch.Tensor | None = None,
    ) -> DTensor:
        """What each rank holds, as one tensor; differentiable. Uneven locals give their true global shape.

        Without `shape`, sizes are exchanged (one small collective) unless `assume_even` says that every rank holds as
        much as this one. `run_check` also compares dtypes and dims across ranks, and takes Replicate values from the
        first coordinate. `grad_placements` says how the gradient of the local tensor is laid out (default: as the
        tensor's). `local` is a shorter name of `local_tensor`.
        """
        if local is not None and local_tensor is not None:
            raise LayoutError("from_local: local_tensor and local are two names of one argument; give one of them")
        local = local_tensor if local is None else local
        if isinstance(local, DTensor) or not isinstance(local, torch.Tensor):
            raise LayoutError(f"from_local: local must be a plain tensor, got {type(local).__name__}")
        mesh = as_mesh(device_mesh)
        places = as_placements(placements) if placements is not None else (REPLICATE,) * len(mesh.shape)
        local, layout = layout_of_locals(local, mesh, places, shape, stride, run_check, assume_even)
        if grad_placements is not None:
            mine, theirs = surface.grad_layout(layout), _grad_layout_given(layout, grad_placements)
            local = regrade(mesh.comm, local, lambda g: move(g, mine, theirs, Note("from_local", backward=True)))
        return entered(local, layout)

    @staticmethod
    def outside(
        device_mesh: Any, placements: Sequence[Any], shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> DTensor:
        """A tensor on a mesh this rank is not in: nothing of its values is here, but the rank takes part in moves."""
        mesh = as_mesh(device_mesh, outside=True)
        if not mesh.comm.outside:
            raise MeshError(f"outside: this rank is in {mesh!r}; make the tensor with distribute_tensor or from_local")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        layout = Layout.make(mesh, as_placements(placements), tuple(shape), dtype)
        return wrap(torch.empty(0, dtype=dtype, device=mesh.device), layout)

    def to_local(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """What this rank holds (a RankTensor on a simulated mesh), differentiable.

        `grad_placements` says how the gradient that comes back for it is laid out (default: as this tensor's own)."""
        comm, local = self._layout.mesh.comm, self._local
        if not (torch.is_grad_enabled() and self.requires_grad):
            return _across(comm, local)
        if grad_placements is not None:
            mine, theirs = surface.grad_layout(self._layout), _grad_layout_given(self._layout, grad_placements)
            note = Note("to_local", backward=True)
            return regrade(comm, own_each(comm, local), lambda g: move(g, theirs, mine, note))
        return _across(comm, own_each(comm, local))

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Sequence[Any] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same values in another layout, differentiable.

        To another mesh, every rank of either calls it (one that is in the target only has the source as
        `DTensor.outside`), and ranks outside of the target get an empty tensor that says so.

        Values travel and arrive as `forward_dtype`, gradients travel as `backward_dtype`. With `async_op` the move goes
        on while the program does, and the first use of the result (or its `wait()`) waits for it.
        """
        if device_mesh is not None:
            mesh = as_mesh(device_mesh, outside=True)
            if mesh is not self._layout.mesh:
                return _redistribute_across(self, mesh, placements, forward_dtype, backward_dtype)
        if forward_dtype is not None or backward_dtype is not None:
            return _redistribute_as(self, placements, forward_dtype, backward_dtype, async_op)
        if placements is None:
            return self
        target, steps = _target_of(self._layout, as_placements(placements), current_cap())
        if not steps:
            return self if target is self._layout else wrap(self._local, target)
        op, note = running_op(), _REDISTRIBUTE
        if op is not None:
            note = Note(op)
            if is_strict() and any(step.kind != "local" for step in steps):
                refuse_in_program(op, self._layout, f"[{', '.join(map(str, target.placements))}]")
        if async_op:
            return _arriving(*start_move(self._local, self._layout, target, note), target)
        return wrap(run_move(self._local, target.mesh.comm, steps, note), target)

    def wait(self) -> DTensor:
        """This tensor, once an asynchronous move to it is done."""
        surface.first(self)
        return self

    def full_tensor(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """The whole value as a plain tensor, differentiable."""
        layout = self._layout
        whole = layout.replace(placements=(REPLICATE,) * len(layout.placements), stride=None)
        local = move(self._local, layout, whole, Note("full_tensor"))
        comm = layout.mesh.comm
        if grad_placements is not None and torch.is_grad_enabled() and self.requires_grad:
            theirs = _grad_layout_given(whole, grad_placements)
            note = Note("full_tensor", backward=True)
            local = regrade(comm, own_each(comm, local), lambda g: move(g, theirs, whole, note))
        return _across(comm, collapse(comm, local))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Tensor.to, at once where the tensor is on the device already: clip_grad_norm_ asks this of every norm."""
        if not kwargs and len(args) == 1 and type(args[0]) is torch.device and args[0] == self._layout.device:
            return self
        return super().to(*args, **kwargs)

    # -- autograd -------------------------------------------------------------------------------------------
    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return surface.first(self).requires_grad

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        surface.set_requires_grad(self, flag)

    grad = property(surface.get_grad, surface.set_grad, surface.drop_grad)  # type: ignore[assignment]

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return surface.first(self).grad_fn

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return surface.first(self).is_leaf

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return surface.first(self).retains_grad

    @property
    def _version(self) -> int:  # type: ignore[override]
        return surface.first(self)._version

    @property
    def data(self) -> DTensor:  # type: ignore[override]
        surface.note_loose_write(self)
        comm = self._layout.mesh.comm
        local = surface.leaf_local(self)
        return wrap(comm.rebuild(local, [v.data for v in comm.values(local)]), self._layout)

    @data.setter
    def data(self, value: DTensor) -> None:
        _set_data(self, value)

    def set_(self, *args: Any, **kwargs: Any) -> DTensor:  # type: ignore[override]
        """The memory and layout of another distributed tensor. torch's parametrizations write so."""
        if len(args) == 1 and not kwargs and isinstance(args[0], DTensor) and args[0].dtype == self.dtype:
            _set_data(self, args[0])
            return self
        raise RuleError(
            "set_ gives a tensor other memory, and that of a distributed tensor is on many ranks; give it a DTensor of "
            "the same dtype, or use x.data = y"
        )

    def backward(
        self, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:  # type: ignore[override]
        surface.backward([self], None if gradient is None else [gradient], retain_graph, create_graph, inputs)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:  # type: ignore[override]
        return surface.set_requires_grad(self, requires_grad)

    def retain_grad(self) -> None:  # type: ignore[override]
        surface.retain_grad(self)

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:  # type: ignore[override]
        return surface.register_hook(self, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:  # type: ignore[override]
        return surface.register_post_accumulate_grad_hook(self, hook)

    def detach_(self) -> DTensor:  # type: ignore[override]
        for value in surface.values(self):
            value.detach_()
        return self

    # -- plain values ---------------------------------------------------------------------------------------
    def _whole(self) -> torch.Tensor:
        """The value for the program to look at: asking for it is asking for the communication."""
        with relaxed(), torch.no_grad():
            return self.full_tensor()

    def item(self) -> Any:  # type: ignore[override]
        return self._whole().item()

    def tolist(self) -> Any:  # type: ignore[override]
        return self._whole().tolist()

    def numpy(self, *, force: bool = False) -> Any:  # type: ignore[override]
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self._whole().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:  # type: ignore[override]
        value = self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)
        return value.copy() if copy else value

    def __bool__(self) -> bool:
        return bool(self._whole())

    def __int__(self) -> int:
        return int(self._whole())

    def __float__(self) -> float:
        return float(self._whole())

    def __index__(self) -> int:
        return self._whole().__index__()

    def __complex__(self) -> complex:
        return complex(self._whole())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    # -- memory ---------------------------------------------------------------------------------------------
    def apply_(self, function: Callable[[Any], Any]) -> DTensor:  # type: ignore[override]
        """Tensor.apply_, on whole values: every rank applies the function to all of them."""
        if self.requires_grad:
            raise RuntimeError("Can't call apply_() on Variable that requires grad. Use var.detach().apply_() instead.")
        with relaxed():
            return self.copy_(self._whole().clone().apply_(function))  # type: ignore[return-value]

    def share_memory_(self) -> DTensor:  # type: ignore[override]
        for value in surface.values(self):
            value.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(value.is_shared() for value in surface.values(self))

    def is_conj(self) -> bool:
        """Whether the ranks' tensors are lazily conjugated; the wrapper never is."""
        return surface.first(self).is_conj()

    def is_neg(self) -> bool:
        return surface.first(self).is_neg()

    def __dlpack__(self, **_: Any) -> Any:  # type: ignore[override]
        raise RuleError("__dlpack__: the memory of a distributed tensor is on many ranks; give x.to_local() away")

    # -- copies ---------------------------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:  # type: ignore[override]
        if id(self) in memo:
            return memo[id(self)]
        comm = self._layout.mesh.comm
        local = surface.leaf_local(self)
        copies = [value.__deepcopy__({}) for value in comm.values(local)]
        result = wrap(comm.rebuild(local, copies), self._layout)
        memo[id(self)] = result
        if getattr(self, "_is_param", False):
            result._is_param = True  # type: ignore[attr-defined]
        result.__dict__.update(copy.deepcopy(notes_of(self), memo))
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:  # type: ignore[override]
        layout = self._layout
        state = (layout.placements, layout.shape, layout.stride, layout.dtype, str(layout.device))
        comm = layout.mesh.comm
        local = surface.leaf_local(self)
        parts = [v.detach() for v in comm.values(local)]
        flags = (self.requires_grad, bool(getattr(self, "_is_param", False)))
        notes = notes_of(self)
        return _rebuild, (parts, comm.structure(local), layout.mesh.source, state, flags, *((notes,) if notes else ()))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        layout = self._layout
        kind = "Parameter of DTensor" if getattr(self, "_is_param", False) else "DTensor"
        grad = ", requires_grad=True" if self.requires_grad else ""
        places = ", ".join(map(repr, layout.placements))
        head = f"{kind}(shape={layout.shape}, dtype={layout.dtype}, placements=[{places}], mesh={layout.mesh!r}{grad})"
        local = self._local
        if layout.mesh.comm.outside:
            return f"{head}\nnothing here: this rank is outside of the mesh of ranks {list(layout.mesh.ranks)}"
        return f"{head}\n{local!r}" if layout.mesh.comm.simulated else f"{head}\nlocal: {local!r}"

    # -- torch.distributed.checkpoint -----------------------------------------------------------------------
    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return checkpoint_protocol.write_items(fqn, object)

    def __create_chunk_list__(self) -> list[Any]:
        return checkpoint_protocol.chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return checkpoint_protocol.tensor_shard(self, index)

    # -- torch comes in here --------------------------------------------------------------------------------
    __torch_function__: Any = classmethod(call_function)
    __torch_dispatch__: Any = classmethod(call_overload)


# clip_grad_norm_ uses list ops for the types it finds here: one exchange for all gradients, not one for each
foreach_types.append(DTensor)


def entered(local: Any, layout: Layout) -> DTensor:
    """A local value, known to be one under this layout, as a tensor."""
    comm = layout.mesh.comm
    replicas = [axis for axis, p in enumerate(layout.placements) if p.is_replicate()]
    return wrap(_across(comm, share(comm, local, replicas)), layout)


def left(x: DTensor) -> Any:
    """The local value of a Replicate tensor, one tensor for all simulated ranks that hold it alike."""
    comm = x._layout.mesh.comm
    local = _across(comm, share(comm, x._local, range(len(x.placements))))
    if type(local) is RankTensor:
        local.copies = True
    return local


def _across(comm: Any, local: Any) -> Any:
    """What the user gives or gets, on the other side: the same memory, but flags, hooks and `.grad` of its own."""
    if type(local) is not RankTensor:
        return _seen(local)
    return comm.rebuild(local, [_seen(value) for value in comm.values(local)])


def _seen(value: torch.Tensor) -> torch.Tensor:
    return value.view_as(value) if value.requires_grad and torch.is_grad_enabled() else value.detach()


@functools.lru_cache(maxsize=4096)
def _target_of(layout: Layout, placements: tuple[Any, ...], cap: int | None) -> tuple[Layout, tuple[Any, ...]]:
    """The layout that a redistribute comes to, and its steps: none where axes of one rank change, so that it is another
    name for the same."""
    target = layout.replace(placements=placements)
    if target is layout or not plan_steps(layout, target):
        return target, ()
    target = target.replace(stride=None)
    return target, plan_steps(layout, target, memory=cap)


register_cache("targets", _target_of.cache_info, _target_of.cache_clear)


def _grad_layout_given(layout: Layout, grad_placements: Sequence[Any]) -> Layout:
    """The layout the user gives the gradient of a local tensor, which must be as large as the tensor on every rank."""
    given = layout.replace(placements=as_placements(grad_placements))
    for coords in layout.mesh.comm.played():
        if given.local_shape_at(coords) != layout.local_shape_at(coords):
            raise LayoutError(
                f"grad_placements = {list(given.placements)}: the rank at {coords} would have a gradient of shape "
                f"{given.local_shape_at(coords)} for its local tensor of shape {layout.local_shape_at(coords)} under "
                f"{list(layout.placements)}; use the same Shard, or Replicate() or Partial() where there is none"
            )
    return given


class _Arriving(DTensor):
    """The result of an asynchronous move: an ordinary DTensor from the first look at its values on."""

    _finish: Callable[[], Any]
    _coming: Any

    @property
    def _local(self) -> Any:  # type: ignore[override]
        local, finish = self._coming, self._finish
        del self._coming, self._finish
        self.__class__ = DTensor  # type: ignore[assignment]
        self._local = local
        finish()
        return local

    @_local.setter
    def _local(self, value: Any) -> None:
        self.__class__ = DTensor  # type: ignore[assignment]
        self._local = value


def _arriving(local: Any, finish: Callable[[], Any], layout: Layout) -> DTensor:
    self = make_wrapper(_Arriving, layout.shape, strides=layout.stride, dtype=layout.dtype, device=layout.device)
    self._coming, self._finish, self._layout = local, finish, layout
    return self


def _redistribute_across(
    tensor: DTensor, mesh: Any, placements: Any, forward: torch.dtype | None, backward: torch.dtype | None
) -> DTensor:
    """A redistribute to another mesh."""
    src = tensor._layout
    if placements is None and len(src.placements) != len(mesh.shape):
        raise MoveError(
            f"redistribute: from {src.mesh!r} to {mesh!r} without placements; give one for each of its axes"
        )
    places = as_placements(placements) if placements is not None else src.placements
    if forward is not None and forward != src.dtype:
        tensor = tensor.to(forward) if not src.mesh.comm.outside else _cast_nothing(tensor, forward)  # type: ignore[assignment]
        src = tensor._layout
    target = Layout.make(mesh, places, src.shape, src.dtype, device=mesh.device)
    comm, local = src.mesh.comm, tensor._local
    if backward is not None and tensor.requires_grad:
        back = comm.bind(torch.Tensor.to) if not comm.outside else torch.Tensor.to
        local = regrade(comm, local, lambda g: back(g, src.dtype))
    out = move_across(local, src, target, Note(running_op() or "redistribute"))
    if backward is not None and tensor.requires_grad:
        there = mesh.comm.bind(torch.Tensor.to) if not mesh.comm.outside else torch.Tensor.to
        out = regrade(mesh.comm, out, lambda g: there(g, backward))
    return wrap(out, target)


def _cast_nothing(tensor: DTensor, dtype: torch.dtype) -> DTensor:
    return wrap(tensor._local.to(dtype), tensor._layout.replace(dtype=dtype))


def _redistribute_as(
    tensor: DTensor, placements: Any, forward: torch.dtype | None, backward: torch.dtype | None, async_op: bool
) -> DTensor:
    """A redistribute whose values travel as `forward` and whose gradients as `backward`."""
    if forward is not None and forward != tensor.dtype:
        tensor = tensor.to(forward)  # type: ignore[assignment]
    if backward is not None and tensor.requires_grad:
        comm, layout = tensor._layout.mesh.comm, tensor._layout
        convert = comm.bind(torch.Tensor.to)
        tensor = wrap(regrade(comm, tensor._local, lambda g: convert(g, layout.dtype)), layout)
        out = tensor.redistribute(placements=placements)  # the gradient's cast must see the values: no later wait
        return wrap(regrade(comm, out._local, lambda g: convert(g, backward)), out._layout)
    return tensor.redistribute(placements=placements, async_op=async_op)


def _set_data(tensor: DTensor, value: Any) -> None:
    """tensor.data = value: other values (of another dtype or layout, if need be) under the same autograd identity."""
    if not isinstance(value, DTensor):
        raise LayoutError(f"data: expected a DTensor, got {type(value).__name__}; distribute_tensor it first")
    with without_torch_function():
        torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    surface.note_loose_write(tensor)
    comm = tensor._layout.mesh.comm
    local = surface.leaf_local(tensor)
    if value._layout.mesh is not tensor._layout.mesh:
        raise MeshError(f"data: on {value._layout.mesh!r}, the tensor on {tensor._layout.mesh!r}")
    if comm.structure(local) != comm.structure(value._local):
        flag = tensor.requires_grad
        tensor._local = comm.rebuild(value._local, [v.detach().requires_grad_(flag) for v in comm.values(value._local)])
        tensor.__dict__.pop("_leaf", None)
        tensor.__dict__.pop("_hooks", None)
    else:
        for mine, theirs in zip(comm.values(local), comm.values(value._local), strict=True):
            mine.data = theirs
    tensor._layout = value._layout
    tensor._spreads = None


def _rebuild(parts: Any, structure: Any, source: Any, state: Any, flags: Any, notes: Any = ()) -> DTensor:
    placements, shape, stride, dtype, device = state
    mesh = as_mesh(source)
    requires_grad, is_param = flags
    local = mesh.comm.assemble(structure, parts)
    result = wrap(local, Layout.make(mesh, placements, shape, dtype, stride, parts[0].device))
    surface.set_requires_grad(result, requires_grad)
    if is_param:
        result._is_param = True
    result.__dict__.update(notes)
    return result


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)


# torch may ask for these by torch.Tensor's own functions; the class answers them itself.
_T = torch.Tensor
SPECIAL[torch.autograd.backward] = surface.backward
SPECIAL[torch.autograd.grad] = surface.grad
SPECIAL[make_dual] = surface.make_dual
for _name in (
    "__repr__ __deepcopy__ __reduce_ex__ __array__ __bool__ __int__ __float__ __index__ __complex__ __format__ "
    "backward requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook detach_ item tolist numpy "
    "is_conj is_neg"
).split():
    SPECIAL[getattr(_T, _name)] = _method(_name)
SPECIAL[torch.is_conj], SPECIAL[torch.is_neg] = _method("is_conj"), _method("is_neg")
for _name in ("requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad", "data", "_version"):
    SPECIAL[getattr(_T, _name).__get__] = lambda self, _name=_name: getattr(self, _name)
for _name in ("requires_grad", "grad", "data"):
    SPECIAL[getattr(_T, _name).__set__] = lambda self, value, _name=_name: setattr(self, _name, value)

# What a pickled tensor is made of: torch.load(weights_only=True) may build these.
torch.serialization.add_safe_globals([_rebuild, _rebuild_shard, Replicate, Partial, _submesh, DeviceMesh])
