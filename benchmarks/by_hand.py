"""The GPT of `gpt_step.py`, tensor-parallel by hand: plain local modules and `all_reduce`, without a library.

What is slower than this pays for a wrapper; what is faster has more than plain torch's eager mode.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class CopyIn(torch.autograd.Function):
    """Into the column-parallel layers: the gradient is summed."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class SumOut(torch.autograd.Function):
    """Out of the row-parallel layers: the value is summed."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class HandBlock(nn.Module):
    """A block as Megatron cuts it, written down by hand: one copy in and one sum out for each half."""

    def __init__(self, block, rank, parts):
        super().__init__()
        self.heads = block.heads // parts
        self.norm1, self.norm2 = block.norm1, block.norm2
        self.qkv = nn.ModuleList(self.columns(layer, rank, parts) for layer in block.qkv)
        self.up = self.columns(block.up, rank, parts)
        self.project, self.down = self.rows(block.project, rank, parts), self.rows(block.down, rank, parts)

    @staticmethod
    def columns(layer, rank, parts):
        layer.weight = nn.Parameter(layer.weight.detach().chunk(parts)[rank].clone())
        layer.bias = nn.Parameter(layer.bias.detach().chunk(parts)[rank].clone())
        return layer

    @staticmethod
    def rows(layer, rank, parts):
        layer.weight = nn.Parameter(layer.weight.detach().chunk(parts, 1)[rank].clone())
        return layer

    def forward(self, x):
        y = CopyIn.apply(self.norm1(x))
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + SumOut.apply(F.linear(y, self.project.weight)) + self.project.bias
        y = F.gelu(self.up(CopyIn.apply(self.norm2(x))))
        return x + SumOut.apply(F.linear(y, self.down.weight)) + self.down.bias


def cut_by_hand(model, rank, parts):
    """Leave this rank's part of a GPT in it."""
    model.blocks = nn.Sequential(*(HandBlock(block, rank, parts) for block in model.blocks))
    return model
