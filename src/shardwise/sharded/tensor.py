"""ShardedTensor: a tensor cut into tiles of any shape, each held by any rank of a process group.

The wrapper knows every tile; the values of its own tiles are plain tensors, which record the autograd graph. A rank
that owns no tile keeps one empty tensor (`_anchor`) that goes through the same ops, so that the rank takes part in
every collective of a backward pass.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.checkpoint_protocol import chunk, items_for
from shardwise.comm.record import Note
from shardwise.layout.tileset import TileSet
from shardwise.sharded import autograd, moves, pickling, remote
from shardwise.sharded import to_dtensor as as_dtensor
from shardwise.sharded.base import ShardedTensorBase, blank, empty_tile, new_tile
from shardwise.sharded.checks import agreed_parts, checked_parts, parts_from_local_tensor
from shardwise.sharded.groups import Group, check_member, communication_device, shards_of
from shardwise.sharded.metadata import ShardedTensorMetadata, as_size, device_of
from shardwise.sharded.ops import registry
from shardwise.sharded.ops.registry import Function
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import ShardingSpec
from shardwise.sharded.tiles import tiles_of
from shardwise.torch_private.autograd import reentrant
from shardwise.torch_private.tensors import with_torch_function

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.rpc import RRef


def _of_the_parts(name: str) -> Any:
    """A property of the plain tensors of a rank, which agree in it."""
    return property(lambda self: getattr(self._parts[0], name))


class ShardedTensor(ShardedTensorBase):
    """A tensor whose tiles live on the ranks of a process group, as a sharding spec says.

    Every rank of the group makes it with the same arguments; the values are undefined. Any torch op works on it: tile
    by tile where that is right, else over a mesh layout, where the communication is in the ledger.

    Args:
        sharding_spec: Which tiles the tensor is cut into, and who owns them.
        *size: The global size, as ints or as one sequence of ints.
        dtype: The default is `torch.get_default_dtype()`.
        layout: Only `torch.strided`.
        requires_grad: Whether autograd records operations on it.
        pin_memory: Whether tiles in CPU memory are pinned.
        memory_format: Only `torch.contiguous_format`.
        process_group: The ranks that the tensor lives on. The default is the default process group.
        init_rrefs: Whether `remote_shards` works; `torch.distributed.rpc` must run.

    Raises:
        ValueError: If the spec does not fit the size, or an option is not supported.
        TypeError: If an option has the wrong type.
    """

    ProcessGroupState = pickling.ProcessGroupState
    _process_group: Group
    _init_rrefs: bool = False
    _tiles_kept: TileSet | None = None
    _empty: torch.Tensor | None = None
    _remote: remote.RemoteShards | None = None
    _grad_kept: tuple[list[torch.Tensor | None], ShardedTensor] | None = None
    _hooks_kept: autograd.LeafHooks | None = None

    # -- making one ---------------------------------------------------------------------------------------------
    def __init__(
        self,
        sharding_spec: ShardingSpec,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: Group | None = None,
        init_rrefs: bool = False,
    ) -> None:
        super().__init__()
        group = remote.checked_group(process_group, init_rrefs)
        properties = self._metadata.tensor_properties
        self._local_shards = [
            Shard.unchecked(new_tile(shard.shard_sizes, device_of(shard), properties), shard)
            for shard in shards_of(dist.get_rank(), self._metadata.shards_metadata, group)
        ]
        self._join(group, init_rrefs)

    def _join(self, group: Group, init_rrefs: bool) -> None:
        """Set the process group. The last step of every way of making a tensor."""
        self._process_group, self._init_rrefs = group, init_rrefs
        if init_rrefs:
            self._remote = remote.RemoteShards(self)

    @staticmethod
    def _from_parts(
        shards: list[Shard],
        metadata: ShardedTensorMetadata,
        spec: ShardingSpec,
        group: Group,
        *,
        tiles: TileSet | None = None,
        empty: torch.Tensor | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """Make a tensor from parts that are known to fit together."""
        made: ShardedTensor = blank(ShardedTensor, spec, metadata)
        made._local_shards, made._tiles_kept, made._empty = shards, tiles, empty
        made._join(group, init_rrefs)
        return made

    @classmethod
    def _init_from_local_shards(
        cls,
        local_shards: list[Shard],
        *global_size: int | Sequence[int] | None,
        process_group: Group | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """Make a tensor of which each rank holds the shards it passes. Every rank of the group calls it.

        Args:
            local_shards: The shards this rank holds; an empty list where it holds none.
            *global_size: The global size, as ints or as one sequence of ints; the same on every rank. With a None in
                it, the shards count as rows one after the other, by rank, whatever their offsets say.
            process_group: The default is the default process group.
            init_rrefs: Whether `remote_shards` works; `torch.distributed.rpc` must run.

        Raises:
            ValueError: On all ranks, if shards overlap, leave a hole, reach out of the tensor, or differ in a property.
            TypeError: On all ranks, if `local_shards` is not a list of shards.
        """
        group = check_member(remote.checked_group(process_group, init_rrefs))
        parts = agreed_parts(local_shards, global_size, group)
        return cls._from_parts(*parts, group, init_rrefs=init_rrefs)

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: Group | None = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensor:
        """Make a tensor from this rank's shards and the metadata of all, without communication.

        Args:
            local_shards: The shards this rank holds.
            sharded_tensor_metadata: The tiles of all ranks; the same on every rank.
            process_group: As of the class, like `init_rrefs`.
            sharding_spec: The spec behind the tiles. The default is found from the tiles.

        Raises:
            ValueError: If the shards do not fit the metadata, or the tiles overlap or leave a hole.
            RuntimeError: If this rank holds another number of shards than the metadata says.
        """
        group = remote.checked_group(process_group, init_rrefs)
        parts = checked_parts(local_shards, sharded_tensor_metadata, sharding_spec, group)
        return cls._from_parts(*parts, group, init_rrefs=init_rrefs)

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: torch.Tensor,
        sharding_spec: ShardingSpec,
        *global_size: int | Sequence[int],
        process_group: Group | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """Make a tensor from the one tensor this rank holds, without communication.

        Args:
            local_tensor: The values of this rank's tile. A rank that owns no tile passes any tensor of the dtype.
            sharding_spec: The spec; it gives each rank at most one tile.
            *global_size: The global size, as ints or as one sequence of ints.
            process_group: As of the class, like `init_rrefs`.

        Raises:
            ValueError: If the local tensor does not fit its tile, or the spec gives this rank several tiles.
            TypeError: If `local_tensor` is not a tensor.
        """
        group = remote.checked_group(process_group, init_rrefs)
        parts = parts_from_local_tensor(local_tensor, sharding_spec, as_size(global_size), group)
        return cls._from_parts(*parts, group, init_rrefs=init_rrefs)

    def _with_parts(self, parts: Sequence[torch.Tensor]) -> ShardedTensor:
        """Return a tensor in the same tiles with other values, which may have another dtype."""
        properties = copying.copy(self._metadata.tensor_properties)
        properties.dtype, properties.requires_grad = parts[0].dtype, parts[0].requires_grad
        metadata = ShardedTensorMetadata(self._metadata.shards_metadata, self._metadata.size, properties)
        shards = [Shard.unchecked(part, shard.metadata) for part, shard in zip(parts, self._local_shards)]
        empty = None if shards else parts[0]
        return ShardedTensor._from_parts(
            shards, metadata, self._sharding_spec, self._process_group, tiles=self._tiles_kept, empty=empty
        )

    # -- what this rank holds -----------------------------------------------------------------------------------
    def sharding_spec(self) -> ShardingSpec:
        """Return the spec that the tiles come from."""
        return self._sharding_spec

    def local_tensor(self) -> torch.Tensor:
        """Return the one tensor this rank holds.

        Raises:
            NotImplementedError: If this rank holds several shards, or none.
        """
        if len(self._local_shards) != 1:
            raise NotImplementedError(
                f"Only single local shard is supported. Number of shards: {len(self._local_shards)}"
            )
        return self._local_shards[0].tensor

    def remote_shards(self) -> dict[int, list[RRef[Shard]]]:
        """Return RRefs to the shards of every other rank that holds some, by RPC rank.

        Raises:
            RuntimeError: If the tensor was made without `init_rrefs=True`, or RPC has been shut down.
        """
        if not self._init_rrefs or self._remote is None:
            raise RuntimeError("ShardedTensor created with init_rrefs=False, no RRefs to remote shards available")
        return self._remote.rrefs(self._tiles.ranks.tolist())

    @property
    def _tiles(self) -> TileSet:
        if self._tiles_kept is None:
            self._tiles_kept = tiles_of(self._metadata.shards_metadata, self._process_group)
        return self._tiles_kept

    @property
    def _parts(self) -> list[torch.Tensor]:
        """The plain tensors whose graphs stand for this tensor's: those of the local shards, or the empty one."""
        return [shard.tensor for shard in self._local_shards] or [self._anchor]

    @property
    def _anchor(self) -> torch.Tensor:
        """The empty tensor that takes part in every op on a rank that owns no tile."""
        if self._empty is None:
            self._empty = self._as_empty(empty_tile(self._metadata)).requires_grad_(
                self._metadata.tensor_properties.requires_grad
            )
        return self._empty

    def _as_empty(self, part: torch.Tensor) -> torch.Tensor:
        """Return a tensor without elements, with as many dims as a tile."""
        return part.view([0] * max(1, self.dim()))

    def _get_preferred_device(self) -> torch.device:
        return communication_device(self._process_group)

    device = _of_the_parts("device")
    is_meta = _of_the_parts("is_meta")

    # -- moves --------------------------------------------------------------------------------------------------
    gather = moves.gather  # type: ignore[assignment]

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Change the tiles in place. Each element that must move moves once.

        Differentiable. Under `torch.no_grad()` a parameter stays a leaf.

        Args:
            resharding_spec: The new spec; any to any.

        Returns:
            This tensor.

        Raises:
            NotImplementedError: If `resharding_spec` is not a ShardingSpec.
        """
        if not isinstance(resharding_spec, ShardingSpec):
            raise NotImplementedError(f"reshard: expected a ShardingSpec, got {type(resharding_spec).__name__}")
        if resharding_spec == self._sharding_spec:
            return self
        metadata = resharding_spec.build_metadata(self.size(), self._metadata.tensor_properties)
        tiles = tiles_of(metadata.shards_metadata, self._process_group)
        return moves.move_to(self, tiles, metadata, resharding_spec, Note("reshard"))

    def _in_tiles_of(self, other: ShardedTensor, note: Note | None = None) -> ShardedTensor:
        """Return this tensor in the tiles of another of its size; itself if it is in them already."""
        if moves.same_tiles(self, other):
            return self
        metadata = ShardedTensorMetadata(other._metadata.shards_metadata, self.size(), self._metadata.tensor_properties)
        copy = self._with_parts(self._parts)
        return moves.move_to(copy, other._tiles, metadata, other._sharding_spec, note or Note("reshard"))

    cpu, cuda, to = moves.cpu, moves.cuda, moves.to
    to_dtensor = as_dtensor.to_dtensor

    def full_tensor(self) -> torch.Tensor:
        """Return the whole value as a plain tensor on every rank, differentiable."""
        return self.to_dtensor().full_tensor()

    # -- autograd: the graph is that of the tiles ---------------------------------------------------------------
    requires_grad = property(lambda self: self._parts[0].requires_grad, autograd.requires_grad_)  # type: ignore[arg-type]
    requires_grad_ = autograd.requires_grad_  # type: ignore[assignment]
    is_leaf = _of_the_parts("is_leaf")
    grad_fn = _of_the_parts("grad_fn")
    retains_grad = _of_the_parts("retains_grad")
    _version = _of_the_parts("_version")
    grad = property(autograd.get_grad, autograd.set_grad, lambda self: autograd.set_grad(self, None))
    data = property(lambda self: self._with_parts([part.data for part in self._parts]), autograd.set_data)
    register_hook = autograd.register_hook

    def backward(
        self,
        gradient: ShardedTensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Run a backward pass from this tensor; every rank of the group calls it. Arguments as in torch."""
        torch.autograd.backward([self], [gradient], retain_graph, create_graph, inputs=inputs)  # type: ignore[list-item]

    def retain_grad(self) -> None:
        for part in self._parts:
            part.retain_grad()

    def detach_(self) -> ShardedTensor:
        for part in self._parts:
            part.detach_()
        return self

    # -- copies, pickles, checkpoints ---------------------------------------------------------------------------
    __deepcopy__ = pickling.deep_copy
    __getstate__ = pickling.get_state
    __setstate__ = pickling.set_state
    __reduce_ex__ = pickling.reduce

    def __create_write_items__(self, fqn: str, object: ShardedTensor) -> list[WriteItem]:
        """One item for each tile held here that has elements; for a tensor without any, one for each tile."""
        return items_for(fqn, object, [s.box for s in object._local_shards if s.tensor.numel() or not object.numel()])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk(shard.box) for shard in self._local_shards]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        offset = list(index.offset or ())
        for shard in self._local_shards:
            if list(shard.metadata.shard_offsets) == offset and (shard.tensor.numel() or not self.numel()):
                return shard.tensor.detach()
        raise ValueError(f"{index.fqn!r}: no tile at {index.offset} is held here; there are {self._local_shards}")

    # -- calls of torch's functions -----------------------------------------------------------------------------
    @classmethod
    def __torch_function__(cls, func: Function, types: tuple[type, ...], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = first_sharded((*args, *kwargs.values()))
        if first is not None:
            if func in registry.custom_ops:
                return registry.custom_ops[func](types, args, kwargs, first._process_group)
            if registry.has_spec_op(first._sharding_spec, func):
                return registry.dispatch_spec_op(first._sharding_spec, func, types, args, kwargs, first._process_group)
        return registry.default(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Function, types: tuple[type, ...], args: Any = (), kwargs: Any = None) -> Any:
        with reentrant(), with_torch_function():
            return registry.call_generally(func, args, kwargs or {})


def parts_of(value: Any) -> list[torch.Tensor]:
    """Return the plain tensors of a sharded tensor, and a plain one itself."""
    return value._parts if isinstance(value, ShardedTensor) else [value]


def first_sharded(values: Iterable[Any]) -> ShardedTensor | None:
    """Return the first ShardedTensor among arguments, in lists too."""
    for value in values:
        if isinstance(value, ShardedTensor):
            return value
        if isinstance(value, (list, tuple)):
            found = first_sharded(value)
            if found is not None:
                return found
    return None


torch.serialization.add_safe_globals([ShardedTensor])
