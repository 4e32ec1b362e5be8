"""Functions whose operands are gathered whole, with the reason."""

from __future__ import annotations

from shardwise.strategy import Gathered
from shardwise.strategy.registry import gathered, rule

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
