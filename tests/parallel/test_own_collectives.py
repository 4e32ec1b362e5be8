"""Programs that gather parameters and reduce gradients by functions of their own, on real processes."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs

import shardwise
import shardwise.parallel as ours
from tests.parallel.test_fully_shard_torch import Net, accumulating, loss_of, plain_steps
from tests.workers import device_mesh, run_ranks

HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@dataclass  # compares by value, so it has no hash
class Gather:
    waits: bool  # or gives something to wait for
    seen: list = field(default_factory=list)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.seen.append((output_tensor.numel(), input_tensor.numel(), dist.get_process_group_ranks(group), async_op))
        work = dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)
        if not self.waits:
            return work
        work.wait()
        return None


@dataclass
class Reduce:
    waits: bool
    seen: list = field(default_factory=list)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.seen.append((input_tensor.numel(), output_tensor.numel(), dist.get_process_group_ranks(group), async_op))
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=True)
        if not self.waits:
            return work
        work.wait()
        return None


class Allocating:
    """Memory that the collective makes: filled with NaN, so that whatever is read before it is written shows."""

    def allocate(self, size, *, dtype, device):
        self.memory = [*getattr(self, "memory", ()), torch.full(size, float("nan"), dtype=dtype, device=device)]
        return self.memory[-1]

    def owns(self, tensor):
        return any(m.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for m in self.memory)


class AllocatingGather(Allocating, Gather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        assert self.owns(output_tensor) and self.owns(input_tensor)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class AllocatingReduce(Allocating, Reduce):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        assert self.owns(output_tensor) and self.owns(input_tensor)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def train(mesh, rank, program, gather=None, reduce=None, library=ours, dtype=torch.float64, **options):
    model = Net().to(dtype)
    modules = [*model.blocks, model]
    for module in modules:
        library.fully_shard(module, mesh=mesh, **options)
        if gather is not None:
            module.set_custom_all_gather(gather)
        if reduce is not None:
            module.set_custom_reduce_scatter(reduce)
    losses = program(model, torch.optim.AdamW(model.parameters(), lr=0.02), rank, mesh.size())
    loss_of(model, 5, rank, mesh.size()).backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    return losses, grads


def compare(mesh, rank, program, want, **chosen):
    torch.testing.assert_close(train(mesh, rank, program, **chosen), want, rtol=1e-12, atol=1e-12)
    group = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    for comm in (chosen[name] for name in ("gather", "reduce") if name in chosen):
        assert comm.seen
        for whole, part, ranks, async_op in comm.seen:
            assert whole == part * len(group) and ranks == group and async_op


def training(mesh, rank):
    want = train(mesh, rank, plain_steps)
    for waits in (False, True):
        compare(mesh, rank, plain_steps, want, gather=Gather(waits))
        compare(mesh, rank, plain_steps, want, reduce=Reduce(waits))
    want = train(mesh, rank, accumulating)
    compare(mesh, rank, accumulating, want, gather=AllocatingGather(False), reduce=AllocatingReduce(False))
    mixed = {"mp_policy": ours.MixedPrecisionPolicy(**HALF), "dtype": torch.float32}
    want = train(mesh, rank, plain_steps, **mixed)
    compare(mesh, rank, plain_steps, want, gather=Gather(False), reduce=Reduce(True), **mixed)


def as_in_torch(mesh, rank):
    """The same objects, given to torch's own fully_shard."""
    by_torch, by_us = ((AllocatingGather(True), AllocatingReduce(True)) for _ in range(2))
    want = train(mesh, rank, plain_steps, *by_torch, library=theirs)
    torch.testing.assert_close(train(mesh, rank, plain_steps, *by_us), want, rtol=1e-12, atol=1e-12)


def small_model(mesh, **options):
    torch.manual_seed(0)
    return ours.fully_shard(torch.nn.Linear(5, 3).double(), mesh=mesh, **options)


def nothing_to_gather(mesh, rank):
    """Whole parameters on every rank: neither function is called, and neither makes memory."""
    alone = device_mesh((mesh.size(), 1), ("copies", "parts"))
    gather, reduce = AllocatingGather(False), AllocatingReduce(False)
    model = small_model(alone)
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    model(torch.ones(2, 5).double() * rank).sum().backward()
    expected = sum(range(mesh.size())) * 2 / mesh.size()
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((3, 5), expected).double())
    assert not gather.seen and not reduce.seen and not hasattr(reduce, "memory") and not hasattr(gather, "memory")


def after_a_failure(mesh, rank):
    """An error of the function reaches the program, and the next pass is right."""
    batch = torch.arange(10.0).view(2, 5).double() + rank
    model = small_model(mesh)
    want = model(batch)
    failing = [True]

    def gather(output_tensor, input_tensor, group, async_op=False):
        if failing:
            raise OSError("the wire is cut")
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    model.reshard()
    model.set_custom_all_gather(gather)
    for _ in range(2):
        with pytest.raises(OSError, match="the wire is cut"):
            model(batch)
    failing.clear()
    torch.testing.assert_close(model(batch), want)


def captured(mesh, rank):
    """A captured step runs eagerly, says why, and calls the functions each time."""
    for name, comm in (("set_custom_all_gather", Gather(False)), ("set_custom_reduce_scatter", Reduce(False))):
        model = small_model(mesh)

        @shardwise.capture
        def step(x, model=model):
            model.weight.grad = None
            model(x).square().sum().backward()
            return model.weight.grad.full_tensor()

        batch = torch.arange(10.0).view(2, 5).double() + rank
        want = [step(batch) for _ in range(3)][-1]
        assert step.replays
        getattr(model, name)(comm)
        for calls in (1, 2, 3):
            torch.testing.assert_close(step(batch), want)
            assert len(comm.seen) >= calls
        assert any("a collective of the program's own may do more than compute" in why for why in step.eager)


def _on_two(rank, world_size):
    mesh = device_mesh((world_size,), ("dp",))
    for check in (training, as_in_torch, nothing_to_gather, after_a_failure, captured):
        check(mesh, rank)


def test_two_processes():
    run_ranks(_on_two, 2)


def _on_four(rank, world_size):
    training(device_mesh((2, 2), ("copies", "parts")), rank)
    as_in_torch(device_mesh((4,), ("dp",)), rank)


def test_copies_and_parts():
    run_ranks(_on_four, 4)
