"""Programs written for torch.distributed.tensor.parallel, run with both libraries in the same processes.

A program is a function of a namespace (torch's or ours) and a mesh, and returns what it saw."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.tensor
import torch.distributed.tensor.parallel
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel.input_reshard import input_reshard

import shardwise
import shardwise.parallel
from tests.compat.common import compare, line, raises, seeded
from tests.workers import run_ranks

NAMES = ("DTensor", "Partial", "Replicate", "Shard", "distribute_tensor", "distribute_module")


def namespaces():
    theirs, ours = torch.distributed.tensor, shardwise
    both = []
    for library, parallel in ((theirs, theirs.parallel), (ours, ours.parallel)):
        names = {name: getattr(library, name) for name in NAMES}
        names |= {name: getattr(parallel, name) for name in theirs.parallel.__all__}
        both.append(SimpleNamespace(**names, input_reshard=getattr(parallel, "input_reshard", None)))
    both[0].input_reshard = input_reshard
    return both


class MLP(nn.Module):
    def __init__(self, width=8, hidden=12, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, width=8, head=2):
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, mask=None):
        q, k, v = (f(x).view(*x.shape[:2], -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
        return self.o(y.reshape(*y.shape[:2], -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.drop = nn.LayerNorm(8), nn.RMSNorm(8), nn.Dropout(0.0)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x, mask=None):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.drop(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    def __init__(self, layers=2, words=16):
        super().__init__()
        self.words = nn.Embedding(words, 8)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, words, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def filled(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return module


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


def grads(module):
    return {name: None if p.grad is None else whole(p.grad) for name, p in module.named_parameters()}


def placements(module):
    return {name: str(p.placements[0].dim if p.placements[0].is_shard() else p.placements) if hasattr(p, "placements") else "plain" for name, p in module.named_parameters()}  # fmt: skip


# ------------------------------------------------------------------ programs


def columns_and_rows(n):
    seen = []
    for plan, x in (
        ({"up": n.ColwiseParallel(), "down": n.RowwiseParallel()}, seeded(3, 8)),
        ({"up": n.ColwiseParallel(use_local_output=False), "down": n.RowwiseParallel(use_local_output=False)}, seeded(3, 2, 8)),
        ({"up": n.ColwiseParallel(output_layouts=n.Replicate()), "down": n.RowwiseParallel(input_layouts=n.Replicate())}, seeded(1, 8)),
        ({"up": n.ColwiseParallel(input_layouts=n.Shard(0)), "down": n.RowwiseParallel(output_layouts=n.Shard(0))}, seeded(4, 8)),
    ):  # fmt: skip
        for bias in (True, False):
            model = filled(MLP(bias=bias))
            assert n.parallelize_module(model, line(), plan) is model
            given = x.clone().requires_grad_()
            y = model(given)
            y.pow(2).sum().backward()
            seen += [isinstance(y, n.DTensor), whole(y), given.grad, grads(model), placements(model)]
    return seen


def one_style(n):
    linear, table = filled(nn.Linear(8, 4)), filled(nn.Embedding(10, 4))
    n.parallelize_module(linear, line(), n.ColwiseParallel(output_layouts=n.Replicate()))
    n.parallelize_module(table, line(), n.RowwiseParallel(input_layouts=n.Replicate()))
    ids = torch.tensor([[0, 9, 3], [3, 3, 5]])
    y = linear(seeded(2, 8)).sum() + table(ids).pow(2).sum()
    y.backward()
    other = filled(nn.Embedding(6, 8, padding_idx=2))
    n.parallelize_module(other, line(), n.ColwiseParallel(output_layouts=n.Replicate()))
    z = other(ids % 6)
    z.pow(2).sum().backward()
    seen = [y.detach(), z.detach(), *map(grads, (linear, table, other)), *map(placements, (linear, table, other))]
    return seen, [raises(lambda s=s: n.parallelize_module(nn.LayerNorm(4), line(), s), NotImplementedError) for s in (n.ColwiseParallel(), n.RowwiseParallel())]  # fmt: skip


def names_and_wildcards(n):
    seen = []
    col, row = n.ColwiseParallel(), n.RowwiseParallel()
    for plan in (
        {"layers.0.mlp.up": col, "layers.0.mlp.down": row},
        {"layers.*.mlp.up": col, "layers.*.mlp.down": row},
        {"layers.*.attention.[qkv]": col, "layers.*.attention.o": row},
        {"layers.?.mlp.u*": col, "layers.1.m*.down": row},
        {"lay*.1.mlp.up": col},
        {"nowhere": col},
        {"layers.*.nowhere": col, "head": col},
        {"layers.*.mlp.nowhere.up": col},
        {"": n.PrepareModuleInput(input_layouts=n.Replicate(), desired_input_layouts=n.Replicate())},
        {},
        None,
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = n.parallelize_module(filled(Transformer()), line(), plan)
        seen += [placements(model), any("match" in str(w.message) or "plan" in str(w.message) for w in caught)]
    calls = (
        lambda: n.parallelize_module(MLP(), line(), "up"),
        lambda: n.parallelize_module(MLP(), line(), [col]),
        lambda: n.parallelize_module(MLP(), line(), 1),
    )
    with line():
        active = n.parallelize_module(filled(MLP()), parallelize_plan={"up": col})
    return seen, placements(active), [raises(call, TypeError) for call in calls]


def tensor_parallel_training(n):
    """Heads and hidden layer cut; the program sees local tensors."""
    plan = {
        "layers.*.attention.[qkv]": n.ColwiseParallel(), "layers.*.attention.o": n.RowwiseParallel(),
        "layers.*.mlp.up": n.ColwiseParallel(), "layers.*.mlp.down": n.RowwiseParallel(),
        "words": n.RowwiseParallel(input_layouts=n.Replicate()), "head": n.ColwiseParallel(output_layouts=n.Replicate()),
    }  # fmt: skip
    model = n.parallelize_module(filled(Transformer()), line(), plan)
    return train(model), placements(model)


def train(model, steps=2):
    """By SGD: a key bias has gradient zero, and Adam would amplify its rounding."""
    tokens = torch.randint(16, (3, 5), generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(whole(loss))
    return losses, grads(model), {name: whole(p) for name, p in model.named_parameters()}


def sequence_parallel_training(n):
    """Norms and dropouts on parts of the sequence of 4; attention and MLP gather it and scatter it again."""
    whole_in = {"input_layouts": (n.Shard(1),), "desired_input_layouts": (n.Replicate(),)}
    plan = {
        "words": n.RowwiseParallel(input_layouts=n.Replicate(), output_layouts=n.Shard(1), use_local_output=False),
        "layers.*.norm?": n.SequenceParallel(),
        "layers.*.drop": n.SequenceParallel(),
        "layers.*.attention": n.PrepareModuleInput(
            **whole_in, input_kwarg_layouts={"mask": None}, desired_input_kwarg_layouts={"mask": None}
        ),
        "layers.*.attention.[qkv]": n.ColwiseParallel(use_local_output=True),
        "layers.*.attention.o": n.RowwiseParallel(output_layouts=n.Shard(1), use_local_output=False),
        "layers.*.mlp": n.PrepareModuleInput(**whole_in),
        "layers.*.mlp.up": n.ColwiseParallel(),
        "layers.*.mlp.down": n.RowwiseParallel(output_layouts=n.Shard(1), use_local_output=False),
        "norm": n.SequenceParallel(),
        "head": n.ColwiseParallel(input_layouts=n.Shard(1), output_layouts=n.Replicate()),
    }
    model = n.parallelize_module(filled(Transformer()), line(), plan)
    return train(model), placements(model)


def sequences(n):
    """The input of SequenceParallel is the rank's part of a plain sequence, or any layout of a distributed one."""
    seen, ranks = [], torch.distributed.get_world_size()
    full = seeded(2, 8, 6)
    mine = full.chunk(ranks, 1)[torch.distributed.get_rank()]
    for make in (lambda: nn.LayerNorm(6), lambda: nn.RMSNorm(6), lambda: nn.Dropout(0.0)):
        for given in (mine, n.distribute_tensor(full, line(), [n.Shard(1)]), n.distribute_tensor(full, line())):
            for options in ({}, {"use_local_output": True}, {"sequence_dim": 1}):
                norm = n.parallelize_module(filled(make()), line(), n.SequenceParallel(**options))
                y = norm(given)
                seen.append((type(y) is torch.Tensor, y if type(y) is torch.Tensor else y.to_local()))
                if list(norm.parameters()):
                    whole(y).sum()
                    (y if type(y) is torch.Tensor else y.to_local()).pow(2).sum().backward()
                    seen.append(len(grads(norm)))
    return [
        tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in s) if isinstance(s, tuple) else s for s in seen
    ]


class Two(nn.Module):
    def forward(self, a, b, *, scale=None):
        self.types = [type(t).__name__ for t in (a, b, scale)]
        self.shapes = [tuple(t.shape) for t in (a, b, scale) if isinstance(t, torch.Tensor)]
        return (a * 2 if scale is None else a * scale), b


def preparing(n):
    ranks, seen = torch.distributed.get_world_size(), []
    x, s, r = seeded(4, 8), n.Shard, n.Replicate()

    def see(module, *args, **kwargs):
        out = module(*args, **kwargs)
        out = out if isinstance(out, tuple) else (out,)
        seen.append(
            (
                module.types,
                module.shapes,
                [type(t).__name__ for t in out],
                [whole(t) if isinstance(t, torch.Tensor) else t for t in out],
            )
        )

    mine = x.chunk(ranks)[torch.distributed.get_rank()]
    for local in (False, True):
        style = n.PrepareModuleInput(
            input_layouts=(s(0), None), desired_input_layouts=(r, None), use_local_output=local
        )
        see(n.parallelize_module(Two(), line(), style), mine, 3)
        see(n.parallelize_module(Two(), line(), style), n.distribute_tensor(x, line(), [s(0)]), "text")
        style = n.PrepareModuleInput(
            input_layouts=(r, r), desired_input_layouts=(s(0), s(1)), input_kwarg_layouts={"scale": r},
            desired_input_kwarg_layouts={"scale": s(0)}, use_local_output=local,
        )  # fmt: skip
        see(n.parallelize_module(Two(), line(), style), x, x, scale=x)
        style = n.PrepareModuleOutput(
            output_layouts=(r, r), desired_output_layouts=(s(0), s(1)), use_local_output=local
        )
        see(n.parallelize_module(Two(), line(), style), x, x)
        style = n.PrepareModuleInputOutput(
            input_layouts=(r, None), desired_input_layouts=(s(0), None), use_local_input=local,
            output_layouts=(s(0), None), desired_output_layouts=(r, None), use_local_output=not local,
        )  # fmt: skip
        see(n.parallelize_module(Two(), line(), style), x, None)
    bad = (
        lambda: n.PrepareModuleInput(input_layouts=(r, r), desired_input_layouts=(r,)),
        lambda: n.PrepareModuleInput(input_layouts=(r,)),
        lambda: n.PrepareModuleOutput(output_layouts=(r, r), desired_output_layouts=(r,)),
        lambda: n.PrepareModuleInput(input_kwarg_layouts={"scale": r}, desired_input_kwarg_layouts={}),
        lambda: n.parallelize_module(Two(), line(), n.PrepareModuleInput(input_layouts=r, desired_input_layouts=r))(
            x, x
        ),
        lambda: n.parallelize_module(Two(), line(), n.PrepareModuleOutput(output_layouts=r, desired_output_layouts=r))(
            x, x
        ),
    )
    return seen, [raises(call, (ValueError, AssertionError)) for call in bad]


def own_style(n):
    """A style that a user wrote by the book: a subclass with `_apply`."""

    class Rows(n.ParallelStyle):
        def __init__(self, dim):
            super().__init__()
            self.dim = dim

        def _apply(self, module, device_mesh):
            def partition(name, module, mesh):
                for key, param in list(module.named_parameters(recurse=False)):
                    laid = n.distribute_tensor(param, mesh, [n.Shard(self.dim)], src_data_rank=self.src_data_rank)
                    module.register_parameter(key, nn.Parameter(laid))

            return n.distribute_module(
                module, device_mesh, partition,
                lambda mod, inputs, mesh: (n.DTensor.from_local(inputs[0], mesh, [n.Replicate()], run_check=False),),
                lambda mod, out, mesh: out.redistribute(placements=[n.Replicate()]).to_local(),
            )  # fmt: skip

    model = n.parallelize_module(filled(MLP()), line(), {"up": Rows(0)}, src_data_rank=None)
    y = model(seeded(3, 8))
    y.sum().backward()
    return y.detach(), grads(model), placements(model)


def losses_over_classes(n):
    seen = []
    logits = seeded(6, 8)
    targets = torch.tensor([0, 7, 3, -100, 2, 7])
    for options in ({}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 7}):
        given = n.distribute_tensor(logits.clone().requires_grad_(), line(), [n.Shard(1)])
        with n.loss_parallel():
            at = targets.clamp(min=0) if "ignore_index" in options else targets
            loss = F.cross_entropy(given, at, **options)
            (loss if loss.dim() == 0 else loss.sum()).backward()
        seen += [whole(loss), given.grad.full_tensor(), given.grad.placements[0].is_shard(1)]
    head = n.parallelize_module(
        filled(nn.Linear(4, 8)), line(), n.ColwiseParallel(output_layouts=n.Shard(-1), use_local_output=False)
    )
    with n.loss_parallel():
        loss = F.cross_entropy(head(seeded(6, 4)), targets)
        loss.backward()
    return seen, whole(loss), grads(head)


def resharded_inputs(n):
    seen = []
    for dim in (0, 1, None):
        dim = None if n.DTensor is torch.distributed.tensor.DTensor else dim  # torch's hangs here on gloo
        model = n.parallelize_module(filled(MLP()), line(), {"up": n.ColwiseParallel(), "down": n.RowwiseParallel()})
        assert n.input_reshard(model, line(), dim) is model
        x = seeded(4, 8).requires_grad_()
        (model(x * 1).pow(2).sum() + model(x).sum()).backward()
        seen += [x.grad.clone(), grads(model)]
    return seen


def source_rank(n):
    rank = torch.distributed.get_rank()
    values = []
    for source in (0, 1, None):
        model = filled(nn.Linear(8, 4), seed=rank)
        n.parallelize_module(model, line(), n.ColwiseParallel(), src_data_rank=source)
        values.append(model.weight.to_local().detach())
    return values


def copies(n):
    model = n.parallelize_module(filled(MLP()), line(), {"up": n.ColwiseParallel(), "down": n.RowwiseParallel()})
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.up.weight.zero_()
    return model(seeded(3, 8)).detach(), twin(seeded(3, 8)).detach(), list(model.state_dict())


PROGRAMS = [
    columns_and_rows, one_style, names_and_wildcards, tensor_parallel_training, sequence_parallel_training, sequences,
    preparing, own_style, losses_over_classes, resharded_inputs, source_rank, copies,
]  # fmt: skip


def with_both_libraries(rank, world_size, name):
    program = next(p for p in PROGRAMS if p.__name__ == name)
    theirs, ours = namespaces()
    torch.manual_seed(0)
    want = program(theirs)
    torch.manual_seed(0)
    compare(program(ours), want, name)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_program(program, ranks):
    run_ranks(with_both_libraries, ranks, program.__name__)
