"""A ledger records its program: the backward passes of its graphs in any thread, and nobody else's. Lines are the user's."""

import importlib.util
import threading

import pytest
import torch
import torch.distributed as dist

from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.debug import CommDebugMode, ledger
from shardwise.sharded import ChunkShardingSpec, _shard_tensor
from tests.workers import run_ranks

R = Replicate()


def in_thread(function, *args, **kwargs):
    thread = threading.Thread(target=function, args=args, kwargs=kwargs)
    thread.start()
    thread.join()


def passes(log):
    return [(e.kind, e.backward) for e in log]


@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_in_another_thread(create_graph):
    mesh, runs = simulate(4), []
    weight = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    for call in (lambda function: function(), in_thread):
        x = distribute_tensor(torch.arange(1.0, 9), mesh, [R]).requires_grad_()
        grads = []
        with ledger() as log, CommDebugMode() as mode:
            y = (x.redistribute(placements=[Shard(0)]) ** 3 * weight).sum()
            call(lambda: grads.extend(torch.autograd.grad(y, x, create_graph=create_graph)))  # noqa: B023
            if create_graph:
                call((grads[0] ** 2).sum().backward)
        runs.append((passes(log), mode.get_total_counts()))
    assert runs[0] == runs[1] == ([("all_gather", True)] * (1 + create_graph), 1 + create_graph)


def test_the_ledger_of_the_thread_that_runs_backward():
    """Two ledgers: of the program that made the graph, and of the thread that runs its backward pass."""
    mesh, own = simulate(4), []
    x = distribute_tensor(torch.arange(1.0, 9), mesh, [R]).requires_grad_()
    weight = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    y = (x * weight).sum()

    def worker():
        with ledger() as log:
            y.backward()
        own.append(log)

    with ledger() as log:
        in_thread(worker)
    assert passes(log) == passes(own[0]) == [("all_gather", True)]


def test_closed_is_closed():
    """A second derivative whose first was taken inside, in another thread."""
    mesh, grads = simulate(4), []
    x = distribute_tensor(torch.arange(1.0, 9), mesh, [R]).requires_grad_()
    weight = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])

    def worker():
        with ledger():
            grads.extend(torch.autograd.grad((x**3 * weight).sum(), x, create_graph=True))

    with ledger() as log:
        in_thread(worker)
        count = len(log)
    grads[0].sum().backward()
    assert len(log) == count == 0  # the worker's graph, and the worker's backward pass


def of_tiles(rank, world_size):
    """The other autograd nodes that communicate: between meshes, and between the owners of tiles."""
    found = []
    whole = init_device_mesh("cpu", (world_size,), mesh_dim_names=("ledger",))
    other = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("ledger", "one"))
    spec = ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(world_size)])
    for call in (lambda f, **kwargs: f(**kwargs), in_thread):
        x = distribute_tensor(torch.arange(4.0), whole, [Shard(0)]).requires_grad_()
        tiles = _shard_tensor(torch.arange(8.0).view(4, 2), spec)
        tiles.requires_grad_()
        with ledger() as log:
            call(x.redistribute(other, [R, R]).pow(2).sum().backward)
            scale = torch.ones(2, requires_grad=True)
            call((tiles * scale).local_tensor().sum().backward)
            dist.barrier()
        found.append(sorted(passes(log)))
    assert found[0] == found[1] and any(backward for _, backward in found[0])


def test_other_nodes_in_another_thread():
    run_ranks(of_tiles, 2)


CELL = """
from shardwise import Replicate, Shard, distribute_tensor, simulate
x = distribute_tensor(torch.ones(8), simulate(4), [Shard(0)])
def gather():
    return x.redistribute(placements=[Replicate()])
"""


@pytest.mark.parametrize(
    "path, name",
    [
        ("torch/train.py", "train"),
        ("site-packages/torch/helpers.py", "torch_helpers"),
        ("shardwise_tools/run.py", "shardwise_tools.run"),
        ("shardwise/mine.py", "mine"),
    ],
)
def test_the_line_of_a_user_with_such_a_path(tmp_path, path, name):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text("import torch" + CELL)
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with ledger() as log:
        module.gather()
    assert [e.source for e in log] == [f"{file}:5"]


@pytest.mark.parametrize("file", ["<ipython-input-3-0123456789ab>", "<stdin>", "<string>"])
def test_the_line_of_a_notebook_cell(file):
    space = {"__name__": "__main__", "torch": torch}
    exec(compile(CELL, file, "exec"), space)
    with ledger() as log:
        space["gather"]()
    assert [e.source for e in log] == [f"{file}:5"]


def test_the_line_behind_a_decorator():
    """torch.no_grad() and contextlib wrap the user's function; the line is the user's."""
    x = distribute_tensor(torch.ones(8), simulate(4), [Shard(0)])
    with ledger() as log:
        torch.no_grad()(x.full_tensor)()
    assert log[0].source.startswith(f"{__file__}:")
