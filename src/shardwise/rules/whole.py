"""Functions whose operands are gathered whole, with the reason, and those that cannot be done at all."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F

from shardwise.errors import RuleError
from shardwise.layout.layout import dense_stride
from shardwise.strategy import Answer, Gathered, Operand, Tensor
from shardwise.strategy.registry import gathered, program, rule
from shardwise.wrapper import rebind

_REASONS = {
    "linspace logspace": "its ends are two numbers",
    "_scaled_mm _scaled_mm_v2": "its scales belong to blocks",
    "hash_tensor": "a hash is of the bytes in their order",
    "segment_reduce": "segments may lie across ranks",
    "_histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors": "the bins depend on all points",
    "aten::embedding_bag aten::stft aten::unique_consecutive": "it takes and gives other things than torch's function",
    "linalg_lstsq": "what it returns depends on the rank of every matrix",
}
for _names, _reason in _REASONS.items():
    gathered(_names, f"gather, since {_reason}, and compute it on every rank")
gathered("_pad_packed_sequence", _PACKED := "gather, since its steps differ in size, and compute it on every rank")
rule("lstm gru rnn_tanh rnn_relu")(lambda x, sizes, *_: Gathered(_PACKED) if getattr(sizes, "ndim", 3) == 1 else None)


@rule("aten::as_strided aten::as_strided_copy aten::as_strided_scatter")
def as_strided(x: Operand, *args: object, **kwargs: object) -> Gathered:
    """Reads memory, which a gathered tensor has as on one device if that has no holes."""
    stride, dense = x.layout.stride, dense_stride(x.shape, x.layout.stride)
    replicated = all(p.is_replicate() for p in x.layout.placements)
    if not replicated and any(n > 1 and a != b for n, a, b in zip(x.shape, stride, dense, strict=True)):
        raise RuleError(
            f"as_strided of a tensor of shape {x.shape} with strides {stride} reads memory that is not part of it, and "
            f"a distributed tensor has none; use as_strided on its .contiguous(), or slices"
        )
    return Gathered("gather, since it reads memory, and compute it on every rank", _is_no_part)


def _is_no_part(x: Tensor, *args: Any, storage_offset: Any = None, **kwargs: object) -> None:
    """Raise if a storage offset is given for a part of another tensor: it counts from the start of that one."""
    has_offset = storage_offset is not None or any(isinstance(a, int) for a in args)
    if not has_offset or all(p.is_replicate() for p in x.placements):
        return
    if any(v.untyped_storage().nbytes() != v.numel() * v.itemsize for v in x._layout.mesh.comm.values(x._local)):
        raise RuleError(
            f"as_strided with a storage offset, of a tensor of shape {tuple(x.shape)} that is part of another: the "
            f"memory of the other is on many ranks; leave out the offset, or use as_strided on x.clone()"
        )


program("as_strided_", writes=True)(lambda x, *args, **kwargs: rebind(x, x.as_strided(*args, **kwargs)))


@program("resize resize_as", writes=True)
def resize(x: Tensor, *size: Any, **kwargs: object) -> Tensor:
    """The elements in the order of memory, as far as there is room; after them zeros, where torch leaves anything."""
    if x.requires_grad:
        raise RuntimeError("cannot resize variables that require grad")
    wanted = tuple(getattr(size[0], "shape", size[0]) if len(size) == 1 and not isinstance(size[0], int) else size)
    if wanted == tuple(x.shape):
        return x
    stride, room = x._layout.stride, math.prod(wanted)
    if stride != dense_stride(x.shape, stride):
        raise RuleError(
            f"resize_ of a distributed tensor from {tuple(x.shape)} to {wanted}: it is part of another; use reshape, "
            f"F.pad or a new tensor"
        )
    flat = x.permute(sorted(range(x.dim()), key=lambda d: -stride[d])).reshape(-1)
    return rebind(x, F.pad(flat, (0, room - flat.numel())).reshape(wanted))


@rule("set_")
def refused(x: Operand, *args: object, **kwargs: object) -> Answer:
    raise RuleError("set_ gives a tensor other memory, and that of this one is on many ranks; use x.data = y")
