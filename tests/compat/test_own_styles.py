"""Programs extend the parallel styles: a class of theirs defines some of torch's protected methods anew, calls them in
an `_apply` of its own, or sets other layouts after `__init__` (OLMo-core, torchao's float8, NeMo's and PEFT's LoRA)."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise.parallel
from tests.compat.common import compare, line, namespaces, seeded
from tests.workers import run_ranks


def seen(n, module, x):
    """What it returns, the layouts of its parameters, and all gradients."""
    x = x.clone().requires_grad_()
    y = module(x)
    laid = [tuple(map(str, p.placements)) for p in module.parameters()]
    y = y.full_tensor() if isinstance(y, n.DTensor) else y + 0
    y.square().sum().backward()
    grads = [p.grad.full_tensor() for p in module.parameters()]
    return [y.detach(), laid, x.grad, grads]


def linear(kind=nn.Linear):
    torch.manual_seed(0)
    return kind(8, 8)


def inputs_and_outputs_of_their_own(n):
    found = []
    for base in (n.parallel.ColwiseParallel, n.parallel.RowwiseParallel):

        class Doubled(base):
            @staticmethod
            def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):
                x = n.DTensor.from_local(inputs[0] * 2, device_mesh, input_layouts, run_check=False)
                return x.redistribute(placements=desired_input_layouts)

        class Raised(base):
            @staticmethod
            def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
                outputs = outputs.redistribute(placements=output_layouts) + 1
                return outputs.to_local() if use_local_output else outputs

        whole = {"input_layouts": n.Replicate(), "output_layouts": n.Replicate()}
        for style in (Doubled(**whole), Raised(**whole), Raised(**whole, use_local_output=False)):
            module = n.parallel.parallelize_module(linear(), line(), style)
            found.append(seen(n, module, seeded(4, 8)))
    return found


class LoRA(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.a), self.b)


def parameters_cut_their_own_way(n):
    class Cut(n.parallel.ColwiseParallel):
        def _partition_linear_fn(self, name, module, device_mesh):
            for key, param in list(module.named_parameters(recurse=False)):
                place = n.Replicate() if key == "a" else n.Shard(0)
                laid = n.distribute_tensor(param, device_mesh, [place], src_data_rank=self.src_data_rank)
                module.register_parameter(key, nn.Parameter(laid))

        def _partition_embedding_fn(self, name, module, device_mesh):
            laid = n.distribute_tensor(module.weight.detach() * 2, device_mesh, [n.Shard(1)])
            module.register_parameter("weight", nn.Parameter(laid))

    style = Cut(output_layouts=n.Replicate())
    module = n.parallel.parallelize_module(linear(LoRA), line(), style)
    torch.manual_seed(0)
    table = n.parallel.parallelize_module(nn.Embedding(10, 8), line(), style)
    return [seen(n, module, seeded(4, 8)), table(torch.arange(10)) + 0]


def a_sequence_style_of_their_own(n):
    class Moved(n.parallel.SequenceParallel):
        output_layouts = (n.Replicate(),)

        @staticmethod
        def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
            outputs = outputs.redistribute(placements=output_layouts)
            return outputs.to_local() if use_local_output else outputs

        def _apply(self, module, device_mesh):
            before = partial(self._prepare_input_fn, self.sequence_sharding)
            after = partial(self._prepare_output_fn, self.output_layouts, self.use_local_output)
            return n.distribute_module(module, device_mesh, self._replicate_module_fn, before, after)

    class Tripled(n.parallel.SequenceParallel):
        @staticmethod
        def _prepare_input_fn(sequence_sharding, mod, inputs, device_mesh):
            given = (inputs[0] * 3,)
            return n.parallel.SequenceParallel._prepare_input_fn(sequence_sharding, mod, given, device_mesh)

    x = seeded(2, 2, 8, seed=torch.distributed.get_rank())
    styles = Moved(), Moved(use_local_output=True), Tripled()
    return [seen(n, n.parallel.parallelize_module(nn.LayerNorm(8), line(), style), x) for style in styles]


class Add(nn.Module):
    def forward(self, x, *, z=0):
        return x + z


def inputs_and_outputs_prepared_their_own_way(n):
    class Doubled(n.parallel.PrepareModuleInput):
        def _prepare_input_arg(self, input, mesh, input_layout, desired_layout):
            return super()._prepare_input_arg(input * 2, mesh, input_layout, desired_layout)

    class Pair(n.parallel.PrepareModuleOutput):
        def _prepare_out_fn(self, outputs, device_mesh):
            return super()._prepare_out_fn(outputs, device_mesh), 7

    whole, cut = n.Replicate(), n.Shard(0)
    for_z = {"input_kwarg_layouts": {"z": whole}, "desired_input_kwarg_layouts": {"z": cut}}
    x, found = seeded(4, 8), []
    for local in (True, False):
        first = {"input_layouts": whole, "desired_input_layouts": cut, "use_local_output": local}
        found.append(n.parallel.parallelize_module(Add(), line(), Doubled(**first))(x))
        found.append(n.parallel.parallelize_module(Add(), line(), Doubled(**first, **for_z))(x, z=x))
    found.append(
        n.parallel.parallelize_module(Add(), line(), Pair(output_layouts=whole, desired_output_layouts=cut))(x)[0]
    )
    return [y.to_local() if isinstance(y, n.DTensor) else y for y in found]


def layouts_set_after_init(n):
    out, into, sequence = n.parallel.ColwiseParallel(), n.parallel.RowwiseParallel(), n.parallel.SequenceParallel()
    out.output_layouts, out.use_local_output = (n.Replicate(),), False
    into.input_layouts = (n.Replicate(),)
    sequence.sequence_sharding = (n.Shard(0),)
    last = n.parallel.PrepareModuleOutput(output_layouts=n.Replicate(), desired_output_layouts=n.Shard(0))
    last.use_local_output = False
    modules = [n.parallel.parallelize_module(linear(), line(), style) for style in (out, into)]
    modules.append(n.parallel.parallelize_module(nn.LayerNorm(8), line(), sequence))
    kept = n.parallel.parallelize_module(nn.ReLU(), line(), last)(seeded(4, 8))
    is_ours = isinstance(modules[0](seeded(4, 8)), n.DTensor), isinstance(kept, n.DTensor)
    return [is_ours, *(seen(n, module, seeded(4, 8)) for module in modules)]


PROGRAMS = [
    inputs_and_outputs_of_their_own,
    parameters_cut_their_own_way,
    a_sequence_style_of_their_own,
    inputs_and_outputs_prepared_their_own_way,
    layouts_set_after_init,
]


def run_both(rank, world_size, program):
    theirs, ours = namespaces()
    compare(program(ours), program(theirs), program.__name__)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_same_as_torch(program):
    run_ranks(run_both, 4, program)


def test_the_parts_of_a_style_for_both_ends():
    whole = shardwise.Replicate()
    style = shardwise.parallel.PrepareModuleInputOutput(
        input_layouts=whole, desired_input_layouts=whole, output_layouts=whole, desired_output_layouts=whole
    )
    assert isinstance(style.prepare_module_input, shardwise.parallel.PrepareModuleInput)
    assert isinstance(style.prepare_module_output, shardwise.parallel.PrepareModuleOutput)


def test_on_simulated_ranks():
    class Doubled(shardwise.parallel.ColwiseParallel):
        @staticmethod
        def _prepare_input_fn(*args):
            return shardwise.parallel.ColwiseParallel._prepare_input_fn(*args) * 2

    x, module = seeded(3, 8), linear()
    want = module(x * 2)
    style = Doubled(output_layouts=shardwise.Replicate(), use_local_output=False)
    got = shardwise.parallel.parallelize_module(module, shardwise.simulate(4), style)(x)
    torch.testing.assert_close(got.full_tensor(), want)


def test_methods_get_no_axis():
    mesh = shardwise.simulate((2, 2), axis_names=("dp", "tp"))

    class Own(shardwise.parallel.ColwiseParallel):
        def _partition_linear_fn(self, name, module, device_mesh):
            super()._partition_linear_fn(name, module, device_mesh)

    with pytest.raises(shardwise.MeshError, match=r"Own defines.*device_mesh\['tp'\], without axis='tp'"):
        shardwise.parallel.parallelize_module(linear(), mesh, Own(), axis="tp")
    laid = shardwise.parallel.parallelize_module(linear(), mesh["tp"], Own())
    assert laid.weight.placements == (shardwise.Shard(0),)
