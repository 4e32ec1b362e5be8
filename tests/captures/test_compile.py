"""torch.compile of programs with distributed tensors: their local code is compiled, plain programs are torch's."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import CaptureError, Replicate, Shard
from tests.captures.common import MESH, batches, laid_out, module
from tests.captures.test_training import tensor_parallel


def trained(compiled, count=4, **options):
    """Losses and parameters of a few steps, the model compiled or not."""
    model = tensor_parallel()
    call = torch.compile(model, **options) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    torch.manual_seed(3)
    for x in batches(count):
        loss = F.mse_loss(call(laid_out(x)), laid_out(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.full_tensor().detach())
    return losses, [p.full_tensor().detach() for p in model.parameters()]


def test_a_model_replayed():
    assert all(map(torch.equal, *(sum(trained(c, backend="eager", fullgraph=True), []) for c in (False, True))))


@pytest.mark.skipif(sys.platform != "linux", reason="Inductor is tried with g++")
def test_a_model_with_inductor():
    want, found = (sum(trained(compiled, 3, fullgraph=True), []) for compiled in (False, True))
    for a, b in zip(want, found, strict=True):
        torch.testing.assert_close(a, b)


def test_a_whole_step_and_a_method():
    model = module(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager", fullgraph=True)
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(laid_out(batches()[0])).full_tensor().item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    again = module(nn.Linear(8, 8))
    again.compile(backend="eager")
    x = laid_out(batches()[0])
    with torch.no_grad():
        assert torch.equal(again(x).full_tensor(), again(x).full_tensor())


def test_the_step_of_an_optimizer_is_compiled_once():
    """Whatever rate a scheduler sets; hooks of the program still see every step, by then without a compiler."""
    compiled, seen = [], []

    def backend(graph, inputs):
        compiled.append(str(graph.code))
        return graph.forward

    def trained(is_compiled):
        model = module(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = torch.compile(step, backend=backend, fullgraph=True) if is_compiled else step
        counts = []
        for i, x in enumerate(batches(8)):
            if i == 6:
                optimizer.register_step_post_hook(lambda *_: seen.append(1))
            run(laid_out(x))
            scheduler.step()
            counts.append(sum("sqrt" in code for code in compiled))
        return [p.full_tensor().detach() for p in model.parameters()], counts

    (want, _), (found, counts) = trained(False), trained(True)
    for a, b in zip(want, found, strict=True):
        torch.testing.assert_close(a, b)
    assert counts[-1] == counts[3] == 1 and len(seen) == 4


def test_fullgraph_says_what_is_in_the_way():
    weight = laid_out(torch.ones(8, 8), [Replicate(), Shard(1)])

    def branch(x):
        return x @ weight if x.sum() > 0 else x

    x = laid_out(torch.ones(4, 8))
    assert torch.equal(torch.compile(branch, backend="eager")(x).full_tensor(), branch(x).full_tensor())
    with pytest.raises(CaptureError, match="__bool__.*test_compile.py"):
        torch.compile(branch, backend="eager", fullgraph=True)(x)


def test_plain_programs_are_torchs():
    @torch.compile(backend="eager", fullgraph=True)
    def inner(x):
        return x.sin() + 1

    @torch.compile(backend="eager", fullgraph=True)
    def outer(x):
        return inner(x).cos()

    x = torch.randn(4)
    torch.testing.assert_close(outer(x), (x.sin() + 1).cos())
    linear = torch.compile(nn.Linear(4, 4), backend="eager")
    assert linear(torch.ones(2, 4)).shape == (2, 4)
    assert [name for name, _ in linear.named_parameters()] == ["_orig_mod.weight", "_orig_mod.bias"]


def test_without_a_compiler():
    class InvalidCxxCompiler(RuntimeError):
        pass

    def backend(graph, inputs):
        raise InvalidCxxCompiler("no g++")

    call = torch.compile(lambda x: (x * 2).sin().cos().tanh(), backend=backend)
    x = laid_out(torch.ones(4, 8))
    call(x)
    with pytest.raises(CaptureError, match="Install one, or replay without a compiler"):
        call(x)


def test_new_sizes_are_no_new_compilation():
    """The first shape is compiled as it is, the second with symbols for what differs, which later ones share."""

    def compilations(dynamic):
        graphs = []

        def backend(graph, inputs):
            graphs.append([type(x).__name__ for x in inputs])
            return graph

        model = module(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

        def step(x):
            model.zero_grad()
            loss = F.mse_loss(model(x.unflatten(1, (x.shape[1] // 8, 8))).flatten(1), x)
            loss.backward()
            return loss.detach()

        call = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)
        for rows, columns in ((4, 16), (6, 16), (8, 24), (10, 24), (12, 40), (6, 32), (14, 16), (16, 72)):
            x = laid_out(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)))
            want, *found = step(x), call(x), call(x), call(x)
            grads = [p.grad.full_tensor() for p in model.parameters()]
            step(x)
            assert all(torch.equal(want.full_tensor(), y.full_tensor()) for y in found)
            assert all(
                torch.equal(p.grad.full_tensor(), grad) for p, grad in zip(model.parameters(), grads, strict=True)
            )
        return len(graphs), sum("SymInt" in kinds for kinds in graphs)

    assert compilations(False) == (24, 0)  # three stretches, between which simulated ranks meet, for each shape
    assert compilations(None) == compilations(True) == (7, 4)  # one of them has no sizes


def test_sees_moves_as_operators():
    """What a compiler gets, on one rank of a process group: ops and moves in one graph."""
    from tests.workers import run_ranks

    assert run_ranks(_graphs, 2) == [(["all_reduce", "wait_tensor"], True)] * 2


def _graphs(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    weight = shardwise.distribute_tensor(torch.arange(24.0).view(8, 3), mesh, [Shard(0)])
    x = shardwise.distribute_tensor(torch.arange(32.0).view(4, 8), mesh, [Shard(1)])
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def f(x):
        y = (x * 2).sin() @ weight
        return y.redistribute(placements=[Replicate()]).tanh() + 1

    call = torch.compile(f, backend=backend, fullgraph=True)
    found = [call(x).full_tensor() for _ in range(3)]
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    moves = [name.split(".")[1] for name in names if name.startswith(("shardwise", "_c10d_functional"))]
    return moves, all(torch.equal(f(x).full_tensor(), y) for y in found)


def test_the_example(capsys, monkeypatch):
    from tests.parallel.test_examples import example

    monkeypatch.setattr(sys, "argv", ["compiled_gpt.py", "--steps", "4", "--explain"])
    eager, captured = example("compiled_gpt").main()
    assert eager == captured
    out = capsys.readouterr().out
    assert "captured" in out and "all_reduce" in out and "0.0e+00" in out


def test_what_a_function_holds_without_arguments():
    """An optimizer, a list and an object with distributed tensors are noticed, so that the call is captured."""

    class Trainer:
        def __init__(self, net):
            self.optimizer, self.kept = torch.optim.AdamW(net.parameters(), lr=0.1), list(net.parameters())

    def made(kind):
        torch.manual_seed(0)
        net = shardwise.distribute_module(nn.Linear(8, 8), MESH)
        trainer = Trainer(net)
        optimizer, kept = trainer.optimizer, trainer.kept

        def scaled():
            with torch.no_grad():
                kept[0].mul_(2)

        calls = [lambda: optimizer.step(), optimizer.step, scaled, lambda: trainer.optimizer.step()]
        return net, calls[kind]

    for kind in range(4):
        (net, step), (other, compiled) = made(kind), made(kind)
        compiled = torch.compile(compiled, backend="eager", fullgraph=True)
        for x in batches(3):
            for model, call in ((net, step), (other, compiled)):
                model.zero_grad()
                model(laid_out(x)).square().sum().backward()
                call()
        assert torch.equal(net.weight.full_tensor(), other.weight.full_tensor()), kind
