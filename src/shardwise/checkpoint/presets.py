"""Tables for well-known models: from the files that others publish to modules that hold fused or stacked weights."""

from __future__ import annotations

from shardwise.checkpoint.map_lines import join, rename, stack, transpose
from shardwise.checkpoint.mapping import Map
from shardwise.errors import CheckpointError

PRESETS = ("llama", "gpt2", "mixtral")


def preset(name: str, *, prefix: str = "", heads: int = 1, kv_heads: int | None = None) -> Map:
    """Return a table of names by its own name.

    "llama": `q_proj`, `k_proj` and `v_proj` are one `qkv_proj`; `gate_proj` and `up_proj` one `gate_up_proj`.
    "gpt2": `c_attn`, `c_proj` and `c_fc`, which are stored (in, out), as `nn.Linear` has them.
    "mixtral": attention as of "llama", and the experts' `w1`, `w2` and `w3` stacked.

    Args:
        name: One of the names above.
        prefix: What stands before all names on the program's side, as "model." in `{"model": model}`.
        heads: Heads of queries: what share of `qkv_proj` is theirs on the way back.
        kv_heads: Heads of keys and of values; as many by default.

    Raises:
        CheckpointError: There is no table of this name.
    """
    if name not in PRESETS:
        raise CheckpointError(f"preset: {name!r} is not known; there are {', '.join(PRESETS)}")
    kv = heads if kv_heads is None else kv_heads
    if name == "gpt2":
        lines = []
        for stem in ("", "transformer."):
            for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
                full = f"{stem}h.{{i}}.{part}.weight"
                lines.append(transpose(full, prefix + full))
    else:
        layer = "model.layers.{i}."
        lines = []
        for kind in ("weight", "bias"):
            parts = [f"{layer}self_attn.{x}_proj.{kind}" for x in "qkv"]
            lines.append(join(parts, f"{prefix}{layer}self_attn.qkv_proj.{kind}", sizes=(heads, kv, kv)))
        if name == "llama":
            parts = [f"{layer}mlp.{x}_proj.weight" for x in ("gate", "up")]
            lines.append(join(parts, f"{prefix}{layer}mlp.gate_up_proj.weight"))
        else:
            experts = layer + "block_sparse_moe.experts."
            for w in ("w1", "w2", "w3"):
                lines.append(stack(f"{experts}{{e}}.{w}.weight", f"{prefix}{experts}{w}", over="e"))
    if prefix:
        lines.append(rename("{rest*}", prefix + "{rest*}"))
    return Map(lines)
