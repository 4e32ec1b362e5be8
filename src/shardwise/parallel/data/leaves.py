"""The leaves of several parameters: whole along the data axis, gathered before they are used and freed afterwards."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

from shardwise.autograd.leaves import loose_writes
from shardwise.comm.capturing import tape_here, tapes
from shardwise.comm.rank_tensor import RankTensor
from shardwise.comm.record import Note
from shardwise.errors import AutogradError
from shardwise.layout import Layout
from shardwise.layout.placement import REPLICATE, Shard
from shardwise.move import start_move
from shardwise.parallel.data.layouts import DataMesh
from shardwise.parallel.data.own_collectives import gather_by
from shardwise.parallel.data.parameter import ManagedParameter
from shardwise.parallel.data.policy import Policy
from shardwise.parallel.data.rows import Rows
from shardwise.parallel.data.states import MEMORY, Memory, State
from shardwise.tensor import DTensor
from shardwise.torch_private.tensors import foreach_copy_, is_abstract, storage_id, storage_users

# What a tensor without memory can still answer.
_KNOWN = {
    getattr(torch.Tensor, name).__get__
    for name in "shape dtype device layout requires_grad grad grad_fn is_leaf ndim itemsize nbytes _version".split()
}
_KNOWN |= {
    getattr(torch.Tensor, name)
    for name in (
        "size dim numel nelement stride is_floating_point is_complex requires_grad_ register_hook "
        "register_post_accumulate_grad_hook"
    ).split()
}
_KNOWN |= {torch.Tensor.grad.__set__, torch.Tensor.requires_grad.__set__, torch.numel}  # type: ignore[attr-defined, union-attr]


class Freed(torch.Tensor):
    """The class of a leaf between uses, which says why it cannot be used; once filled, it is a plain tensor again."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: tuple[type, ...], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs or {})
        freed = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, Freed))
        raise AutogradError(f"{resolve_name(func) or func}: {_describe(freed)}")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"<{_describe(self)}>"

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise AutogradError(f"deepcopy: {_describe(self)}")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise AutogradError(f"pickle: {_describe(self)}")


def _describe(freed: torch.Tensor) -> str:
    return (
        f"this tensor of shape {tuple(freed.shape)} stood in for a parameter in the forward of its unit, and its "
        f"memory is given back until the next; read the module's own parameter (a DTensor), or clone it in the forward"
    )


def _is_there(value: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a tensor begins where a view of some memory does."""
    return storage_id(value) == storage_id(view) and value.storage_offset() == view.storage_offset()


def mark_freed(tensor: DTensor) -> None:
    for value in tensor._layout.mesh.comm.values(tensor._local):
        if type(value) is torch.Tensor and not value.untyped_storage().nbytes():
            value.__class__ = Freed
    tensor._spreads = None


class LeafGroup:
    """The leaves of some parameters of one dtype, gathered and freed together.

    Where nothing is cut and the dtypes agree, they live in the memory of the parameters (`in_place`) and are whole
    always; of a rank that `is_alone`, they are the parameters' own tensors. Else they live in one buffer for each rank
    that this process runs, with memory only while it is WHOLE."""

    def __init__(self, parameters: Sequence[ManagedParameter], data: DataMesh, policy: Policy, is_alone: bool) -> None:
        self.parameters, self.data, self.policy, self._is_alone = list(parameters), data, policy, is_alone
        kept = parameters[0].layouts.kept
        self.dtype, self.kept_dtype = parameters[0].dtype, kept.dtype
        self.device, self.kept_device = parameters[0].device, kept.device
        self.cut = data.parts > 1 and any(p.layouts.dim is not None for p in parameters)
        self.in_place = not self.cut and (self.dtype, self.device) == (self.kept_dtype, self.kept_device)
        self.memory = State("leaves", Memory.WHOLE if self.in_place else Memory.PARTS, MEMORY)
        self.buffers: list[torch.Tensor] = []
        self._arriving: tuple[torch.Tensor | None, Callable[[], object]] = None, _wait_for_nothing
        self._gathered_versions: tuple[int, ...] | None = None
        self._loose_writes = [loose_writes(p.param) for p in self.parameters]
        self._gathered_by: Callable[[], object] = _nobody  # the capture that is under way, if it has gathered
        self._values = [value for p in self.parameters for value in p.values]
        if self.in_place:
            self._alias_parameters()
        else:
            self._make_buffers()

    # -- making the leaves ----------------------------------------------------------------------------------
    def _alias_parameters(self) -> None:
        """Make leaves in the memory of the parameters, or let those there are follow it."""
        for p in self.parameters:
            values = p.values_by_rank()
            if self._is_alone:
                p.set_leaves(list(values))
            elif "leaves" in p.__dict__:
                for leaf, value in zip(p.leaves, values, strict=True):
                    leaf.data = value.data
            else:
                p.set_leaves([value.data for value in values])

    def _make_buffers(self) -> None:
        """Make leaves in memory of their own, one buffer for all of them for each rank."""
        wholes = [(p.layouts.whole, p.layouts.whole.mesh.comm.coords_here()) for p in self.parameters]
        ranks = range(len(self.data.coords))
        shapes = [[whole.local_shape_at(coords[r]) for whole, coords in wholes] for r in ranks]
        dims = [p.layouts.dim for p in self.parameters]
        self._rows = [Rows(mine, dims, self.data.parts) for mine in shapes]
        self._length = max(rows.length for rows in self._rows)
        shape = (self.data.parts, self._length)
        in_parts, whole = self.data.placements(REPLICATE, Shard(0)), self.data.placements(REPLICATE, REPLICATE)
        self._layout = Layout.make(self.data.mesh, in_parts, shape, self.dtype, None, self.device)
        self._whole = self._layout.replace(placements=whole)
        self._targets: list[list[torch.Tensor]] = []  # for each rank, the parts of the leaves that a gather fills
        leaves = [self._buffer_of(rows, mine) for rows, mine in zip(self._rows, shapes, strict=True)]
        for i, p in enumerate(self.parameters):
            p.set_leaves([mine[i] for mine in leaves])
        self._set_class(Freed)
        flat = self.cut and not self.data.mesh.comm.simulated and not self._is_shared()
        self._kept_views = self._flatten() if flat else None
        self._is_flat = self._kept_views is not None

    def _buffer_of(self, rows: Rows, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Make the buffer of one rank and note what a gather fills in it; gives the leaves, which are views of it."""
        with self.data.mesh.comm.making():
            buffer = torch.empty(sum(map(math.prod, shapes)), dtype=self.dtype, device=self.device)
        sizes = [math.prod(shape) for shape in shapes]
        # .data: a version counter of its own, so that filling the buffer again does not look like a write to a tensor
        # that autograd has saved
        leaves = [part.view(shape) for part, shape in zip(buffer.data.split(sizes), shapes, strict=True)]
        targets = [part.view(shape) for part, shape in zip(buffer.split(sizes), shapes, strict=True)]
        if self.cut:  # every row has all of a tensor that is not cut: the first one is enough
            parts = [(i, part) for i, target in enumerate(targets) for part in rows.in_whole(i, target)]
            targets = [part[0] if rows.dims[i] is None else part for i, part in parts]
        self.buffers.append(buffer)
        self._targets.append(targets)
        buffer.untyped_storage().resize_(0)
        return leaves

    def _is_shared(self) -> bool:
        """Whether something else shares memory with a parameter: it would be left behind in the old memory."""
        own = Counter(storage_id(value) for value in self._values)
        return any(storage_users(value) > own[storage_id(value)] for value in self._values)

    def _flatten(self) -> list[torch.Tensor]:
        """Put the parameters' own values into one row, so that gathering needs no copy; gives their views of it."""
        pinned = any(value.is_pinned() for value in self._values if value.numel())
        with self.data.mesh.comm.making():
            self._row = torch.zeros(self._length, dtype=self.kept_dtype, device=self.kept_device, pin_memory=pinned)
        views = self._rows[0].kept(self._row, self.data.coords[0])
        for p, view in zip(self.parameters, views, strict=True):
            (value,) = p.values
            view.copy_(value.detach())
            value.data = view
        return views

    def _set_class(self, kind: type[torch.Tensor]) -> None:
        for p in self.parameters:
            for leaf in p.leaves:
                if not is_abstract(leaf):  # those are of a class of their own
                    leaf.__class__ = kind

    # -- noticing writes ------------------------------------------------------------------------------------
    def _versions(self) -> tuple[int, ...]:
        """Numbers that change when a parameter is written."""
        loose = [loose_writes(p.param) for p in self.parameters]
        if loose != self._loose_writes:
            self._follow_loose_writes()
            self._loose_writes = loose
        return (*loose, *(value._version for value in self._values))

    def _follow_loose_writes(self) -> None:
        """After ``param.data = ...``: leaves in the memory of a parameter follow it."""
        self._values = [value for p in self.parameters for value in p.values]
        if self.in_place:
            self._alias_parameters()
        elif self._kept_views is not None:
            views = zip(self._values, self._kept_views, strict=True)
            self._is_flat = all(_is_there(v, view) or not view.numel() for v, view in views)

    # -- gathering and freeing ------------------------------------------------------------------------------
    @torch.no_grad()
    def start(self) -> None:
        versions = self._versions()
        is_current = self.memory.now is not Memory.PARTS and self._gathered_versions == versions
        tape = tape_here() if tapes else None
        if self.in_place or (is_current and (tape is None or self._gathered_by() is tape)):
            return
        # each run of a captured program gathers, also where an earlier call had gathered what the first run needs
        self._gathered_by = _nobody if tape is None else weakref.ref(tape)
        if self.memory.now is Memory.GATHERING:
            self._arrived()
        self._arriving = self._gather()
        self.memory.to(Memory.GATHERING)
        self._gathered_versions = versions

    def _gather(self) -> tuple[torch.Tensor | None, Callable[[], object]]:
        """Begin to gather; gives what will have arrived, None where nothing is cut, and what waits for it."""
        if not self.cut:
            return None, _wait_for_nothing
        own = self._own_rows()
        if self.policy.gathers_by is not None:
            return gather_by(self.policy.gathers_by, own[0], self.data)
        mine = [row.unsqueeze(0) for row in own]
        local = RankTensor(mine) if self.data.mesh.comm.simulated else mine[0]
        return start_move(local, self._layout, self._whole, Note("data_parallel"))

    def _own_rows(self) -> list[torch.Tensor]:
        """What each rank that this process runs keeps, as a row."""
        if self._is_flat:
            return [self._row.to(self.device, self.dtype)]
        with self.data.mesh.comm.making():
            made = [torch.zeros(self._length, dtype=self.dtype, device=self.device) for _ in self._rows]
        for r, (rows, row) in enumerate(zip(self._rows, made, strict=True)):
            foreach_copy_(rows.kept(row, self.data.coords[r]), self._kept_by(r))
        return made

    def _kept_by(self, rank: int) -> list[torch.Tensor]:
        return [p.values_by_rank()[rank].detach() for p in self.parameters]

    @torch.no_grad()
    def finish(self) -> None:
        """Gather, or wait for the gathering under way: afterwards the leaves hold the parameters."""
        if self.memory.now is Memory.WHOLE:
            return
        self.start()
        versions, self._gathered_versions = self._gathered_versions, ()  # if it fails here, it is gathered again
        arrived = self._arrived()
        for r, buffer in enumerate(self.buffers):
            storage = buffer.untyped_storage()
            if not storage.nbytes():
                storage.resize_(buffer.numel() * buffer.itemsize)
            sources = self._kept_by(r) if arrived is None else self._in_matrix(r, arrived)
            if sources:
                foreach_copy_(self._targets[r], sources)
        self._gathered_versions = versions
        self.memory.to(Memory.WHOLE)
        self._set_class(torch.Tensor)

    def _arrived(self) -> torch.Tensor | None:
        (arrived, wait), self._arriving = self._arriving, (None, _wait_for_nothing)
        wait()
        return arrived

    def _in_matrix(self, rank: int, arrived: torch.Tensor) -> list[torch.Tensor]:
        """The parts of all leaves in the rows that one rank has gathered."""
        matrix = (arrived.ranks[rank] if isinstance(arrived, RankTensor) else arrived).contiguous()
        return [
            part if p.layouts.dim is not None else part[0]
            for i, p in enumerate(self.parameters)
            for part in self._rows[rank].in_matrix(i, matrix)
        ]

    def storages(self) -> set[int]:
        """The numbers (`storage_id`) of the memory that the leaves have for themselves now."""
        if self.memory.now is not Memory.WHOLE:
            return set()
        return set(map(storage_id, self.buffers))

    def free(self) -> None:
        """Give the memory back; what autograd has saved finds it filled again before it is used."""
        if self.in_place or self.memory.now is Memory.PARTS:
            return
        if self.memory.now is Memory.GATHERING:
            self._arrived()
        for buffer in self.buffers:
            buffer.untyped_storage().resize_(0)
        self.memory.to(Memory.PARTS)
        self._set_class(Freed)


def _nobody() -> None:
    return None


def _wait_for_nothing() -> None:
    return None
