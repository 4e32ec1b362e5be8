"""Models of several families, small, each laid out on a mesh with the axes "dp" and "tp": a function that gives a step."""

import torch
import torch.nn.functional as F
from torch import nn

from shardwise import Replicate, Shard, distribute_module, distribute_tensor
from shardwise.parallel import (
    ColwiseParallel,
    MixedPrecisionPolicy,
    RowwiseParallel,
    data_parallel,
    fully_shard,
    parallelize_module,
)

BATCH = [Shard(0), Replicate()]  # rows over dp


def given(mesh, *shape, dtype=torch.float32, high=None):
    """Input with the batch cut over dp."""
    n = torch.Size(shape).numel()
    values = torch.arange(n) % high if high else torch.linspace(-1, 1, n)
    return distribute_tensor(values.view(shape).to(dtype), mesh, BATCH, src_data_rank=None)


def trained(model, loss_of):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class ViT(nn.Module):
    def __init__(self, width=16, heads=4, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.start, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 17, width))
        layer = nn.TransformerEncoderLayer(width, heads, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.start.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.encoder(x)[:, 0])


def vit(mesh):
    model = distribute_module(ViT(), mesh)
    images, classes = given(mesh, 6, 3, 16, 16), given(mesh, 6, 1, dtype=torch.int64, high=10).squeeze(1)
    return trained(model, lambda model: F.cross_entropy(model(images), classes))


def vit_fully_sharded(mesh):
    model = ViT()
    for layer in model.encoder.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    images, classes = torch.ones(3, 3, 16, 16), torch.zeros(3, dtype=torch.int64)
    return trained(model, lambda model: F.cross_entropy(model(images), classes))


def _convolution(before, after):
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.down = _convolution(1, width), _convolution(width, 2 * width)
        self.bottom, self.up = _convolution(2 * width, 2 * width), nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.joined, self.last = _convolution(2 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, images):
        fine = self.first(images)
        coarse = self.bottom(self.down(F.max_pool2d(fine, 2)))
        rough = F.interpolate(coarse.mean(1, keepdim=True), scale_factor=2, mode="nearest")
        return self.last(self.joined(torch.cat([fine, self.up(coarse)], 1))) + rough


def unet(mesh):
    """Rows of the batch over dp, rows of the images over tp: convolutions exchange borders."""
    model = distribute_module(UNet(), mesh)
    images = distribute_tensor(torch.ones(4, 1, 16, 8), mesh, [Shard(0), Shard(2)], src_data_rank=None)
    return trained(model, lambda model: F.mse_loss(model(images), images))


class DLRM(nn.Module):
    def __init__(self, tables=3, rows=50, width=8):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, width))
        n = tables + 1
        self.top = nn.Sequential(nn.Linear(width + n * n, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, sparse):
        x = self.dense(dense)
        together = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        pairs = (together @ together.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, pairs], 1)).squeeze(1)


def dlrm(mesh):
    """Rows of the tables over tp, the batch over dp."""

    def place(name, module, mesh):
        if isinstance(module, nn.EmbeddingBag):
            cut = distribute_tensor(module.weight.detach(), mesh, [Replicate(), Shard(0)], src_data_rank=None)
            module.register_parameter("weight", nn.Parameter(cut))

    model = distribute_module(DLRM(), mesh, place)
    dense, sparse = given(mesh, 6, 5), given(mesh, 6, 3, 4, dtype=torch.int64, high=50)
    clicks = given(mesh, 6, 1).squeeze(1)
    return trained(model, lambda model: F.binary_cross_entropy_with_logits(model(dense, sparse), clicks.clamp(0, 1)))


FAMILIES = {build.__name__: build for build in (vit, vit_fully_sharded, unet, dlrm)}


# -- Hugging Face ------------------------------------------------------------------------------------------------------
SMALL = {"vocab_size": 64, "use_cache": False}
LLAMA = SMALL | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
STYLES = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
STYLES |= {f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
STYLES |= {"model.layers.*.self_attn.o_proj": RowwiseParallel(), "model.layers.*.mlp.down_proj": RowwiseParallel()}


def _next_token(model, batch=2, length=8):
    tokens = (torch.arange(batch * length) % 64).view(batch, length)

    def loss_of(model):
        logits = model(input_ids=tokens).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    return trained(model, loss_of)


def _causal(config, attention="sdpa"):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def hugging_face_gpt(mesh):
    from transformers import GPT2Config

    config = GPT2Config(**SMALL, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    model = data_parallel(_causal(config), mesh["dp"], "parameters", unit_bytes=1)
    return _next_token(model)


def hugging_face_llama(mesh):
    from transformers import LlamaConfig

    model = parallelize_module(_causal(LlamaConfig(**LLAMA)), mesh["tp"], STYLES)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return _next_token(fully_shard(model, mesh=mesh["dp"]))


def hugging_face_mixtral(mesh):
    from transformers import MixtralConfig

    config = MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2)
    model, policy = _causal(config), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    return _next_token(fully_shard(model, mesh=mesh["dp"], mp_policy=policy))


HUGGING_FACE = {build.__name__: build for build in (hugging_face_gpt, hugging_face_llama, hugging_face_mixtral)}
