"""Tables between names: every line and every preset, there and back."""

import pytest
import torch

from shardwise import Shard, checkpoint, distribute_tensor, simulate
from shardwise.checkpoint import CheckpointError, Map, drop, join, preset, rename, split, stack, transpose
from shardwise.checkpoint.files import Entry
from shardwise.checkpoint.opening import open_source

LLAMA = {"model.embed_tokens.weight": (11, 6), "lm_head.weight": (11, 6)}
MIXTRAL = dict(LLAMA)
GPT2 = {"wte.weight": (11, 6), "h.0.ln_1.bias": (6,)}
for i in range(2):
    attention = {f"model.layers.{i}.self_attn.{x}_proj.weight": (n, 6) for x, n in (("q", 6), ("k", 3), ("v", 3), ("o", 6))}
    LLAMA |= attention | {f"model.layers.{i}.mlp.{x}_proj.weight": (8, 6) for x in ("gate", "up")} | {f"model.layers.{i}.mlp.down_proj.weight": (6, 8)}
    MIXTRAL |= attention | {f"model.layers.{i}.block_sparse_moe.experts.{e}.{w}.weight": (4, 6) for e in range(3) for w in ("w1", "w2", "w3")}
    GPT2 |= {f"h.{i}.attn.c_attn.weight": (6, 18), f"h.{i}.attn.c_attn.bias": (18,), f"h.{i}.mlp.c_fc.weight": (6, 24), f"h.{i}.mlp.c_proj.weight": (24, 6)}

CASES = {
    "llama": (LLAMA, preset("llama", heads=2, kv_heads=1)),
    "llama under a name": (LLAMA, preset("llama", heads=2, kv_heads=1, prefix="net.")),
    "mixtral": (MIXTRAL, preset("mixtral", heads=2, kv_heads=1)),
    "gpt2": (GPT2, preset("gpt2")),
    "split": ({"w": (9, 4)}, Map([split("w", ["a", "b"], dim=1, sizes=(3, 1))])),
    "stack in the middle": ({f"w{e}": (2, 3) for e in range(4)}, Map([stack("w{e}", "w", over="e", dim=1)])),
    "transpose": ({"w": (2, 3, 4)}, Map([transpose("w", "v", order=(2, 0, 1))])),
}


def values(shapes):
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def mapped(path, table, tmp_path):
    """The whole tensors after a table, by a load."""
    source = open_source(path)
    made = table.apply(source.entries)
    into = {name: torch.zeros(m.entry.shape) for name, m in made.items()}
    checkpoint.load(path, into, map=table)
    return into


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(tmp_path, case, monkeypatch):
    monkeypatch.setattr("shardwise.checkpoint.blocks.LEAST_BLOCK", 40)
    shapes, table = CASES[case]
    files = values(shapes)
    checkpoint.save(tmp_path / "files", files, format="shardwise")
    program = mapped(tmp_path / "files", table, tmp_path)
    assert {name: tuple(x.shape) for name, x in program.items()} != shapes
    checkpoint.save(tmp_path / "program", program)
    back = mapped(tmp_path / "program", table.inverse, tmp_path)
    assert back.keys() == files.keys()
    assert all(torch.equal(back[name], value) for name, value in files.items())


def test_what_lines_say(tmp_path):
    q, k, v = torch.randn(4, 6), torch.randn(2, 6), torch.randn(2, 6)
    experts = torch.randn(3, 5, 2)
    files = {"h.0.q": q, "h.0.k": k, "h.0.v": v, "h.0.o": torch.randn(3, 4), "junk": torch.ones(1)}
    files |= {f"h.0.e.{i}": experts[i].clone() for i in range(3)}
    checkpoint.save(tmp_path / "c", files)
    table = Map(
        [
            join(["h.{i}.q", "h.{i}.k", "h.{i}.v"], "l.{i}.qkv"),
            stack("h.{i}.e.{e}", "l.{i}.experts", over="e"),
            transpose("h.{i}.o", "l.{i}.out"),
            drop("junk"),
            rename("h.{i}.{rest*}", "l.{i}.{rest*}"),
        ],
        dtype=torch.float64,
    )
    mesh = simulate(3)
    zeros = lambda *shape, dim: distribute_tensor(torch.zeros(shape, dtype=torch.float64), mesh, [Shard(dim)])  # noqa: E731
    into = {"l.0.qkv": zeros(8, 6, dim=0), "l.0.experts": zeros(3, 5, 2, dim=1), "l.0.out": zeros(4, 3, dim=0)}
    checkpoint.load(tmp_path / "c", into, map=table)
    assert torch.equal(into["l.0.qkv"].full_tensor(), torch.cat([q, k, v]).double())
    assert torch.equal(into["l.0.experts"].full_tensor(), experts.double())
    assert torch.equal(into["l.0.out"].full_tensor(), files["h.0.o"].t().double())


def test_dims_counted_from_the_end(tmp_path):
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    checkpoint.save(tmp_path / "c", {"a": a, "b": b, "e.0": a, "e.1": b, "w": torch.cat([a, b], 1)})
    lines = [join(["a", "b"], "ab", dim=-1), stack("e.{i}", "e", over="i", dim=-1), split("w", ["x", "y"], dim=-1)]
    into = {"ab": torch.zeros(2, 6), "e": torch.zeros(2, 3, 2), "x": torch.zeros(2, 3), "y": torch.zeros(2, 3)}
    checkpoint.load(tmp_path / "c", into, map=Map(lines))
    assert torch.equal(into["ab"], torch.cat([a, b], -1)) and torch.equal(into["e"], torch.stack([a, b], -1))
    assert torch.equal(into["x"], a) and torch.equal(into["y"], b)
    checkpoint.save(tmp_path / "d", into)
    back = {"a": a * 0, "b": a * 0, "e.0": a * 0, "e.1": a * 0, "w": torch.zeros(2, 6)}
    checkpoint.load(tmp_path / "d", back, map=Map(lines).inverse)
    assert torch.equal(back["b"], b) and torch.equal(back["e.1"], b) and torch.equal(back["w"], into["ab"])


def test_casts_keep_numbers(tmp_path):
    """The count of steps of an optimizer would be rounded in float16. Values keep their names."""
    saved = {"step": torch.tensor(5001.0), "scale": torch.tensor(1.5), "w": torch.ones(2)}
    checkpoint.save(tmp_path / "c", {"a": saved, "l": [1, 2], "t": (1, "x"), "n": 3})
    inner = {"step": torch.tensor(0.0), "scale": torch.tensor(0.0).half(), "w": torch.zeros(2).half()}
    into = {"b": inner, "l": [0], "t": (0, ""), "n": 0}
    checkpoint.load(tmp_path / "c", into, map=Map([rename("a.{rest*}", "b.{rest*}")], dtype=torch.half))
    assert inner["step"] == 5001 and inner["scale"] == 1.5 and inner["w"].tolist() == [1, 1]
    assert into["l"] == [1, 2] and into["t"] == (1, "x") and into["n"] == 3


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([join(["a", "b"], "ab", dim=2)], "there is no dim 2 to join, split or stack 'a' along: 2 dims"),
        ([join(["a", "missing"], "ab")], "'missing' is missing, which 'ab' is made of"),
        ([join(["a", "b"], "ab")], r"'a' \(torch.float32, \(2, 3\)\) and 'b' .* cannot be one tensor"),
        ([rename("a", "b")], "two tensors would be called 'b'"),
        ([split("a", ["x", "y"], dim=1)], r"dim 1 of 'a' has 3 indices, which shares \(1, 1\) do not divide"),
        ([transpose("a", order=(2, 1, 0))], "has no dims"),
    ],
)
def test_what_does_not_fit(lines, text):
    entries = {"a": Entry("a", torch.float32, (2, 3)), "b": Entry("b", torch.float32, (2, 4))}
    with pytest.raises(CheckpointError, match=text):
        Map(lines).apply(entries)


def test_bad_lines():
    with pytest.raises(CheckpointError, match="same names in braces"):
        rename("h.{i}.a", "h.{j}.a")
    with pytest.raises(CheckpointError, match="give a share"):
        join(["a", "b"], "c", sizes=(1,))
    with pytest.raises(CheckpointError, match="there are llama, gpt2, mixtral"):
        preset("bert")
