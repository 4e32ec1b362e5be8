"""DTensor: a tensor over a mesh that behaves as if it lived on one device."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from shardwise import checkpoint_protocol
from shardwise.argument_types import MeshArgument, Placements
from shardwise.autograd import attributes, backward, hooks
from shardwise.autograd.leaves import first_leaf, leaf_values
from shardwise.autograd.nodes import node_of
from shardwise.boundary import are_leaves, check_dense, checked_grad_layout, enter, held_outside, lent, other_side
from shardwise.comm.bridge import collapse, own_each
from shardwise.comm.record import Note
from shardwise.context import is_strict, of_thread, refuse_in_program, relaxed
from shardwise.copies import as_array, deep_copy, pickled, shallow_copy, unpickled
from shardwise.dispatcher import Dispatcher
from shardwise.drawing import figure, markup
from shardwise.engine import reduce_to_parts
from shardwise.engine.call import call_function, call_overload
from shardwise.errors import LayoutError, RuleError, dim_from_front
from shardwise.layout import Layout, Partial, Placement, Replicate, as_placements
from shardwise.layout.picture import picture_of
from shardwise.layout.placement import _rebuild_shard, placements_on
from shardwise.mesh import DeviceMesh, SimulatedMesh, _submesh, as_mesh
from shardwise.move import limit, move, run_move, start_move
from shardwise.move.arrival import Arrival, versions_of
from shardwise.move.run import is_done
from shardwise.redistribution import redistribute_across, redistribute_as, target_of
from shardwise.showing import text_of
from shardwise.sizes import layout_of_locals
from shardwise.spec import Spec
from shardwise.torch_private.autograd import is_recorded
from shardwise.torch_private.tensors import make_wrapper, use_list_ops_for
from shardwise.wrapper import Wrapper, wrap

_REDISTRIBUTE = Note("redistribute")
_T = TypeVar("_T")


def _asked_of_whole(question: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """A method that gives the answer of the whole value."""
    return lambda self: question(self._whole())


class DTensor(Wrapper):
    """A tensor whose values are stored on the ranks of a mesh, as its placements say. Its shape is the global one.

    Make one with `distribute_tensor`, `DTensor.from_local` or the factories (`zeros`, `randn`, ...). Every function of
    torch works on it; autograd runs on the local tensors.
    """

    def __new__(cls, local_tensor: torch.Tensor, spec: Spec, *, requires_grad: bool = False) -> DTensor:
        """A leaf tensor, made as programs written for torch's DTensor do. `from_local` asks for less.

        Args:
            local_tensor: What this rank holds.
            spec: The `_spec` of a DTensor with the layout it is to have.
            requires_grad: Whether autograd records what is done with it.
        """
        if not isinstance(spec, Spec) or spec.tensor_meta is None:
            raise LayoutError(f"DTensor: spec must be the _spec of a DTensor, got {spec!r}; or use DTensor.from_local")
        local = local_tensor.detach() if isinstance(local_tensor, torch.Tensor) else local_tensor
        shape, stride, _ = spec.tensor_meta
        made = cls.from_local(local, spec.mesh, spec.placements, shape=shape, stride=stride)
        return made.requires_grad_(requires_grad)

    # -- where it lives -------------------------------------------------------------------------------------
    @property
    def device_mesh(self) -> DeviceMesh | SimulatedMesh:
        """The mesh that the tensor is on, as the program gave it."""
        return self._layout.mesh.source

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each axis of the mesh: Shard, Replicate or Partial."""
        return self._layout.placements

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """The layout: which rank holds which tiles, local shapes, offsets. Equal layouts are the same object.

        torch has an attribute of this name that says how memory is organized. torch's own Python code compares it,
        looks it up in tables and passes it on to C++, so a caller inside of torch gets torch.strided, which is true of
        the local tensors. A program that wants that answer asks `x.to_local().layout`.
        """
        caller = sys._getframe(1).f_globals.get("__name__", "")
        is_torch = caller.startswith("torch.") or caller == "torch"
        return torch.strided if is_torch else self._layout  # type: ignore[return-value]

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

    def size(self, dim: int | None = None) -> torch.Size | int:  # type: ignore[override]
        return self.shape if dim is None else self._layout.shape[dim_from_front(dim, self.ndim)]

    @property
    def _spec(self) -> Spec:
        return Spec.of(self._layout)

    _local_tensor = property(attributes.get_local, attributes.set_local)

    # -- in and out -----------------------------------------------------------------------------------------
    @staticmethod
    def from_local(
        local_tensor: torch.Tensor | None = None,
        device_mesh: MeshArgument | None = None,
        placements: Placements | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Placements | None = None,
        assume_even: bool = False,
        local: torch.Tensor | None = None,
    ) -> DTensor:
        """Make one tensor out of what each rank holds; differentiable. It shares the memory of the local tensor.

        On a simulated mesh, a plain tensor means that every rank holds these values. If the placements are Shard or
        Partial, each rank has its own memory, as on processes: the first rank shares the tensor's, others get copies.

        Args:
            local_tensor: What this rank holds; on a simulated mesh a RankTensor, or a plain tensor for all ranks.
            device_mesh: The mesh; by default that of the enclosing `with mesh:`.
            placements: One per mesh axis; by default Replicate.
            run_check: Whether to compare dtypes and dims across ranks, and take Replicate values from the first rank.
            shape: The global shape. Without it, the ranks exchange their sizes (one small collective), so that the
                global shape is right for uneven local tensors, too.
            stride: The global stride, of a `shape` that is given; by default dims in memory are ordered as in the
                local tensor.
            grad_placements: How the gradient of the local tensor is laid out; by default like the result's.
            assume_even: Whether to assume that every rank holds a tensor of this size; then no sizes are exchanged.
            local: A shorter name of `local_tensor`.

        Returns:
            The distributed tensor.

        Raises:
            LayoutError: The arguments do not fit each other, or do not fit the local tensors of the ranks.

        >>> import torch, shardwise
        >>> x = shardwise.DTensor.from_local(torch.ones(2, 3), shardwise.simulate(4), [shardwise.Shard(0)])
        >>> x.shape
        torch.Size([8, 3])
        """
        if local is not None and local_tensor is not None:
            raise LayoutError("from_local: local_tensor and local are two names of one argument; give one of them")
        local = local_tensor if local is None else local
        if isinstance(local, DTensor) or not isinstance(local, torch.Tensor):
            instead = "its to_local() is one" if isinstance(local, DTensor) else "torch.as_tensor(...) makes one"
            raise LayoutError(
                f"the local_tensor argument only accepts torch.Tensor but got {type(local)} value; {instead}"
            )
        if stride is not None and shape is None:
            raise LayoutError(
                f"Found shape:None, stride:{tuple(stride)}. Please pass both shape and stride at the same time: a "
                f"shape that is yet to be found may have other strides"
            )
        check_dense(local)
        mesh = as_mesh(device_mesh, outside=True)
        places = placements_on(mesh, placements)
        of_leaves = are_leaves(local)
        local, layout = layout_of_locals(local, mesh, places, shape, stride, run_check, assume_even)
        if grad_placements is not None:
            theirs = checked_grad_layout(layout, grad_placements)
            return reduce_to_parts.enter_with_gradient(local, layout, theirs, of_leaves)  # type: ignore[return-value]
        return enter(local, layout, of_leaves)

    @staticmethod
    def outside(
        device_mesh: MeshArgument, placements: Placements, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> DTensor:
        """Return a stand-in for a tensor on a mesh that this rank is not in: it holds no values, but can be moved.

        Args:
            device_mesh: The other mesh.
            placements: How the tensor is laid out there.
            shape: Its global shape.
            dtype: Its dtype; by default torch's default dtype.

        Raises:
            MeshError: If this rank is in the mesh.
        """
        return held_outside(device_mesh, placements, shape, dtype)  # type: ignore[return-value]

    def to_local(self, *, grad_placements: Placements | None = None) -> torch.Tensor:
        """The local tensor: what this rank holds; on a simulated mesh, a RankTensor. Differentiable.

        Args:
            grad_placements: How the gradient that flows back is laid out; by default like this tensor's own.

        Returns:
            A tensor that shares this one's memory.
        """
        comm, local = self._layout.mesh.comm, self._local
        if not is_recorded(comm.first(local)):
            return lent(self)
        if grad_placements is not None:
            return reduce_to_parts.leave_with_gradient(self, checked_grad_layout(self._layout, grad_placements))
        return other_side(comm, own_each(comm, local))

    def redistribute(
        self,
        device_mesh: MeshArgument | None = None,
        placements: Placements | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same values in another layout, differentiable.

        To move to another mesh, every rank of either mesh must call it. A rank that is only in the target calls it on
        `DTensor.outside(...)`; a rank that is not in the target gets an empty tensor.

        Args:
            device_mesh: Another mesh; by default the tensor's own.
            placements: One per axis of the mesh. If the mesh or a dtype changes, the default is the tensor's own.
            async_op: Whether to return before the values have arrived. The first use of the result (or its `wait()`)
                waits for them.
            forward_dtype: The dtype to cast the values to before they are sent; the result has it.
            backward_dtype: The dtype to cast gradients to before they are sent back.

        Returns:
            The tensor in the new layout; itself if nothing changes.

        >>> import torch, shardwise
        >>> x = shardwise.ones(8, 4, device_mesh=shardwise.simulate(4), placements=[shardwise.Shard(0)])
        >>> x.redistribute(placements=[shardwise.Shard(1)]).placements
        (Shard(dim=1),)
        """
        if device_mesh is not None:
            mesh = as_mesh(device_mesh, outside=True)
            if mesh is not self._layout.mesh:
                return redistribute_across(self, mesh, placements, forward_dtype, backward_dtype)
        if forward_dtype is not None or backward_dtype is not None:
            return redistribute_as(self, placements, forward_dtype, backward_dtype, async_op)
        target, steps = target_of(self._layout, as_placements(placements), limit.of_thread.cap)
        if not steps:
            same = target is self._layout and not self._guessed
            return self if same else wrap(other_side(target.mesh.comm, self._local), target)
        op, note = of_thread.op, _REDISTRIBUTE
        if op is not None:
            note = Note(op)
            if is_strict() and any(step.kind != "local" for step in steps):
                refuse_in_program(op, self._layout, f"[{', '.join(map(str, target.placements))}]")
        if async_op:
            return _arriving(self, target, note)
        moved = wrap(run_move(self._local, target.mesh.comm, steps, note), target)
        if is_recorded(target.mesh.comm.first(moved._local)):
            axes = reduce_to_parts.gathered_axes(self._layout, target)
            reduce_to_parts.note_gathered(self, moved, axes, for_calls=False)
        return moved

    def wait(self) -> DTensor:
        """Return this tensor, once an asynchronous move to it is done."""
        first_leaf(self)
        return self

    def full_tensor(self, *, grad_placements: Placements | None = None) -> torch.Tensor:
        """Return the whole value as a plain tensor on every rank; differentiable. On a simulated sub-mesh whose groups
        hold different values, it is a RankTensor.

        Args:
            grad_placements: How the gradient that flows back is laid out; by default replicated.
        """
        layout = self._layout
        whole = layout.replicated(stride=None)
        comm = layout.mesh.comm
        if grad_placements is not None and is_recorded(self):
            theirs = checked_grad_layout(whole, grad_placements)
            local = reduce_to_parts.full_with_gradient(self._local, layout, whole, theirs)
        else:
            local = move(self._local, layout, whole, Note("full_tensor"))
        return other_side(comm, collapse(comm, local))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Tensor.to. Short where the tensor is on the device already, because clip_grad_norm_ calls it per norm."""
        if not kwargs and len(args) == 1 and type(args[0]) is torch.device and args[0] == self._layout.device:
            return self
        return super().to(*args, **kwargs)

    # -- autograd -------------------------------------------------------------------------------------------
    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return first_leaf(self).requires_grad

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        attributes.set_requires_grad(self, flag)

    grad = property(attributes.get_grad, attributes.set_grad, attributes.drop_grad)  # type: ignore[assignment]

    grad_fn = property(node_of)  # type: ignore[assignment]

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return first_leaf(self).is_leaf

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return first_leaf(self).retains_grad

    @property
    def _version(self) -> int:  # type: ignore[override]
        return first_leaf(self)._version

    data = property(attributes.get_data, attributes.set_data)  # type: ignore[assignment]

    def set_(self, *args: object, **kwargs: object) -> DTensor:  # type: ignore[override]
        """The memory and layout of another distributed tensor. torch's parametrizations write so."""
        if len(args) == 1 and not kwargs and isinstance(args[0], DTensor) and args[0].dtype == self.dtype:
            attributes.set_data(self, args[0])
            return self
        raise RuleError(
            "set_ gives a tensor other memory, and that of a distributed tensor is on many ranks; give it a DTensor of "
            "the same dtype, or use x.data = y"
        )

    def backward(  # type: ignore[override]
        self,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> None:
        backward.backward([self], None if gradient is None else [gradient], retain_graph, create_graph, inputs)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:  # type: ignore[override]
        attributes.set_requires_grad(self, requires_grad)
        return self

    retain_grad = attributes.retain_grad
    register_hook = hooks.register_hook
    register_post_accumulate_grad_hook = hooks.register_post_accumulate_grad_hook

    def detach_(self) -> DTensor:  # type: ignore[override]
        for value in leaf_values(self):
            value.detach_()
        return self

    # -- plain values ---------------------------------------------------------------------------------------
    def _whole(self) -> torch.Tensor:
        """The value for the program to look at. Asking for it asks for the communication, so strict() allows it."""
        with relaxed(), torch.no_grad():
            return self._layout.mesh.comm.to_program(self.full_tensor())

    def numpy(self, *, force: bool = False) -> Any:  # type: ignore[override]
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return as_array(self, self._whole(), force)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> Any:  # type: ignore[override]
        value = self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)
        return value.copy() if copy else value

    item, tolist = _asked_of_whole(torch.Tensor.item), _asked_of_whole(torch.Tensor.tolist)
    __bool__, __int__, __float__ = _asked_of_whole(bool), _asked_of_whole(int), _asked_of_whole(float)
    __complex__, __index__ = _asked_of_whole(complex), _asked_of_whole(operator.index)

    def __format__(self, spec: str) -> str:
        return format(self._whole(), spec) if self.dim() == 0 else object.__format__(self, spec)

    # -- memory ---------------------------------------------------------------------------------------------
    def apply_(self, function: Callable[[Any], float]) -> DTensor:  # type: ignore[override]
        """Tensor.apply_, on whole values: every rank applies the function to all of them."""
        if self.requires_grad:
            raise RuntimeError("Can't call apply_() on Variable that requires grad. Use var.detach().apply_() instead.")
        with relaxed():
            return self.copy_(self._whole().clone().apply_(function))  # type: ignore[return-value]

    def share_memory_(self) -> DTensor:  # type: ignore[override]
        for value in leaf_values(self):
            value.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(value.is_shared() for value in leaf_values(self))

    def get_device(self) -> int:
        return first_leaf(self).get_device()

    def is_conj(self) -> bool:
        """Whether the ranks' tensors are lazily conjugated; the wrapper never is."""
        return first_leaf(self).is_conj()

    def is_neg(self) -> bool:
        return first_leaf(self).is_neg()

    def __dlpack__(self, **_: object) -> Any:  # type: ignore[override]
        raise RuleError("__dlpack__: the memory of a distributed tensor is on many ranks; give x.to_local() away")

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:  # type: ignore[override]
        return memo[id(self)] if id(self) in memo else deep_copy(self, memo)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:  # type: ignore[override]
        return _rebuild, pickled(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return text_of(self, "_coming" not in self.__dict__ and self.requires_grad)

    def _repr_html_(self) -> str:
        return figure(picture_of(self._layout))

    def __rich__(self) -> str:
        return markup(picture_of(self._layout))

    # -- torch.distributed.checkpoint -----------------------------------------------------------------------
    def __create_write_items__(self, fqn: str, tensor: DTensor) -> list[Any]:
        return checkpoint_protocol.write_items(fqn, tensor)

    __copy__ = shallow_copy
    __create_chunk_list__ = checkpoint_protocol.chunk_list
    __get_tensor_shard__ = checkpoint_protocol.tensor_shard

    # -- torch comes in here --------------------------------------------------------------------------------
    _op_dispatcher = Dispatcher()
    __torch_function__: Any = classmethod(call_function)
    __torch_dispatch__: Any = classmethod(call_overload)


# clip_grad_norm_ and torch.optim use list ops for these types: one exchange for all gradients, not one for each
use_list_ops_for(DTensor)


class _Arriving(DTensor):
    """The result of an asynchronous move: an ordinary DTensor from the first look at its values on."""

    @property
    def _local(self) -> Any:  # type: ignore[override]
        coming = self.__dict__.get("_coming")
        if coming is not None:
            self._local = coming.wait()
        return self.__dict__["_local"]  # another thread has waited

    @_local.setter
    def _local(self, value: object) -> None:
        self.__class__ = DTensor  # type: ignore[assignment]
        self._local = value
        self.__dict__.pop("_coming", None)


def _arriving(source: Wrapper, target: Layout, note: Note) -> DTensor:
    """`source` on its way to another layout."""
    comm, local = source._layout.mesh.comm, source._local
    if any(value.is_inference() for value in comm.values(local)):
        local = comm.bind(torch.clone)(local)  # nobody counts the writes to a tensor of inference mode
    sources = versions_of(comm.values(local))
    coming, finish = start_move(local, source._layout, target, note)
    if finish is is_done:
        return wrap(coming, target)
    self = make_wrapper(_Arriving, target.shape, strides=target.stride, dtype=target.dtype, device=target.device)
    what = f"the tensor of shape {source._layout.shape}, laid out {list(source._layout.placements)},"
    self._coming, self._layout = Arrival(coming, finish, sources, what), target
    return self


def _rebuild(*state: Any) -> DTensor:
    """A pickled tensor again. Files name this function, so it stays here."""
    return unpickled(*state)


# What a pickled tensor is made of: torch.load(weights_only=True) may build these.
torch.serialization.add_safe_globals([_rebuild, _rebuild_shard, Replicate, Partial, _submesh, DeviceMesh])
