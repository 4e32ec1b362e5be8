"""Train Hugging Face models on a mesh with a plan of a few lines, next to one device; their code is not changed.

    pip install transformers
    python examples/huggingface.py                              4 simulated ranks in this process
    torchrun --nproc-per-node 4 examples/huggingface.py         4 real processes (gloo)

Both models are made from a small config with random weights: nothing is downloaded. "tp" cuts heads, hidden layers and
the vocabulary as the plan says; "dp" cuts the batch and, in the layout "zero x tensor", parameters and optimizer state.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside import beside, join, report
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import shardwise
from shardwise import Replicate, Shard, distribute_module, distribute_tensor
from shardwise.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from shardwise.testing import in_double

COLUMNS, ROWS, TABLE = ColwiseParallel(), RowwiseParallel(), RowwiseParallel(input_layouts=Replicate())

LLAMA_PLAN = {
    "model.embed_tokens": TABLE,
    "model.layers.*.self_attn.[qkv]_proj": COLUMNS,
    "model.layers.*.self_attn.o_proj": ROWS,
    "model.layers.*.mlp.gate_proj": COLUMNS,
    "model.layers.*.mlp.up_proj": COLUMNS,
    "model.layers.*.mlp.down_proj": ROWS,
    "lm_head": COLUMNS,
}
GPT2_PLAN = {  # its layers keep their weights transposed; query, key and value are one layer; table and head are tied
    "transformer.wte": TABLE,
    "transformer.h.*.attn.c_attn": ColwiseParallel(weight_dim=1, parts=3),
    "transformer.h.*.mlp.c_fc": ColwiseParallel(weight_dim=1),
    "transformer.h.*.*.c_proj": RowwiseParallel(weight_dim=0),
    "lm_head": COLUMNS,
}

VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT = 61, 32, 2, 4, 16


def llama():
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2():
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))


MODELS = {"llama": (llama, LLAMA_PLAN), "gpt2": (gpt2, GPT2_PLAN)}
LAYOUTS = {"data x tensor": False, "zero x tensor": True}  # whether "dp" cuts the parameters too


def make_mesh():
    make = shardwise.simulate
    if dist.is_initialized():
        make = lambda sizes, axis_names: shardwise.init_device_mesh("cpu", sizes, mesh_dim_names=axis_names)  # noqa: E731
    return make((2, 2), axis_names=("dp", "tp"))


def lay_out(model, mesh, plan, zero):
    distribute_module(parallelize_module(model, mesh, plan, axis="tp"), mesh)
    made = {}  # tied parameters stay tied
    for module in model.modules() if zero else ():
        for name, param in module.named_parameters(recurse=False):
            tp = param.placements[1]
            whole = [
                Shard(dim) for dim in range(param.dim()) if not tp.is_shard(dim)
            ]  # what "tp" leaves for "dp" to cut
            if param not in made:
                dp = whole[0] if whole else Replicate()
                made[param] = nn.Parameter(param.detach().redistribute(placements=[dp, tp]))
            module.register_parameter(name, made[param])
    return model


def train(model, batches, place):
    """The loss of every step, the last gradients and the parameters."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for rows in batches:
        tokens, targets = place(rows[:, :-1].contiguous()), place(rows[:, 1:].contiguous())
        with loss_parallel():
            loss = F.cross_entropy(model(input_ids=tokens, use_cache=False).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [torch.tensor(losses), *(p.grad for p in model.parameters()), *(p.detach() for p in model.parameters())]


def compare(name, layout, mesh, steps=3):
    """The losses on the mesh, how far anything is from one device, and the bytes that a step moved."""
    make, plan = MODELS[name]
    torch.manual_seed(0)
    one = make().double()
    many = lay_out(copy.deepcopy(one), mesh, plan, LAYOUTS[layout])
    batches = [torch.randint(VOCABULARY, (6, CONTEXT + 1)) % (1 + step % 7) for step in range(steps)]

    def place(rows):
        return distribute_tensor(rows, mesh, [Shard(0), Replicate()], src_data_rank=None)

    with in_double():  # Llama's norms compute in float32, whatever the model's dtype: that rounds
        return beside(lambda: train(one, batches, lambda rows: rows), lambda: train(many, batches, place), steps)


def main():
    logging.set_verbosity_error()
    join()
    cases = [(name, layout) for name in MODELS for layout in LAYOUTS]
    results = ((f"{name:6} {layout:14}", compare(name, layout, make_mesh(), steps=6)) for name, layout in cases)
    report(results)


if __name__ == "__main__":
    main()
