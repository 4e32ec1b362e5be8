"""Moving a program over by changing its imports: what it prints and catches must not change."""

import copy
import importlib
import io
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import MeshError, Shard, distribute_tensor, simulate
from tests.compat.common import compare, grid, line, namespaces, raises, seeded
from tests.workers import device_mesh, run_ranks


def placements_are_values(n):
    shard, replicate, partial = n.Shard, n.Replicate, n.Partial
    values = [shard(0), shard(-1), replicate(), partial(), partial("avg"), partial(reduce_op="max"), shard(dim=1)]
    kinds = [(p.is_shard(), p.is_shard(0), p.is_shard(dim=1), p.is_replicate(), p.is_partial()) for p in values]
    equal = [[a == b for b in values] for a in values]
    same = [pickle.loads(pickle.dumps(p)) == p == copy.deepcopy(p) for p in values]
    named = [n.placement_types.Shard is shard, n.placement_types.Partial is partial]
    return [list(map(repr, values)), list(map(str, values)), kinds, equal, same, len(set(values)), named]


def distribute_on_a_line_and_a_grid(n):
    seen = []
    for shape in ((8, 6), (5, 3), (1, 2), (0, 2)):
        value = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        for place in (n.Shard(0), n.Shard(1), n.Shard(-1), n.Replicate()):
            d = n.distribute_tensor(value, line(), [place])
            seen += [d.to_local(), d.full_tensor(), d.placements[0].is_shard(), d.stride(), tuple(d.shape), d.numel()]
            seen += [d.is_leaf, d.requires_grad, d.is_contiguous(), d.dim(), d.size(0), len(d), d.nbytes, str(d.device)]
        for places in ((n.Shard(0), n.Shard(1)), (n.Shard(0), n.Shard(0)), (n.Replicate(), n.Shard(0))):
            d = n.distribute_tensor(value, grid(), places)
            seen += [d.to_local(), d.full_tensor(), tuple(map(str, d.placements))]
    return seen


def the_active_mesh(n):
    with line():
        made = [
            n.distribute_tensor(torch.arange(8.0), placements=[n.Shard(0)]),
            n.zeros(4, 4),
            n.ones(5, 2, placements=[n.Shard(0)]),
        ]
        made += [
            n.DTensor.from_local(torch.ones(2, 2), placements=[n.Shard(0)]),
            n.distribute_module(nn.Linear(2, 2)).bias.detach() * 0,
        ]
    calls = (
        lambda: n.zeros(4),
        lambda: n.distribute_tensor(torch.ones(4)),
        lambda: n.DTensor.from_local(torch.ones(4)),
    )
    return [d.full_tensor() for d in made], [raises(call, RuntimeError) for call in calls]


def from_local_takes_parts(n):
    rank = torch.distributed.get_rank()
    local = torch.full((2, 3), rank + 1.0)
    places = (n.Shard(0), n.Shard(1), n.Shard(-1), *map(n.Partial, ("sum", "avg", "max", "min", "product")))
    seen = [n.DTensor.from_local(local, line(), [p]).full_tensor() for p in places]
    seen.append(n.DTensor.from_local(local.clone(), line(), [n.Replicate()], run_check=True).to_local())
    full = torch.arange(10.0).reshape(5, 2)
    chunks = full.chunk(torch.distributed.get_world_size())
    mine = chunks[rank] if rank < len(chunks) else full[:0]
    uneven = n.DTensor.from_local(mine, line(), [n.Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
    return seen, uneven.full_tensor(), uneven.to_local().data_ptr() == mine.data_ptr()


def both_sides_have_their_own_autograd_identity(n):
    """What goes in by from_local and comes out by to_local shares memory, but not flags, hooks or .grad."""
    given = torch.ones(2, 3, requires_grad=True)
    d = n.DTensor.from_local(given, line(), [n.Shard(0)])
    seen = [d.is_leaf, d.grad_fn is None]
    (d * 2).sum().backward()
    seen += [d.grad is None, given.grad]
    plain = torch.ones(2, 3)
    d = n.DTensor.from_local(plain, line(), [n.Shard(0)]).requires_grad_()
    (d * 2).sum().backward()
    seen += [plain.requires_grad, plain.grad is None, d.grad.full_tensor()]
    for place in (n.Shard(0), n.Replicate()):
        param = nn.Parameter(n.distribute_tensor(torch.ones(4, 2), line(), [place]))
        with torch.no_grad():
            seen += [param.to_local().requires_grad, param.full_tensor().requires_grad, param.to_local().numpy().sum()]
        seen += [x.is_leaf for x in (param.to_local(), param.full_tensor())]
        calls = []
        for _ in range(2):  # a hook on what to_local gave is not a hook on the parameter
            local = param.to_local()
            local.register_hook(lambda grad, calls=calls: calls.append(1))
            local.sum().backward()
        seen += [len(calls), param.grad.full_tensor()]
        flagged = n.distribute_tensor(torch.ones(4, 2), line(), [place])
        flagged.to_local().requires_grad_()
        seen.append(flagged.requires_grad)
    return seen


def grad_placements(n):
    seen = []
    for theirs in (None, [n.Replicate()], [n.Partial()]):
        d = n.distribute_tensor(torch.arange(6.0).requires_grad_(), line(), [n.Replicate()])
        d.to_local(grad_placements=theirs).pow(2).sum().backward()
        seen.append(d.grad.full_tensor())
        d = n.distribute_tensor(torch.arange(6.0).requires_grad_(), line(), [n.Shard(0)])
        d.full_tensor(grad_placements=theirs).pow(2).sum().backward()
        seen.append(d.grad.full_tensor())
    return seen


def redistribute_on_a_grid(n):
    value = torch.arange(48.0).reshape(8, 6)
    s, r = n.Shard, n.Replicate()
    layouts = [(s(0), s(1)), (s(0), s(0)), (r, s(0)), (s(1), r), (r, r)]
    seen = [n.distribute_tensor(value, grid(), a).redistribute(grid(), b).to_local() for a in layouts for b in layouts]
    d = n.distribute_tensor(value.clone().requires_grad_(), grid(), layouts[0])
    d.redistribute(placements=[r, s(0)], async_op=True).pow(2).sum().backward()
    return seen, d.grad.full_tensor()


def factories(n):
    seen = []
    for make in (n.zeros, n.ones):
        for size in ((8, 4), ((8, 4),), ([5, 3],), (torch.Size([4]),), ((),)):
            seen.append(make(*size, device_mesh=line()).to_local())
        d = make(5, 4, dtype=torch.int64, layout=torch.strided, device_mesh=line(), placements=[n.Shard(0)])
        seen += [d.to_local(), make(4, requires_grad=True, device_mesh=line()).requires_grad]
    for size in (8, (8,), [5, 2]):
        seen.append(n.full(size, 2.5, device_mesh=line(), placements=[n.Shard(0)]).to_local())
    return seen, tuple(n.empty(5, 3, device_mesh=grid(), placements=[n.Shard(0), n.Shard(1)]).to_local().shape)


def sub_meshes(n):
    mesh, value = grid(), seeded(4, 6)
    tp = n.distribute_tensor(value, mesh["tp"], [n.Shard(1)])
    whole = n.distribute_tensor(value, mesh, [n.Shard(0), n.Shard(1)])
    seen = [tp.to_local(), (tp + tp).full_tensor(), (whole @ whole.t()).full_tensor(), tp.device_mesh == mesh["tp"]]
    seen += [raises(lambda: tp + whole, RuntimeError), tp.device_mesh.get_local_rank(), tp.device_mesh.mesh_dim_names]
    cube = device_mesh((2, torch.distributed.get_world_size() // 2, 1), ("pp", "dp", "tp"))
    for names, places in ((("pp", "dp"), [n.Shard(0), n.Shard(1)]), (("dp",), [n.Shard(0)]), (("tp",), [n.Shard(0)])):
        d = n.distribute_tensor(value, cube[names], places)
        seen += [d.to_local(), d.full_tensor(), d.softmax(-1).full_tensor()]
    return seen


def tensor_parallel_over_a_sub_mesh(n):
    mesh = grid()
    up = nn.Parameter(n.distribute_tensor(seeded(8, 4), mesh["tp"], [n.Shard(0)]))
    down = nn.Parameter(n.distribute_tensor(seeded(4, 8), mesh["tp"], [n.Shard(1)]))
    x = n.DTensor.from_local(seeded(3, 4, seed=mesh.get_local_rank("dp")), mesh["tp"], [n.Replicate()])
    F.linear(F.relu(F.linear(x, up)), down).pow(2).sum().backward()
    for param in (up, down):
        torch.distributed.all_reduce(param.grad.to_local(), group=mesh.get_group("dp"))
    torch.optim.SGD([up, down], lr=0.01).step()
    return up.full_tensor().detach(), down.full_tensor().detach()


def attention_by_hand(n):
    b, t, h, d = 2, 6, 4, 8
    x = n.distribute_tensor(seeded(b, t, h * d), line(), [n.Replicate()])
    w_in = nn.Parameter(n.distribute_tensor(seeded(h * d, h * d) * 0.1, line(), [n.Shard(0)]))
    w_out = nn.Parameter(n.distribute_tensor(seeded(h * d, h * d, seed=9) * 0.1, line(), [n.Shard(1)]))
    q = F.linear(x, w_in).to_local().view(b, t, -1, d).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(b, t, -1)
    out = n.DTensor.from_local(out, line(), [n.Shard(-1)], run_check=False)
    y = F.linear(out, w_out).redistribute(placements=[n.Replicate()]).to_local()
    y.pow(2).sum().backward()
    return y.detach(), w_in.grad.full_tensor(), w_out.grad.full_tensor()


def sequence_parallel_block(n):
    x = nn.Parameter(n.distribute_tensor(seeded(2, 8, 6), line(), [n.Shard(1)]))
    scale = nn.Parameter(n.distribute_tensor(seeded(6), line(), [n.Replicate()]))
    up = nn.Parameter(n.distribute_tensor(seeded(8, 6, seed=5), line(), [n.Shard(0)]))
    y = checkpoint(
        lambda x: F.silu(F.linear(F.layer_norm(x, (6,), scale).redistribute(placements=[n.Replicate()]), up)),
        x,
        use_reentrant=False,
    )
    y.pow(2).sum().backward()
    return [y.full_tensor().detach(), *(p.grad.full_tensor() for p in (x, scale, up))]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def functions_and_module_hooks(n):
    """What runs inside a torch.autograd.Function: one's own, full backward hooks, reentrant checkpoints."""
    leaf = n.distribute_tensor(seeded(8, 6), line(), [n.Shard(0)]).requires_grad_()
    squared = Square.apply(leaf)
    squared.sum().backward()
    seen = [squared.full_tensor().detach(), leaf.grad.full_tensor(), squared.grad_fn.name()]
    module, calls = n.distribute_module(nn.Linear(6, 4), line()), []
    for param in module.parameters():
        nn.init.constant_(param, 0.5)
    module.register_full_backward_hook(lambda m, into, outof: calls.append((into[0], outof[0])))
    leaf.grad = None
    checkpoint(lambda x: module(x).tanh(), leaf, use_reentrant=True).sum().backward()
    seen += [g.full_tensor() for g in (*calls[0], leaf.grad, module.weight.grad)]
    return seen, len(calls), raises(lambda: n.distribute_tensor(leaf.full_tensor() * 2, line()), RuntimeError)


def channels_last_stays(n):
    value = seeded(4, 3, 5, 5).to(memory_format=torch.channels_last)
    seen = [n.distribute_tensor(value, line(), [p]) for p in (n.Shard(0), n.Shard(1), n.Replicate())]
    return [(d.stride(), d.is_contiguous(), d.is_contiguous(memory_format=torch.channels_last)) for d in seen]


def training(n):
    seen = []
    for kind, options in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
    ):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        for i, param in enumerate(model.parameters()):
            nn.init.constant_(param, 0.1 * (i + 1))

        def partition(name, module, mesh):
            for key, param in list(module.named_parameters(recurse=False)):
                module.register_parameter(key, nn.Parameter(n.distribute_tensor(param, mesh, [n.Shard(0)])))

        n.distribute_module(
            model, line(), partition, lambda m, args, mesh: (n.distribute_tensor(args[0], mesh, [n.Replicate()]),),
            lambda m, out, mesh: out.redistribute(placements=[n.Replicate()]).to_local(),
        )  # fmt: skip
        optimizer = kind(model.parameters(), lr=0.1, **options)
        for step in range(3):
            optimizer.zero_grad()
            loss = F.mse_loss(model(seeded(5, 6, seed=step)), seeded(5, 4, seed=9))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
            optimizer.step()
            seen += [loss.detach(), norm.full_tensor()]
        seen += [p.full_tensor().detach() for p in model.parameters()]
        seen += [sorted(optimizer.state_dict()["state"][0]), list(model.state_dict())]
    return seen


def copies_and_files(n):
    d = n.distribute_tensor(torch.arange(8.0).reshape(4, 2), line(), [n.Shard(0)])
    param = nn.Parameter(d)
    file = io.BytesIO()
    torch.save({"w": d, "p": param}, file)
    made = [copy.deepcopy(d), copy.copy(d), pickle.loads(pickle.dumps(d))]
    for only in (True, False):
        file.seek(0)
        loaded = torch.load(file, weights_only=only)
        made += [loaded["w"], loaded["w"] + d, loaded["p"].detach()]
    flags = [
        (isinstance(p, nn.Parameter), p.requires_grad, p.is_leaf) for p in (param, copy.deepcopy(param), loaded["p"])
    ]
    module = n.distribute_module(nn.Linear(4, 4), line())
    other = copy.deepcopy(module)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    result = str(other.load_state_dict(module.state_dict()))
    alike = [
        torch.equal(a.full_tensor(), b.full_tensor())
        for a, b in zip(other.parameters(), module.parameters(), strict=True)
    ]
    return [x.full_tensor() for x in made], [x.device_mesh == line() for x in made], flags, result, alike


def notes_on_tensors(n):
    """What a program notes on a tensor: copies and pickles have it."""
    d = n.distribute_tensor(seeded(5, 4), line(), [n.Shard(0)])
    d.note = {"tags": [1, 2]}
    param = nn.Parameter(n.distribute_tensor(seeded(5, 4), line(), [n.Shard(0)]))
    param.is_tp = True
    one, other, shallow = copy.deepcopy(d), copy.deepcopy(param), copy.copy(d)
    seen = [one.note, one.note is d.note, other.is_tp, isinstance(other, nn.Parameter)]
    seen += [shallow.note, hasattr(d.clone(), "note"), hasattr(d.detach(), "note")]
    read = [pickle.loads(pickle.dumps(t)) for t in (d, param)]
    return [*seen, read[0].note, read[1].is_tp, isinstance(read[1], nn.Parameter), read[0].full_tensor()]


def gradients_and_hooks(n):
    d = n.distribute_tensor(torch.arange(8.0).requires_grad_(), line(), [n.Shard(0)])
    y, calls = d * 2, []
    y.retain_grad()
    y.sum().backward()
    seen = [y.grad.full_tensor().clone(), d.grad.full_tensor().clone(), isinstance(d.grad, n.DTensor)]
    (grad,) = torch.autograd.grad((d**3).sum(), d, create_graph=True)
    d.grad = None
    grad.sum().backward()
    seen.append(d.grad.full_tensor().clone())
    d.grad = None
    handle = d.register_hook(lambda g: g * 2)
    d.register_post_accumulate_grad_hook(lambda p: calls.append(p is d))
    (d * d).sum().backward()
    handle.remove()
    with torch.no_grad():
        seen += [d.grad.full_tensor().clone(), calls, (d * 2).requires_grad]
    loss = (d * d).sum()
    loss.backward()
    return seen, [raises(call, RuntimeError) for call in (loss.backward, (d * d).backward, lambda: d.add_(1))]


def collectives_are_counted(n):
    functional, seen = torch.ops.c10d_functional, []
    d = n.distribute_tensor(torch.arange(8.0), line(), [n.Shard(0)])
    part = n.DTensor.from_local(torch.ones(4, 2), line(), [n.Partial()])
    mode = n.debug.CommDebugMode()
    for call, op in (
        (lambda: d.redistribute(placements=[n.Replicate()]), functional.all_gather_into_tensor),
        (lambda: d.sum().full_tensor(), functional.all_reduce),
        (lambda: part.redistribute(placements=[n.Shard(0)]), functional.reduce_scatter_tensor),
        (lambda: d + d, functional.all_reduce),
    ):
        with mode:
            call()
        seen += [mode.get_total_counts(), mode.get_comm_counts()[op]]
    return seen


def who_counts_what(n):
    """Sizes that ranks tell each other are no collectives of the program; laying a tensor out is."""
    functional, c10d, mode = torch.ops.c10d_functional, torch.ops.c10d, n.debug.CommDebugMode()
    value, seen = seeded(8, 4), []
    for call, op in (
        (lambda: n.DTensor.from_local(value, line(), [n.Shard(0)]), functional.all_gather_into_tensor),
        (lambda: n.distribute_tensor(value, line(), [n.Shard(0)]), c10d.scatter_),
        (lambda: n.distribute_tensor(value, line(), [n.Replicate()]), c10d.broadcast_),
        (lambda: n.distribute_tensor(value, line(), [n.Shard(0)], src_data_rank=None), c10d.scatter_),
        (lambda: dist.all_reduce(value.clone()), c10d.allreduce_),
        (lambda: dist.all_gather([value.clone() for _ in range(dist.get_world_size())], value), c10d.allgather_),
        (lambda: dist.broadcast(value.clone(), 0), c10d.broadcast_),
        (lambda: dist.barrier(), c10d.barrier),
        (lambda: collectives.all_reduce(value, "sum", (line(), 0)).wait(), functional.all_reduce),
    ):
        with mode:
            call()
        seen += [mode.get_total_counts(), mode.get_comm_counts()[op], mode.comm_counts[op]]
    parallel, model = n.parallel, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    plan = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, line(), plan)
    with mode:
        model(value)
    by_module = {name: {when: dict(ops) for when, ops in by.items()} for name, by in mode.comm_module_counts.items()}
    return seen, {name: str(by) for name, by in sorted(by_module.items())}


def names_people_use(n):
    value = seeded(8, 6)
    d = n.DTensor.from_local(local_tensor=value, device_mesh=line(), placements=[n.Shard(0)])
    weight = torch.nn.Parameter(n.distribute_tensor(value, line(), [n.Shard(0)]))
    weight._local_tensor.mul_(2)
    spec, meta = weight._spec, weight._spec.tensor_meta
    new = [weight.new_zeros(8, 6), weight.new_ones((8, 6)), weight.new_full(weight.shape, 3.0), weight.new_zeros(3)]
    return [
        d.full_tensor(), weight.full_tensor().detach(), weight._local_tensor, weight._local_tensor.requires_grad,
        spec.mesh == line(), spec.placements[0].is_shard(0), tuple(spec.shape), tuple(spec.stride), spec.ndim,
        spec.num_shards, spec.dim_map, spec.is_replicated(), tuple(meta.shape), meta.dtype,
        [t.full_tensor() for t in new], [t.placements[0].is_shard(0) for t in new], [tuple(t.to_local().shape) for t in new],
    ]  # fmt: skip


def module_hooks_old_and_new(n):
    def take(inputs, mesh):
        return (n.DTensor.from_local(inputs[0], mesh, [n.Shard(0)]),)

    seen = []
    for input_fn, output_fn in (
        (take, lambda out, mesh: out.redistribute(mesh, [n.Replicate()]).to_local()),
        (lambda module, inputs, mesh: take(inputs, mesh), lambda module, out, mesh: out.full_tensor()),
    ):
        torch.manual_seed(3)
        module = n.distribute_module(torch.nn.Linear(6, 4), line(), input_fn=input_fn, output_fn=output_fn)
        seen.append(module(seeded(2, 6)).detach())
    bad = [{"input_fn": lambda inputs: inputs}, {"output_fn": lambda module, out, mesh, more: out}]
    return seen + [
        raises(lambda fn=fn: n.distribute_module(torch.nn.Linear(6, 4), line(), **fn), ValueError) for fn in bad
    ]


def modules_people_import(n):
    """Names by the modules that programs take them from, private ones among them."""
    module = lambda path: importlib.import_module(n.name + path)
    style, api, placed = module(".parallel.style"), module(".parallel.api"), module(".placement_types")
    same = [module(".device_mesh").DeviceMesh is dist.DeviceMesh, placed.Shard is n.Shard]
    same += [getattr(style, name) is getattr(n.parallel, name) for name in style.__all__]
    same.append(api.parallelize_module is n.parallel.parallelize_module)
    where = module("._utils").compute_local_shape_and_global_offset
    kinds, held = (n.Shard(0), n.Shard(1), n.Replicate()), []
    for shape in ((8, 4), (5, 7), (1, 6), (0, 4)):
        for mesh in (line(), grid()):
            held += [where(torch.Size(shape), mesh, p) for p in itertools.product(kinds, repeat=mesh.ndim)]
    return same, len(style.__all__), [tuple(map(tuple, one)) for one in held]


def tensors_made_by_their_spec(n):
    specs = importlib.import_module(n.name + "._dtensor_spec")
    d = n.distribute_tensor(seeded(8, 4), grid(), [n.Shard(0), n.Shard(1)])
    twice = n.DTensor(d._local_tensor * 2, d._spec, requires_grad=False)
    local = torch.ones(2, 3, requires_grad=True)
    meta = specs.TensorMeta(torch.Size((2 * dist.get_world_size(), 3)), (3, 1), torch.float32)
    made = n.DTensor(local, specs.DTensorSpec(line(), (n.Shard(0),), tensor_meta=meta), requires_grad=True)
    (made * 3).sum().backward()
    seen = [twice.full_tensor(), twice.requires_grad, made.requires_grad, made.is_leaf, local.grad is None]
    parts = n.DTensor.from_local(seeded(4, 2), grid(), [n.Shard(1), n.Partial()])
    return [*seen, made.grad.full_tensor(), parts._spec.sums, parts._spec.num_shards_map, d._spec.num_shards_map]


def styles_are_read_and_extended(n):
    parallel = n.parallel
    s, r = n.Shard(0), n.Replicate()

    class Mine(parallel.ColwiseParallel):
        """A style of its own that lays out what the style it extends was told."""

        def _enter(self, module, inputs, mesh):
            x = n.DTensor.from_local(inputs[0], mesh, self.input_layouts)
            return x.redistribute(placements=self.desired_input_layouts)

        def _leave(self, module, output, mesh):
            output = output.redistribute(placements=self.output_layouts)
            return output.to_local() if self.use_local_output else output

        def _cut(self, name, module, mesh):
            for key, param in [*module.named_parameters()]:
                module.register_parameter(key, nn.Parameter(n.distribute_tensor(param, mesh, [s])))

        def _apply(self, module, device_mesh):
            return n.distribute_module(module, device_mesh, self._cut, self._enter, self._leave)

    torch.manual_seed(2)
    made = parallel.parallelize_module(nn.Linear(4, 8), line(), Mine(output_layouts=r))
    whole = {"input_layouts": (s, None), "desired_input_layouts": (r, None)}
    named = {"input_kwarg_layouts": {"z": s}, "desired_input_kwarg_layouts": {"z": r}}
    out = {"output_layouts": s, "desired_output_layouts": r}
    styles = [
        parallel.ColwiseParallel(),
        parallel.RowwiseParallel(output_layouts=s, use_local_output=False),
        parallel.SequenceParallel(),
        parallel.PrepareModuleInput(),
        parallel.PrepareModuleInput(**whole, **named),
        parallel.PrepareModuleOutput(**out),
        parallel.PrepareModuleInputOutput(**whole, **out, use_local_input=True),
    ]
    told = [str(getattr(styles[-2], name)) for name in ("desired_output_layouts", "output_layouts", "use_local_output")]
    return made(seeded(3, 4)).detach() + 0, [*map(repr, styles)], told, str(styles[2].sequence_sharding)


def what_people_catch(n):
    value = seeded(8, 6)
    d = n.distribute_tensor(value, line(), [n.Shard(0)])
    other = n.distribute_tensor(seeded(5, 3), line(), [n.Shard(0)])
    errors = [
        (lambda: n.distribute_tensor(value, line(), [n.Shard(0), n.Shard(1)]), ValueError),
        (lambda: n.distribute_tensor(value, grid(), [n.Shard(0)]), ValueError),
        (lambda: n.distribute_tensor(d, line(), [n.Replicate()]), ValueError),
        (lambda: n.DTensor.from_local(value, line(), [n.Shard(3)]), RuntimeError),
        (lambda: n.distribute_tensor(value, line(), [n.Shard(2)]), IndexError),
        (lambda: n.zeros(8, -4, device_mesh=line(), placements=[n.Shard(0)]), RuntimeError),
        (lambda: d + other, RuntimeError),
        (lambda: d @ other, RuntimeError),
        (lambda: d.view(7, 7), RuntimeError),
        (lambda: d[9], IndexError),
        (lambda: torch.cat([d, other]), RuntimeError),
        (lambda: d.item(), RuntimeError),
        (lambda: bool(d), RuntimeError),
        (lambda: d.foo, AttributeError),
    ]
    return [raises(call, kind) for call, kind in errors]


def local_maps(n):
    d = n.distribute_tensor(seeded(8, 6), line(), [n.Shard(0)])
    w = n.distribute_tensor(seeded(6, 4), line(), [n.Replicate()])
    needs = ([n.Shard(0)], [n.Replicate()])
    map_ = n.experimental.local_map
    product = map_(lambda a, b: a @ b, out_placements=[n.Shard(0)], in_placements=needs, device_mesh=line())
    both = map_(
        lambda a, b: (a @ b, a.sum()),
        out_placements=([n.Shard(0)], [n.Partial()]),
        in_placements=needs,
        redistribute_inputs=True,
    )
    cut = w.redistribute(placements=[n.Shard(0)])
    return [x.full_tensor() for x in (product(d, w), *both(d, cut))], raises(lambda: product(d, cut), ValueError)


PROGRAMS = [
    functions_and_module_hooks, channels_last_stays,
    placements_are_values, distribute_on_a_line_and_a_grid, the_active_mesh, from_local_takes_parts,
    both_sides_have_their_own_autograd_identity, grad_placements, redistribute_on_a_grid, factories, sub_meshes,
    tensor_parallel_over_a_sub_mesh, attention_by_hand, sequence_parallel_block, training, copies_and_files,
    gradients_and_hooks, collectives_are_counted, who_counts_what, names_people_use, module_hooks_old_and_new,
    what_people_catch, local_maps, styles_are_read_and_extended, notes_on_tensors,
    modules_people_import, tensors_made_by_their_spec,
]  # fmt: skip


def with_both_libraries(rank, world_size):
    torchs, ours = namespaces()
    for program in PROGRAMS:
        torch.manual_seed(0)
        want = program(torchs)
        torch.manual_seed(0)
        compare(program(ours), want, program.__name__)


def test_a_sub_mesh_is_one_mesh_however_it_is_reached():
    mesh = simulate((2, 2, 1), axis_names=("pp", "dp", "tp"))
    assert mesh["dp"] is mesh["dp", "tp"]["dp"] is mesh["pp", "dp"]["dp"]
    assert mesh["pp", "dp"] is mesh["pp", "dp"]["pp", "dp"] and mesh["pp", "dp", "tp"] is mesh
    one, other = (distribute_tensor(torch.arange(4.0), m["dp"], [Shard(0)]) for m in (mesh, mesh["dp", "tp"]))
    assert (one + other).tolist() == [0, 2, 4, 6]
    with pytest.raises(MeshError, match="get_group"):
        mesh.get_group("dp")


@pytest.mark.parametrize("ranks", [2, 4])
def test_programs(ranks):
    run_ranks(with_both_libraries, ranks)
