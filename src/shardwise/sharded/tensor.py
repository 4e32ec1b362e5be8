"""ShardedTensor: a tensor cut into tiles of any shape, each held by any rank of a process group.

The wrapper knows every tile; the values of its own tiles are plain tensors, which record the autograd graph. A rank
that owns no tile keeps one empty tensor (`_anchor`) that goes through the same ops, so that it takes part in every
collective of a backward pass.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _remote_device  # type: ignore[attr-defined]

from shardwise.comm.record import Note
from shardwise.move.tiles import TileSet
from shardwise.sharded import registry, remote
from shardwise.sharded.checks import check_spec, check_strided, checked_metadata, checked_properties, wrong_out
from shardwise.sharded.loading import current_process_group
from shardwise.sharded.metadata import (
    MEM_FORMAT_ENCODING,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    as_size,
)
from shardwise.sharded.owners import (
    as_group,
    communication_device,
    is_member,
    rank_of,
    ranks_of,
    shards_of,
)
from shardwise.sharded.shard import Shard
from shardwise.sharded.spec import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec, spec_of
from shardwise.sharded.tiling import plan_between, tiles_of, whole_on

_make_wrapper = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]


def new_tile(size: Sequence[int], device: torch.device, properties: TensorProperties) -> torch.Tensor:
    """A tile with undefined values."""
    tile = torch.empty(size, dtype=properties.dtype, device=device, pin_memory=properties.pin_memory)
    return tile.requires_grad_() if properties.requires_grad else tile


class ShardedTensorBase(torch.Tensor):
    """Metadata and local shards, nothing else: no process group, no ops."""

    _sharding_spec: ShardingSpec
    _metadata: ShardedTensorMetadata
    _local_shards: list[Shard]

    @staticmethod
    def __new__(cls: type, sharding_spec: ShardingSpec, *size: Any, **kwargs: Any) -> Any:
        if not isinstance(sharding_spec, ShardingSpec):
            raise ValueError(f"Expecting ShardingSpec but got: {type(sharding_spec)}")
        properties = checked_properties(
            kwargs.get("dtype"),
            kwargs.get("layout", torch.strided),
            kwargs.get("requires_grad", False),
            kwargs.get("pin_memory", False),
            kwargs.get("memory_format", torch.contiguous_format),
        )
        metadata = sharding_spec.build_metadata(as_size(size), properties)
        return _blank(cls, sharding_spec, metadata)

    def metadata(self) -> ShardedTensorMetadata:
        """What every rank knows: tiles, size, properties."""
        return self._metadata

    def local_shards(self) -> list[Shard]:
        """The shards this rank holds; none where it holds none."""
        return self._local_shards

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls, local_shards: list[Shard], sharded_tensor_metadata: ShardedTensorMetadata, sharding_spec: Any = None
    ) -> Any:
        """From what this rank holds and what everyone knows. No communication: the metadata is taken on trust."""
        metadata = sharded_tensor_metadata
        if not metadata.shards_metadata:
            raise ValueError("shards_metadata must not be empty!")
        check_strided(metadata.tensor_properties)
        spec = spec_of(metadata.shards_metadata) if sharding_spec is None else sharding_spec
        base = _blank(cls, spec, metadata)
        base._local_shards = local_shards
        return base

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"A {cls.__name__} object is being used from c++ while calling {func.__module__}.{func.__name__} but there "
            f"is no custom __torch_dispatch__ implementation for it; use a ShardedTensor"
        )

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._metadata})"

    def __hash__(self) -> int:
        return id(self)


def _blank(cls: type, spec: ShardingSpec, metadata: ShardedTensorMetadata) -> Any:
    """The wrapper without any shards."""
    made: Any = _make_wrapper(cls, metadata.size, dtype=metadata.tensor_properties.dtype, device=_device_of(metadata))
    made._sharding_spec, made._metadata, made._local_shards = spec, metadata, []
    return made


def _device_of(metadata: ShardedTensorMetadata) -> torch.device:
    """The kind of device the tiles are on; the wrapper itself has no memory."""
    first = metadata.shards_metadata[0].placement if metadata.shards_metadata else None
    return first.device() if first is not None else torch.device("cpu")


@dataclass
class ProcessGroupState:
    """Where a tensor was saved."""

    local_rank: int
    global_rank: int
    local_world_size: int
    global_world_size: int

    @staticmethod
    def here(group: Any) -> ProcessGroupState:
        return ProcessGroupState(
            dist.get_rank(group), dist.get_rank(), dist.get_world_size(group), dist.get_world_size()
        )


class ShardedTensor(ShardedTensorBase):
    """A tensor whose tiles live on the ranks of a process group, as a sharding spec says.

    Made on all ranks of the group alike. Any torch op works on it: on the tiles where they allow it, else over a mesh
    layout, where the communication is in the ledger.
    """

    ProcessGroupState = ProcessGroupState
    _process_group: Any
    _init_rrefs: bool = False
    _remote: remote.RemoteShards | None = None
    _tiles_kept: TileSet | None = None
    _empty: torch.Tensor | None = None

    def __init__(
        self,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: Any = None,
        init_rrefs: bool = False,
    ) -> None:
        super().__init__()
        group = as_group(process_group)
        if init_rrefs:
            remote.check_ready(group)
        properties = self._metadata.tensor_properties
        self._local_shards = [
            Shard.fitting(new_tile(shard.shard_sizes, _home(shard), properties), shard)
            for shard in shards_of(dist.get_rank(), self._metadata.shards_metadata, group)
        ]
        self._settle(group, init_rrefs)

    def _settle(self, group: Any, init_rrefs: bool) -> None:
        """The last step of every constructor."""
        self._process_group, self._init_rrefs = group, init_rrefs
        if init_rrefs:
            self._remote = remote.RemoteShards(self, group)

    @staticmethod
    def _made(
        shards: list[Shard],
        metadata: ShardedTensorMetadata,
        spec: ShardingSpec,
        group: Any,
        *,
        tiles: TileSet | None = None,
        empty: torch.Tensor | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """From parts that are known to fit."""
        made = _blank(ShardedTensor, spec, metadata)
        made._local_shards, made._tiles_kept, made._empty = shards, tiles, empty
        made._settle(group, init_rrefs)
        return made

    # -- where it lives -------------------------------------------------------------------------------------
    def sharding_spec(self) -> ShardingSpec:
        """The spec the tiles come from."""
        return self._sharding_spec

    def local_tensor(self) -> torch.Tensor:
        """The one tensor this rank holds."""
        if len(self._local_shards) != 1:
            raise NotImplementedError(
                f"Only single local shard is supported. Number of shards: {len(self._local_shards)}"
            )
        return self._local_shards[0].tensor

    @property
    def _tiles(self) -> TileSet:
        if self._tiles_kept is None:
            self._tiles_kept = tiles_of(self._metadata.shards_metadata, self._process_group)
        return self._tiles_kept

    @property
    def _parts(self) -> list[torch.Tensor]:
        """The plain tensors whose graphs stand for this tensor's: of the local shards, or the empty stand-in."""
        return [shard.tensor for shard in self._local_shards] or [self._anchor]

    @property
    def _anchor(self) -> torch.Tensor:
        if self._empty is None:
            properties = self._metadata.tensor_properties
            home = _device_of(self._metadata)
            if home.type == "cuda":
                home = torch.device("cuda", torch.cuda.current_device())
            self._empty = self._as_empty(new_tile([0], home, properties).detach())
            self._empty.requires_grad_(properties.requires_grad)
        return self._empty

    def _as_empty(self, part: torch.Tensor) -> torch.Tensor:
        """A tensor without elements in the form of a tile."""
        return part.view([0] * max(1, self.dim()))

    def _with_parts(self, parts: Sequence[torch.Tensor]) -> ShardedTensor:
        """The same tiles with other values, of another dtype perhaps."""
        properties = copying.copy(self._metadata.tensor_properties)
        properties.dtype, properties.requires_grad = parts[0].dtype, parts[0].requires_grad
        metadata = ShardedTensorMetadata(self._metadata.shards_metadata, self._metadata.size, properties)
        shards = [Shard(part, shard.metadata) for part, shard in zip(parts, self._local_shards)]
        empty = None if shards else parts[0]
        return ShardedTensor._made(
            shards, metadata, self._sharding_spec, self._process_group, tiles=self._tiles_kept, empty=empty
        )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._parts[0].device

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return self.device.type == "meta"

    def is_pinned(self, device: Any = None) -> bool:  # type: ignore[override]
        """Whether the tiles are in pinned memory."""
        return self._metadata.tensor_properties.pin_memory

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._metadata.size

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._metadata.tensor_properties.dtype

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return self._metadata.tensor_properties.layout

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._metadata.size)

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        """The global size, or that of one dim."""
        size = self._metadata.size
        if dim is None:
            return size
        if not -len(size) <= dim < len(size):
            raise ValueError(
                f"Argument ``dim`` must be within the range of tensor dimensions [{-len(size)}, {len(size)})"
            )
        return size[dim]

    def dim(self) -> int:
        return len(self._metadata.size)

    def numel(self) -> int:
        return self._metadata.size.numel()

    def __len__(self) -> int:
        if not self._metadata.size:
            raise TypeError("len() of a 0-d tensor")
        return self._metadata.size[0]

    def _get_preferred_device(self) -> torch.device:
        """Where tensors must lie for collectives of this tensor's group."""
        return communication_device(self._process_group)

    # -- moving ---------------------------------------------------------------------------------------------
    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: torch.Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the whole value into `out`, given on rank `dst` of the group only. Every rank of the group calls it.

        With `dtype` the values travel as that; with `enforce_dtype` as `out`'s, on the ranks that hold tiles as this
        tensor's own.
        """
        ranks = ranks_of(self._process_group)
        if not 0 <= dst < len(ranks):
            raise ValueError(f"dst={dst} is not a rank of the process group of {len(ranks)} ranks {ranks}")
        me = dist.get_rank(self._process_group)
        wrong = wrong_out(me, dst, self.size(), out)
        plan = plan_between(self._tiles, whole_on(ranks[dst], self.size()), self.dtype.itemsize)
        with torch.no_grad():
            parts = [part.to(dtype) if dtype is not None else part for part in self._parts]
            into = [out] if me == dst and wrong is None and out is not None and out.dtype == parts[0].dtype else None
            got = plan.run(parts, self._process_group, Note("gather"), into=into)
            if wrong is not None:  # after the exchange: the others are not left waiting
                raise ValueError(wrong)
            if me == dst and into is None:
                out.copy_(got[0])  # type: ignore[union-attr]

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Change the tiles, in place: from any spec to any spec, each element that must move once. Differentiable.

        Under `torch.no_grad()` a parameter stays a leaf.
        """
        if not isinstance(resharding_spec, ShardingSpec):
            raise NotImplementedError(f"reshard: expected a ShardingSpec, got {type(resharding_spec).__name__}")
        if resharding_spec == self._sharding_spec:
            return self
        metadata = resharding_spec.build_metadata(self.size(), self._metadata.tensor_properties)
        return self._move_to(tiles_of(metadata.shards_metadata, self._process_group), metadata, resharding_spec)

    def _move_to(
        self, tiles: TileSet, metadata: ShardedTensorMetadata, spec: ShardingSpec, note: Note | None = None
    ) -> ShardedTensor:
        if not is_member(self._process_group):
            raise RuntimeError(
                f"reshard: rank {dist.get_rank()} is not in the tensor's process group; call it on its ranks only"
            )
        flag, leaf = self.requires_grad, self.is_leaf
        plan = plan_between(self._tiles, tiles, self.dtype.itemsize)
        parts = plan.run(self._parts, self._process_group, note or Note("reshard"))
        mine = [metadata.shards_metadata[i] for i in tiles.rows_of(dist.get_rank())]
        parts = [_at_home(part, shard) for part, shard in zip(parts, mine)] or [self._as_empty(parts[0])]
        if flag and leaf and not torch.is_grad_enabled():
            parts = [part.detach().requires_grad_() for part in parts]
        self._local_shards = [Shard.fitting(part, shard) for part, shard in zip(parts, mine)]
        self._empty = None if mine else parts[0]
        self._metadata = ShardedTensorMetadata(metadata.shards_metadata, self.size(), metadata.tensor_properties)
        self._sharding_spec, self._tiles_kept = spec, tiles
        self.__dict__.pop("_grad_kept", None)
        if self._init_rrefs:
            self._remote = remote.RemoteShards(self, self._process_group)
        return self

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format, process_group: Any = None) -> Any:  # type: ignore[override]
        """A copy in CPU memory; itself if it is there already."""
        _check_format(memory_format)
        if all(s.placement.device().type == "cpu" for s in self._metadata.shards_metadata):  # type: ignore[union-attr]
            return self
        return self._on_devices(lambda rank: torch.device("cpu"), process_group, False)

    def cuda(  # type: ignore[override]
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Any = None,
    ) -> ShardedTensor:
        """A copy in CUDA memory, on the current device of each rank."""
        _check_format(memory_format)
        if device is not None:
            device = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
            current = torch.device("cuda", torch.cuda.current_device())
            if device.type != "cuda" or (device.index is not None and device != current):
                raise ValueError(
                    f"Only device without device id (e.g. 'cpu' or 'cuda') is expected for ShardedTensor, but got "
                    f"{device}; the current device is {current}"
                )
        mine = torch.cuda.current_device()
        group = as_group(process_group if process_group is not None else self._process_group)
        indices: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(indices, mine, group=group)
        home = dict(zip(ranks_of(group), indices))
        return self._on_devices(lambda rank: torch.device("cuda", home[rank]), process_group, non_blocking)

    def _on_devices(self, home: Callable[[int], torch.device], process_group: Any, non_blocking: bool) -> ShardedTensor:
        group = self._process_group if process_group is None else process_group
        if ranks_of(group) != ranks_of(self._process_group):
            raise ValueError(
                f"process_group: ranks {ranks_of(group)}, but the tensor lives on {ranks_of(self._process_group)}"
            )
        moved = []
        for shard in self._metadata.shards_metadata:
            rank = rank_of(shard.placement)
            moved.append(ShardMetadata(shard.shard_offsets, shard.shard_sizes, f"rank:{rank}/{home(rank)}"))
        properties = copying.copy(self._metadata.tensor_properties)
        properties.pin_memory = False
        mine = [moved[i] for i in self._tiles.rows_of(dist.get_rank())]
        parts = [part.to(home(dist.get_rank()), non_blocking=non_blocking) for part in self._parts]
        shards = [Shard(part, shard) for part, shard in zip(parts, mine)]
        metadata = ShardedTensorMetadata(moved, self.size(), properties)
        spec = copying.copy(self._sharding_spec)
        if hasattr(spec, "placements"):
            spec.placements = [shard.placement for shard in moved]
        else:
            spec = spec_of(moved)
        return ShardedTensor._made(
            shards, metadata, spec, group, empty=None if shards else parts[0], init_rrefs=self._init_rrefs
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Tensor.to: another dtype, device, or that of another tensor; itself where nothing changes."""
        group = kwargs.pop("process_group", None)
        like = next((a for a in (*args, kwargs.get("other")) if isinstance(a, torch.Tensor)), None)
        if like is not None:
            args = (like.device, like.dtype, *(a for a in args if a is not like))
            kwargs.pop("other", None)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(
            *args, **{k: v for k, v in kwargs.items() if k not in ("copy", "memory_format")}
        )
        copy = kwargs.get("copy", False)
        result: Any = self
        if device is not None and device.type != self.device.type:
            result = (
                result.cpu(process_group=group)
                if device.type == "cpu"
                else result.cuda(device, non_blocking, process_group=group)
            )
        elif device is not None and device.type == "cuda":
            result = result.cuda(device, non_blocking, process_group=group) if device.index is not None else result
        if dtype is not None and dtype != result.dtype:
            result = result._with_parts([part.to(dtype) for part in result._parts])
        return result._with_parts([part.clone() for part in result._parts]) if copy and result is self else result

    # -- autograd: asked of the parts -----------------------------------------------------------------------
    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._parts[0].requires_grad

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedTensor:  # type: ignore[override]
        for part in self._parts:
            part.requires_grad_(requires_grad)
        if self._metadata.tensor_properties.requires_grad != requires_grad:
            properties = copying.copy(self._metadata.tensor_properties)
            properties.requires_grad = requires_grad
            self._metadata = ShardedTensorMetadata(self._metadata.shards_metadata, self._metadata.size, properties)
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self._parts[0].is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return self._parts[0].grad_fn

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._parts[0].retains_grad

    @property
    def _version(self) -> int:  # type: ignore[override]
        return self._parts[0]._version

    @property
    def grad(self) -> ShardedTensor | None:  # type: ignore[override]
        """The gradient, in the same tiles; the same object as long as the tiles' gradients are the same."""
        grads = [part.grad for part in self._parts]
        kept = self.__dict__.get("_grad_kept")
        if kept is not None and len(kept[0]) == len(grads) and all(a is b for a, b in zip(kept[0], grads)):
            return kept[1]
        if all(grad is None for grad in grads):
            return None
        made = self._with_parts([torch.zeros_like(p) if g is None else g for g, p in zip(grads, self._parts)])
        self.__dict__["_grad_kept"] = (grads, made)
        return made

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None and not isinstance(value, ShardedTensor):
            raise TypeError(f"grad: expected a ShardedTensor or None, got {type(value).__name__}")
        if value is not None and value.size() != self.size():
            raise RuntimeError(f"grad: size {list(value.size())} for a tensor of size {list(self.size())}")
        self.__dict__.pop("_grad_kept", None)
        value = None if value is None else value._like(self)
        grads = [None] * len(self._parts) if value is None else value._parts
        for part, grad in zip(self._parts, grads):
            part.grad = grad
        if value is not None:
            self.__dict__["_grad_kept"] = (grads, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> ShardedTensor:  # type: ignore[override]
        return self._with_parts([part.data for part in self._parts])

    @data.setter
    def data(self, value: ShardedTensor) -> None:
        if not isinstance(value, ShardedTensor):
            raise TypeError(f"data: expected a ShardedTensor, got {type(value).__name__}")
        if value.size() != self.size():
            raise RuntimeError(f"data: size {list(value.size())} for a tensor of size {list(self.size())}")
        for part, other in zip(self._parts, value._like(self)._parts):
            part.data = other

    def _like(self, other: ShardedTensor, note: Note | None = None) -> ShardedTensor:
        """This tensor in the tiles of another of its size."""
        if same_tiles(self, other):
            return self
        moved = self._with_parts(self._parts)
        metadata = other._metadata
        own = ShardedTensorMetadata(metadata.shards_metadata, self.size(), self._metadata.tensor_properties)
        return moved._move_to(other._tiles, own, other._sharding_spec, note)

    def backward(
        self, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:  # type: ignore[override]
        """Start a backward pass; every rank of the group calls it."""
        torch.autograd.backward([self], [gradient], retain_graph, create_graph, inputs=inputs)

    def retain_grad(self) -> None:  # type: ignore[override]
        for part in self._parts:
            part.retain_grad()

    def detach_(self) -> ShardedTensor:  # type: ignore[override]
        for part in self._parts:
            part.detach_()
        return self

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:  # type: ignore[override]
        """The hook sees the gradient in this tensor's tiles. Where a rank holds several, it can watch only."""
        if len(self._parts) == 1:

            def on_part(grad: torch.Tensor) -> Any:
                given = hook(self._with_parts([grad]))
                return None if given is None else given._like(self)._parts[0]

            return self._parts[0].register_hook(on_part)

        def on_all(grads: Sequence[torch.Tensor | None]) -> None:
            full = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, self._parts)]
            if hook(self._with_parts(full)) is not None:
                raise RuntimeError(
                    f"register_hook: this rank holds {len(self._parts)} shards, whose gradients come one by one: a "
                    f"hook can watch them but not replace them; hook local_shards()[i].tensor"
                )

        return torch.autograd.graph.register_multi_grad_hook(self._parts, on_all)

    # -- remote shards --------------------------------------------------------------------------------------
    def remote_shards(self) -> dict[int, list[Any]]:
        """RRefs to the shards of every other rank that holds some, by RPC rank."""
        if not self._init_rrefs or self._remote is None:
            raise RuntimeError("ShardedTensor created with init_rrefs=False, no RRefs to remote shards available")
        return self._remote.rrefs(self._tiles.ranks.tolist())

    # -- copies ---------------------------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:  # type: ignore[override]
        if id(self) in memo:
            return memo[id(self)]
        parts = [part.detach().clone().requires_grad_(part.requires_grad) for part in self._parts]
        result = self._with_parts(parts)
        result._init_rrefs = False
        memo[id(self)] = result
        if getattr(self, "_is_param", False):
            result._is_param = True  # type: ignore[attr-defined]
        return result

    def __getstate__(self) -> tuple[Any, ...]:
        state = ProcessGroupState.here(self._process_group)
        shards = [Shard(_owned_memory(shard.tensor), shard.metadata) for shard in self._local_shards]
        return shards, self._metadata, state, self._sharding_spec, self._init_rrefs

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                'Need to initialize default process group using "init_process_group" before loading ShardedTensor'
            )
        shards, metadata, saved, spec, init_rrefs = state
        group = current_process_group()
        now = ProcessGroupState.here(group)
        for name, text in (
            ("local_rank", "Local rank"),
            ("global_rank", "Global rank"),
            ("local_world_size", "Local world size"),
            ("global_world_size", "Global world size"),
        ):
            then, here = getattr(saved, name), getattr(now, name)
            if then != here:
                raise RuntimeError(f"{text} at save time was {then}, but at load time was {here}")
        self._local_shards, self._metadata, self._sharding_spec = shards, metadata, spec
        self._settle(group, init_rrefs)

    def __reduce_ex__(self, protocol: Any) -> Any:  # type: ignore[override]
        flags = bool(getattr(self, "_is_param", False))
        return _unpickled, (type(self), self._metadata.size, self.dtype, flags), self.__getstate__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTensor({self._metadata})"

    __hash__ = ShardedTensorBase.__hash__

    # -- torch comes in here --------------------------------------------------------------------------------
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        given = first_sharded((*args, *kwargs.values()))
        if given is not None:
            if func in registry.custom_ops:
                return registry.custom_ops[func](types, args, kwargs, given._process_group)
            if registry.has_spec_op(given._sharding_spec, func):
                return registry.dispatch_spec_op(given._sharding_spec, func, types, args, kwargs, given._process_group)
        return registry.default(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.overrides.enable_reentrant_dispatch(), torch._C._EnableTorchFunction():  # type: ignore[attr-defined]
            return registry.fallback[0](func, args, kwargs or {})

    # -- from parts -----------------------------------------------------------------------------------------
    @classmethod
    def _init_from_local_shards_and_global_metadata(  # type: ignore[override]
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: Any = None,
        init_rrefs: bool = False,
        sharding_spec: Any = None,
    ) -> ShardedTensor:
        """From what this rank holds and what everyone knows. No communication; what can be checked here is."""
        group = as_group(process_group)
        if init_rrefs:
            remote.check_ready(group)
        metadata = checked_metadata(local_shards, sharded_tensor_metadata, group)
        if sharding_spec is not None:
            check_spec(sharding_spec, metadata)
        spec = spec_of(metadata.shards_metadata) if sharding_spec is None else sharding_spec
        return cls._made(local_shards, metadata, spec, group, init_rrefs=init_rrefs)

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: torch.Tensor,
        sharding_spec: ShardingSpec,
        *global_size: Any,
        process_group: Any = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """From the one tensor this rank holds (its own is ignored where it owns no tile). No communication."""
        if not isinstance(local_tensor, torch.Tensor):
            raise TypeError(f"local_tensor: expected a torch.Tensor, got {type(local_tensor).__name__}")
        if local_tensor.layout != torch.strided or not local_tensor.is_contiguous():
            raise ValueError(
                f"local_tensor is not a contiguous Tensor. It has layout {local_tensor.layout}; call contiguous() first"
            )
        group = as_group(process_group)
        if init_rrefs:
            remote.check_ready(group)
        properties = TensorProperties.create_from_tensor(local_tensor)
        metadata = sharding_spec.build_metadata(as_size(global_size), properties)
        mine = shards_of(dist.get_rank(), metadata.shards_metadata, group)
        if len(mine) > 1:
            raise ValueError(
                f"sharding_spec gives rank {dist.get_rank()} {len(mine)} shards, but local_tensor is one; use "
                f"init_from_local_shards"
            )
        shards = [Shard(local_tensor, shard) for shard in mine]
        return cls._made(shards, metadata, sharding_spec, group, init_rrefs=init_rrefs)


# -- helpers ---------------------------------------------------------------------------------------------------
def first_sharded(values: Any) -> ShardedTensor | None:
    """The first ShardedTensor among arguments, in lists too."""
    for value in values:
        if isinstance(value, ShardedTensor):
            return value
        if isinstance(value, (list, tuple)):
            found = first_sharded(value)
            if found is not None:
                return found
    return None


def same_tiles(one: ShardedTensor, other: ShardedTensor) -> bool:
    """Whether two tensors have the same tiles on the same ranks, in the same order, and share a process group."""
    if one._metadata.shards_metadata is other._metadata.shards_metadata:
        return True
    if ranks_of(one._process_group) != ranks_of(other._process_group):
        return False
    a, b = one._tiles, other._tiles
    return (
        len(a.ranks) == len(b.ranks)
        and bool((a.ranks == b.ranks).all())
        and a.boxes.starts.shape == b.boxes.starts.shape
        and bool((a.boxes.starts == b.boxes.starts).all() and (a.boxes.ends == b.boxes.ends).all())
    )


def _home(shard: ShardMetadata) -> torch.device:
    return shard.placement.device()  # type: ignore[union-attr]


def _at_home(part: torch.Tensor, shard: ShardMetadata) -> torch.Tensor:
    home = _home(shard)
    return part if part.device == home else part.to(home)


def _check_format(memory_format: torch.memory_format) -> None:
    if memory_format not in (torch.preserve_format, torch.contiguous_format):
        raise RuntimeError(
            f"Only `torch.contiguous_format` or `torch.preserve_format` is supported, got memory_format={memory_format}"
        )


def _owned_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is saved: a leaf, with no memory but its own behind it."""
    flag, tensor = tensor.requires_grad, tensor.detach()
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        tensor = tensor.clone()
    return tensor.requires_grad_(flag)


def _unpickled(cls: type, size: torch.Size, dtype: torch.dtype, is_param: bool) -> Any:
    """The wrapper that `__setstate__` fills."""
    made: Any = _make_wrapper(cls, size, dtype=dtype)
    made._local_shards = []
    if is_param:
        made._is_param = True
    return made


# What a pickled tensor is made of: torch.load(weights_only=True) may build these.
torch.serialization.add_safe_globals(
    [
        _unpickled,
        ShardedTensor,
        ProcessGroupState,
        Shard,
        ShardMetadata,
        ShardedTensorMetadata,
        TensorProperties,
        MEM_FORMAT_ENCODING,
        ChunkShardingSpec,
        EnumerableShardingSpec,
        _remote_device,
    ]
)
