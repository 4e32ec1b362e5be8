"""Checkpoints beside transformers: `from_pretrained` reads what `save` writes, `load` what `save_pretrained` writes."""

import pytest
import torch

from shardwise import Shard, checkpoint, distribute_tensor, simulate
from shardwise.checkpoint.opening import open_source

transformers = pytest.importorskip("transformers")
ROTARY = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**ROTARY, tie_word_embeddings=False)),
    "llama, tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**ROTARY, tie_word_embeddings=True)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=101, n_positions=32, n_embd=24, n_layer=2, n_head=4)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**ROTARY, num_local_experts=3, tie_word_embeddings=False)
    ),
}


def cut(shape, dim, dtype=torch.float32):
    return distribute_tensor(torch.zeros(shape, dtype=dtype), simulate(5), [Shard(dim)])


def same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("most", [1 << 30, 8000])
@pytest.mark.parametrize("format", ["safetensors", "shardwise"])
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_reads_what_a_distributed_model_saved(tmp_path, name, format, most):
    model = MODELS[name]()
    state = {
        key: distribute_tensor(x.clone(), simulate(5), [Shard(x.dim() - 1)]) for key, x in model.state_dict().items()
    }
    checkpoint.save(tmp_path, state, format=format, max_file_bytes=most)
    model.config.save_pretrained(tmp_path)
    found, told = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert same(found, model)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]


@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2"])
def test_their_files_load_into_their_model(tmp_path, name):
    model, blank = MODELS[name](), MODELS[name]()
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    checkpoint.load(tmp_path, blank)
    assert same(blank, model)


@pytest.mark.parametrize("name", MODELS)
def test_presets_there_and_back(tmp_path, name):
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "published", max_shard_size="8KB")
    table = checkpoint.preset(name.split(",")[0], heads=4, kv_heads=2)
    files = open_source(tmp_path / "published").entries
    program = {key: cut(made.entry.shape, 0) for key, made in table.apply(files).items()}
    checkpoint.load(tmp_path / "published", program, map=table)
    checkpoint.save(tmp_path / "program", program)
    back = {key: cut(entry.shape, len(entry.shape) - 1) for key, entry in files.items()}
    checkpoint.load(tmp_path / "program", back, map=table.inverse)
    checkpoint.save(tmp_path / "back", back, format="safetensors")
    model.config.save_pretrained(tmp_path / "back")
    assert same(type(model).from_pretrained(tmp_path / "back"), model)
