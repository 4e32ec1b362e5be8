"""Modules with every parameter and buffer laid out at random: outputs, gradients and buffers as on one device."""

import copy
import random

import pytest
import torch
from torch import nn

from shardwise import simulate
from shardwise.testing import spread_out
from tests.values import compare, layouts_of, seeded

MODULES = {
    "linear": (lambda: nn.Linear(6, 4), [(3, 5, 6)]),
    "batch norm": (lambda: nn.BatchNorm1d(6), [(5, 6)]),
    "batch norm 2d": (lambda: nn.BatchNorm2d(3), [(2, 3, 4, 4)]),
    "batch norm eval": (lambda: nn.BatchNorm1d(6).eval(), [(5, 6)]),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), [(2, 3, 5)]),
    "group norm": (lambda: nn.GroupNorm(2, 6), [(4, 6, 3)]),
    "rnn": (lambda: nn.RNN(6, 5, 2), [(4, 3, 6)]),
    "gru": (lambda: nn.GRU(6, 5, bidirectional=True), [(4, 3, 6)]),
    "lstm": (lambda: nn.LSTM(6, 5, 2, batch_first=True), [(4, 3, 6)]),
    "gru cell": (lambda: nn.GRUCell(6, 5), [(4, 6), (4, 5)]),
    "lstm cell": (lambda: nn.LSTMCell(6, 5), [(4, 6)]),
    "attention": (lambda: nn.MultiheadAttention(6, 3), [(4, 2, 6)] * 3),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0), [(4, 2, 6)]),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(6, 2, 8, dropout=0.0), [(4, 2, 6), (3, 2, 6)]),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)), [(2, 3, 6, 6)]),
    "bilinear": (lambda: nn.Bilinear(4, 5, 3), [(6, 4), (6, 5)]),
    "activations": (lambda: nn.Sequential(nn.Linear(6, 6), nn.SiLU(inplace=True), nn.ELU(inplace=True)), [(5, 6)]),
}


def lay_out(module, mesh, shape, generator):
    for sub in module.modules():
        for name, value in list(sub._parameters.items()):
            if value is not None:
                places = layouts_of(value, shape, generator, partial=False)
                setattr(sub, name, nn.Parameter(spread_out(value.detach(), mesh, places)))
        for name, value in list(sub._buffers.items()):
            if value is not None:
                places = layouts_of(value, shape, generator, partial=False)
                sub._buffers[name] = spread_out(value, mesh, places)
    return module


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_module(name, mesh):
    make, shapes = MODULES[name]
    generator, world = random.Random(len(name)), simulate(mesh)
    for _ in range(3):
        torch.manual_seed(0)
        module = make().double()
        mine = lay_out(copy.deepcopy(module), world, mesh, generator)
        inputs = [t.requires_grad_() for t in seeded(*shapes)]
        given = [spread_out(t.detach(), world, layouts_of(t, mesh, generator), requires_grad=True) for t in inputs]
        want, got = module(*inputs), mine(*given)
        want, got = (want[0], got[0]) if isinstance(want, tuple) else (want, got)
        compare(got, want, name, 1e-9)
        want.square().sum().backward()
        got.square().sum().backward()
        for (key, m), (_, w) in zip(mine.named_parameters(), module.named_parameters(), strict=True):
            if w.grad is not None:
                compare(m.grad, w.grad, f"{name}: gradient of {key}", 1e-8)
        for m, w in zip(given, inputs, strict=True):
            compare(m.grad, w.grad, f"{name}: gradient of an input", 1e-8)
        for (key, m), (_, w) in zip(mine.named_buffers(), module.named_buffers(), strict=True):
            compare(m, w, f"{name}: buffer {key}", 1e-9)
