"""The GPT of `gpt_step.py`, tensor-parallel by hand: plain local modules and `all_reduce`, without a library.

What is slower than this pays for a wrapper; what is faster has more than plain torch's eager mode.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt_step import GPT, Block
from torch import nn


class _Summed(torch.autograd.Function):
    """The sum over all ranks; gradients pass as they are."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Copied(torch.autograd.Function):
    """The same value on all ranks; gradients are summed."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def _cut(layer, dim):
    """Keep this rank's part of a layer. One that is cut along its inputs keeps its whole bias, which is added once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layer.weight = nn.Parameter(layer.weight.detach().chunk(ranks, dim)[rank].contiguous())
    if dim == 0:
        layer.bias = nn.Parameter(layer.bias.detach().chunk(ranks)[rank].contiguous())


class _CutBlock(Block):
    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.heads //= dist.get_world_size()
        for layer in (*self.qkv, self.up):
            _cut(layer, 0)
        for layer in (self.project, self.down):
            _cut(layer, 1)

    def forward(self, x):
        y = _Copied.apply(self.norm1(x))
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self._joined(self.project, y.transpose(1, 2).flatten(2))
        return x + self._joined(self.down, F.gelu(self.up(_Copied.apply(self.norm2(x)))))

    def _joined(self, layer, x):
        return _Summed.apply(F.linear(x, layer.weight)) + layer.bias


def tensor_parallel(vocabulary, context, width, heads, layers):
    """This rank's part of the model. The same seed gives the values of the whole model."""
    return GPT(vocabulary, context, width, heads, layers, block=_CutBlock)
