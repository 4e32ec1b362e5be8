"""Styles and plans on simulated meshes of one to three axes, uneven sizes, and what goes wrong with a message."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import (  # fmt: skip
    DTensor,
    LayoutError,
    MeshError,
    RankTensor,
    Replicate,
    RuleError,
    Shard,
    debug,
    distribute_module,
    distribute_tensor,
    simulate,
)
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PlanError,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    data_parallel,
    input_reshard,
    parallelize_module,
)
from tests.workers import device_mesh, run_ranks

R = Replicate()
WIDTH, HIDDEN, HEADS, WORDS = 6, 10, 3, 7  # nothing divides by 4
AXES = {1: ("tp",), 2: ("dp", "tp"), 3: ("dp", "sp", "tp")}


class Attention(nn.Module):
    """Query, key and value in one layer."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(x).split(WIDTH, -1)
        q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH, padding_idx=2), nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleDict({name: Block() for name in ("one", "two")})
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


PLANS = {
    "tensor": {
        "words": RowwiseParallel(input_layouts=R), "places": ColwiseParallel(output_layouts=R),
        "blocks.*.attention.qkv": ColwiseParallel(parts=3, use_local_output=False), "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel(), "head": ColwiseParallel(output_layouts=R),
    },
    "distributed all through": {
        "words": ColwiseParallel(output_layouts=R, use_local_output=False),
        "blocks.*.attention.qkv": ColwiseParallel(parts=3, use_local_output=False),
        "blocks.*.attention.out": RowwiseParallel(use_local_output=False),
        "blocks.*.up": ColwiseParallel(use_local_output=False), "blocks.*.down": RowwiseParallel(use_local_output=False),
        "head": RowwiseParallel(use_local_output=False),
    },
    "sequence": {
        "words": RowwiseParallel(input_layouts=R, output_layouts=Shard(1), use_local_output=False),
        "places": PrepareModuleOutput(output_layouts=R, desired_output_layouts=R, use_local_output=False),
        "blocks.*.norm?": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=R),
        "blocks.*.attention.qkv": ColwiseParallel(parts=3, use_local_output=False),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=R),
    },
}  # fmt: skip


def net(tied=False):
    torch.manual_seed(0)
    return Net(tied).double()


TOKENS = torch.tensor([[0, 3, 6, 2, 5], [1, 1, 4, 0, 2], [6, 2, 0, 0, 3]])


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def one_value(x):
    """A plain tensor of what may be a value a rank."""
    return x.ranks[0] if hasattr(x, "ranks") else whole(x)


def same(got, want, where=""):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10, msg=lambda m: f"{where}: {m}")


def run(model, tokens):
    out = model(tokens)
    out.square().sum().backward()
    return out


def check_gradients(model, plain):
    for (name, mine), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        same(whole(mine.grad), want.grad, name)


def local_programs(mesh):
    """On a mesh of one axis the program sees local tensors, as with torch."""
    for name, plan in PLANS.items():
        model, plain = parallelize_module(net(), mesh, plan), net()
        got, want = run(model, TOKENS), run(plain, TOKENS)
        assert isinstance(got, DTensor) == (name == "distributed all through"), name
        same(one_value(got), want.detach(), name)
        check_gradients(model, plain)


def distributed_programs(mesh):
    """On a mesh of several axes tensors stay distributed: the batch over the first, the sequence over the second."""
    for name, plan in PLANS.items():
        for zero in (False, True):
            model, plain = parallelize_module(net(), mesh, plan, axis="tp"), net()
            distribute_module(model, mesh)
            for module in model.modules() if zero else ():
                for key, param in module.named_parameters(recurse=False):
                    if param.placements[-1].is_replicate():
                        laid = param.detach().redistribute(placements=[Shard(0), *param.placements[1:]])
                        module.register_parameter(key, nn.Parameter(laid))
            places = [Shard(0), Shard(1), R] if mesh.ndim == 3 else [Shard(0), R]
            got, want = run(model, distribute_tensor(TOKENS, mesh, places)), run(plain, TOKENS)
            assert isinstance(got, DTensor) and (zero or got.placements[0] == Shard(0)), "the batch is still cut"
            same(whole(got), want.detach(), f"{name} {zero}")
            check_gradients(model, plain)


def test_local_programs_simulated():
    for ranks in (1, 2, 3, 4, 8):
        local_programs(simulate(ranks, axis_names=("tp",)))


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 2), (2, 2, 2), (3, 2, 2)], ids=str)
def test_distributed_programs_simulated(shape):
    distributed_programs(simulate(shape, axis_names=AXES[len(shape)]))


def on_ranks(rank, world_size):
    local_programs(device_mesh((world_size,), ("tp",)))
    if world_size == 4:
        distributed_programs(device_mesh((2, 2), AXES[2]))
        distributed_programs(device_mesh((2, 1, 2), AXES[3]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_processes(ranks):
    run_ranks(on_ranks, ranks)


def test_on_a_part_of_a_simulated_mesh():
    """Every group along the other axis is a program of its own. A plain parameter stands for that of all of them: its
    gradient is the sum of theirs, which an all-reduce over that axis gives on processes."""

    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)
            self.down, self.after = nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x):
            return self.after(self.down(self.up(self.before(x)).tanh()))

    torch.manual_seed(0)
    plain = Between().double()
    model = copy.deepcopy(plain)
    mesh = simulate((3, 2), axis_names=("dp", "tp"))["tp"]
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    rows = torch.randn(3, 4, WIDTH, dtype=torch.float64)
    parts = list(rows)
    model(RankTensor([parts[rank // 2] for rank in range(6)])).square().sum().backward()
    plain(rows).square().sum().backward()
    for name in ("before", "after"):
        check_gradients(model.get_submodule(name), plain.get_submodule(name))
    for i, part in enumerate(parts):
        plain.zero_grad()
        plain(part).square().sum().backward()
        for rank, bias in enumerate(plain.up.bias.grad.chunk(2)):
            same(model.up.bias.grad.to_local().ranks[2 * i + rank], bias)


# ------------------------------------------------------------------ what a plan does to parameters


def test_placements_of_parameters():
    model = parallelize_module(net(), simulate(2), PLANS["tensor"])
    assert model.words.weight.placements == (Shard(0),) and model.places.weight.placements == (Shard(1),)
    up, down, qkv = model.blocks.one.up, model.blocks.two.down, model.blocks.one.attention.qkv
    assert up.weight.placements == up.bias.placements == (Shard(0),) and down.weight.placements == (Shard(1),)
    assert model.blocks.one.attention.out.bias.placements == (R,)
    assert qkv.weight.layout.held(0, (1,)) == ((3, 6), (9, 12), (15, 18)), "every rank has its heads of all three"
    assert not isinstance(model.blocks.one.norm1.weight, DTensor)
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters())


def test_fused_projections_attend_without_communication():
    mesh = simulate((1, 3), axis_names=("dp", "tp"))
    model = parallelize_module(net(), mesh, PLANS["tensor"], axis="tp").blocks.one.attention
    with debug.ledger() as log:
        model(distribute_tensor(torch.randn(2, 5, WIDTH, dtype=torch.float64), mesh))
    assert [(e.op, e.kind) for e in log] == [("redistribute", "all_reduce")], "only the row-parallel layer's sum"


def test_a_pair_of_layers_costs_one_all_reduce_each_way():
    mesh = simulate(4)
    model = parallelize_module(net(), mesh, PLANS["tensor"]).blocks.one
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    with debug.ledger() as log:
        model.down(F.silu(model.up(x))).sum().backward()
    assert [(e.kind, e.backward) for e in log] == [("all_reduce", False), ("all_reduce", True)]


def test_projections_of_one_input_gather_it_once():
    mesh = simulate((1, 2), axis_names=("dp", "tp"))
    layers = nn.ModuleList(nn.Linear(WIDTH, 4).double() for _ in range(3))
    parallelize_module(layers, mesh, {"*": ColwiseParallel()}, axis="tp")
    x = distribute_tensor(torch.randn(2, 4, WIDTH, dtype=torch.float64), mesh, [R, Shard(1)]).requires_grad_()
    for kinds in (["all_gather", "reduce_scatter"], ["all_gather", "reduce_scatter"], ["reduce_scatter"]):
        with debug.ledger() as log:
            sum(layer(x) for layer in layers).sum().backward()
        assert [e.kind for e in log] == kinds
        want = sum(layer.weight.full_tensor().sum(0) for layer in layers).expand(2, 4, -1)
        same(whole(x.grad), want.detach())
        x.grad = None
        if x._version == 0:
            with torch.no_grad():
                x.add_(1)  # written to: gathered anew


def test_inference_mode():
    mesh = simulate((1, 2), axis_names=("dp", "tp"))
    layer = parallelize_module(nn.Linear(WIDTH, 4).double(), mesh, ColwiseParallel(), axis="tp")
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    with torch.inference_mode():
        laid = distribute_tensor(x, mesh, [R, Shard(1)])
        inside = whole(layer(laid))
    with torch.no_grad():
        same(whole(layer(laid)), inside)
        same(inside.clone(), F.linear(x, layer.weight.full_tensor(), layer.bias.full_tensor()))


def test_tied_parameters_stay_tied():
    mesh = simulate((2, 2), axis_names=("dp", "tp"))
    agree = {"words": RowwiseParallel(input_layouts=R), "head": ColwiseParallel(output_layouts=R)}
    for plan in (agree, {"head": ColwiseParallel(output_layouts=R)}, {"words": RowwiseParallel(input_layouts=R)}):
        model, plain = parallelize_module(net(tied=True), mesh, plan, axis="tp"), net(tied=True)
        assert model.head.weight is model.words.weight and model.head.weight.placements == (R, Shard(0))
        distribute_module(model, mesh)
        run(model, distribute_tensor(TOKENS, mesh, [Shard(0), R]))
        run(plain, TOKENS)
        check_gradients(model, plain)
    model = net(tied=True)
    before = dict(model.named_parameters())
    with pytest.raises(
        LayoutError, match=r"words.weight and head.weight are one parameter, but .*Shard\(dim=1\).*Shard\(dim=0\)"
    ):
        parallelize_module(model, mesh, {"words": ColwiseParallel(), "head": ColwiseParallel()}, axis="tp")
    assert all(before[name] is p for name, p in model.named_parameters()), "a failed call changes nothing"
    assert not model.head._forward_pre_hooks and not model.words._forward_hooks
    same(model(TOKENS), net(tied=True)(TOKENS))


def test_frozen_and_meta_parameters():
    model = net()
    model.words.requires_grad_(False)
    parallelize_module(model, simulate(2), PLANS["tensor"])
    assert not model.words.weight.requires_grad and model.places.weight.requires_grad
    with torch.device("meta"):
        model = Net()
    parallelize_module(model, simulate(2), PLANS["tensor"])
    assert model.words.weight.device.type == "meta" and model.words.weight.placements == (Shard(0),)


def test_one_plan_after_another():
    """Two axes cut by two plans: columns over one, the same layer's rows over the other."""
    mesh = simulate((2, 2), axis_names=("x", "y"))
    layer = nn.Linear(WIDTH, HIDDEN).double()
    plain = copy.deepcopy(layer)
    parallelize_module(layer, mesh, ColwiseParallel(), axis="x")
    parallelize_module(layer, mesh, RowwiseParallel(), axis="y")
    assert layer.weight.placements == (Shard(0), Shard(1)) and layer.bias.placements == (Shard(0), R)
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    got = layer(distribute_tensor(x, mesh))
    same(whole(got), plain(x).detach())
    assert got.placements == (Shard(1), R)


def test_other_modules_by_the_dim_of_their_weight():
    mesh = simulate(4)
    bilinear, conv = nn.Bilinear(4, 5, 6).double(), nn.Conv2d(3, 6, 3).double()
    plain = copy.deepcopy(conv)
    parallelize_module(conv, mesh, ColwiseParallel(weight_dim=0, output_layouts=Shard(1), use_local_output=False))
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    got = conv(x)
    assert got.placements[0].is_shard(1)
    same(whole(got), plain(x).detach())
    with pytest.raises(
        RuleError, match="ColwiseParallel currently only support nn.Linear and nn.Embedding! Got Bilinear; say which dim"
    ):
        parallelize_module(bilinear, mesh, ColwiseParallel())
    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(NotImplementedError, match="Got ReLU"):
            parallelize_module(nn.ReLU(), mesh, style)


# ------------------------------------------------------------------ layouts by axis names


def test_layouts_by_axis_names():
    mesh = simulate((2, 2), axis_names=("dp", "tp"))
    layer, x = nn.Linear(WIDTH, HIDDEN).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    plain = copy.deepcopy(layer)
    parallelize_module(layer, mesh, ColwiseParallel(output_layouts={"dp": R, "tp": R}), axis="tp")
    got = layer(distribute_tensor(x, mesh, [Shard(0), R]))
    assert got.placements == (R, R)
    same(whole(got), plain(x).detach())
    module = parallelize_module(nn.Identity(), mesh, PrepareModuleInput(input_layouts={"dp": Shard(0)}, desired_input_layouts={"dp": R, "tp": Shard(1)}), axis="tp")  # fmt: skip
    local = distribute_tensor(x, mesh, [Shard(0), R]).to_local()
    assert module(local).placements == (R, Shard(1))
    same(whole(module(local)), x)
    with pytest.raises(MeshError, match="axis 'pp' is not one of"):
        parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel(input_layouts={"pp": R}), axis="tp")(x[:, :4])


def test_keyword_inputs_and_named_tuples():
    mesh = simulate(2)
    layer = parallelize_module(nn.Linear(WIDTH, HIDDEN).double(), mesh, ColwiseParallel(output_layouts=R))
    assert layer(input=torch.ones(2, WIDTH, dtype=torch.float64)).shape == (2, HIDDEN)

    class Largest(nn.Module):
        def forward(self, x):
            return x.max(0)

    style = PrepareModuleInputOutput(
        input_layouts=R, desired_input_layouts=Shard(0), output_layouts=(R, None), desired_output_layouts=(R, None)
    )
    values = parallelize_module(Largest(), mesh, style)(torch.tensor([[1.0, 5.0], [3.0, 2.0], [0.0, 0.0]]))
    assert values.values.tolist() == [3, 5] and values.indices.tolist() == [1, 0]


# ------------------------------------------------------------------ hooks


def test_copies_and_pickles_of_a_parallel_module():
    for mesh in (simulate(2), simulate((2, 2), axis_names=("dp", "tp"))["tp"]):
        model = parallelize_module(net(), mesh, PLANS["tensor"])
        want = one_value(model(TOKENS)).detach()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            same(one_value(twin(TOKENS)).detach(), want)
            with torch.no_grad():
                twin.head.weight.zero_()
        same(one_value(model(TOKENS)).detach(), want)


def test_input_reshard_keeps_a_part():
    for mesh, axis in ((simulate(4), None), (simulate((2, 2), axis_names=("dp", "tp")), "tp")):
        for dim in (0, 1, -1):
            mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)).double()
            plain = copy.deepcopy(mlp)
            parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}, axis=axis)
            input_reshard(mlp, mesh, dim, axis=axis)
            kept = []
            for model in (plain, mlp):
                x = torch.randn(5, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
                x.requires_grad_()
                given = x * 1 if model is plain else distribute_tensor(x.detach(), mesh).requires_grad_()
                doubled = given * 2
                kept.append(weakref.ref(doubled))
                out = model(doubled)
                del doubled
                with debug.ledger() as log:
                    out.square().sum().backward()
                grad = x.grad if model is plain else given.grad
                kept.append(whole(grad))
            same(kept[3], kept[1], f"dim {dim}")
            check_gradients(mlp, plain)
            assert [e.kind for e in log if e.op == "input_reshard"] == ["all_gather"] and kept[2]() is None


def test_input_reshard_frees_the_whole():
    """The memory of the input goes with the last name for it; only parts of it wait for the backward pass."""
    mesh = simulate(4)
    layer = parallelize_module(nn.Linear(WIDTH, HIDDEN), mesh, ColwiseParallel(use_local_output=False))
    freed = []
    for reshard in (False, True):
        module = input_reshard(nn.Sequential(copy.deepcopy(layer)), mesh, 0 if reshard else None)
        x = distribute_tensor(torch.randn(8, WIDTH), mesh)
        memory = weakref.ref(x.to_local().ranks[0].untyped_storage())
        out = module(x)
        del x
        gc.collect()
        freed.append(memory() is None)
        out.sum().backward()
    assert freed == [False, True]


def test_input_reshard_survives_a_failing_forward():
    class Failing(nn.Module):
        def forward(self, x):
            raise RuntimeError("failed")

    module = input_reshard(Failing(), simulate(2), 0)
    with pytest.raises(RuntimeError, match="failed"):
        module(torch.ones(2, 2))
    x = torch.ones(2, requires_grad=True)
    assert type((x * x).grad_fn._saved_self) is torch.Tensor, "the hooks are gone"


# ------------------------------------------------------------------ messages


def test_a_key_that_matches_nothing_warns():
    for key, text in (
        ("nowhere", r"Parallelize plan key 'nowhere' could not be resolved: no submodule of Net matches it.*children of Net are \['words', 'places', 'blocks', 'head'\]"),
        ("blocks.*.mlp", r"'blocks.\*.mlp' could not be resolved: no submodule of Net.*children of blocks.\* are \['norm1', 'norm2', 'attention', 'up', 'down'\]"),
        ("head.weight.x", "head has no children, so no 'weight'"),
    ):  # fmt: skip
        with pytest.warns(UserWarning, match=text) as caught:
            parallelize_module(net(), simulate(2), {key: ColwiseParallel()})
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize_module(net(), simulate(2), {"blocks.*.attention.*": PrepareModuleOutput(output_layouts=R, desired_output_layouts=R)})  # fmt: skip
    with pytest.warns(UserWarning, match="No parallelize_plan is provided"):
        parallelize_module(net(), simulate(2))


class Nothing(ParallelStyle):
    def _apply(self, module, device_mesh):
        return module


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: parallelize_module("net", simulate(2), Nothing()), TypeError, "module: expected a torch.nn.Module, got str"),
        (lambda: parallelize_module(net(), simulate(2), "up"), TypeError, r"Expect Union\[ParallelStyle, Dict\[str, ParallelStyle\]\] for parallelize_plan, <class 'str'> found!"),
        (lambda: parallelize_module(net(), simulate(2), {"head": "cols"}), PlanError, r"<class 'str'> found! It is at parallelize_plan\['head'\]"),
        (lambda: parallelize_module(net(), simulate(2), {1: Nothing()}), PlanError, r"parallelize_plan\[1\]"),
        (lambda: parallelize_module(net(), simulate((2, 2)), Nothing()), MeshError, r"device_mesh: .* has several axes; say which one the plan cuts, as axis='1'"),
        (lambda: parallelize_module(net(), simulate(2), Nothing(), axis="tp"), MeshError, "axis 'tp' is not one of"),
        (lambda: parallelize_module(net(), None, Nothing()), MeshError, "No device mesh is currently active"),
        (lambda: parallelize_module(net(), simulate(2), {"head": ColwiseParallel()}, src_data_rank=5), LayoutError, "src_data_rank=5"),
        (lambda: ColwiseParallel(input_layouts="rows"), ValueError, "input_layouts = 'rows' is not a placement"),
        (lambda: RowwiseParallel(output_layouts={"tp": 3}), ValueError, r"output_layouts\['tp'\] = 3 is not a placement"),
        (lambda: ColwiseParallel(parts=0), ValueError, "parts must be an int > 0, got 0"),
        (lambda: parallelize_module(nn.Linear(3, 4), simulate(2), ColwiseParallel(parts=3)), ValueError, r"parts=3 do not divide dim 0 .* \(4, 3\)"),
        (lambda: SequenceParallel(sequence_dim="last"), ValueError, "dim must be an int, got 'last'"),
        (lambda: PrepareModuleInput(input_layouts=R), ValueError, "should not be None! input_layouts are given, so say by desired_input_layouts"),
        (lambda: PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=R), ValueError, "input_layouts and desired_input_layouts should have same length! They have 2 and 1"),
        (lambda: PrepareModuleInput(input_kwarg_layouts={"x": R}), ValueError, "same length! input_kwarg_layouts are given, so say by desired_input_kwarg_layouts"),
        (lambda: PrepareModuleInput(input_kwarg_layouts={"x": R}, desired_input_kwarg_layouts={"y": R}), ValueError, r"the same names: they are given for \['x'\] and \['y'\]"),
        (lambda: PrepareModuleInput(input_kwarg_layouts=R, desired_input_kwarg_layouts=R), ValueError, "input_kwarg_layouts = .*: expected a dict"),
        (lambda: PrepareModuleOutput(output_layouts=(R,), desired_output_layouts=(R, R)), ValueError, "output_layouts and desired_output_layouts should have same length! They have 1 and 2"),
        (lambda: input_reshard(nn.Identity(), simulate(2), "rows"), ValueError, "input_reshard_dim: expected an int or None, got 'rows'"),
    ],
)  # fmt: skip
def test_messages(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


def test_messages_of_calls():
    mesh = simulate(2)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    two = parallelize_module(
        nn.Identity(), mesh, PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(R, R))
    )
    with pytest.raises(LayoutError, match="input_layouts: 2 given, but Identity was called with 1 positional inputs"):
        two(x)
    two = parallelize_module(
        nn.Identity(), mesh, PrepareModuleOutput(output_layouts=(R, R), desired_output_layouts=(R, R))
    )
    with pytest.raises(LayoutError, match="output_layouts: 2 given, but Identity returned 1 outputs"):
        two(x)
    layer = parallelize_module(nn.Linear(WIDTH, 4).double(), mesh, ColwiseParallel())
    with pytest.raises(LayoutError, match="ColwiseParallel: the first input of Linear is a list, not a tensor"):
        layer([1.0])
    with pytest.raises(LayoutError, match="ColwiseParallel: Linear was called without an input"):
        layer()
    with pytest.raises(MeshError, match=r"a tensor on mesh\(0=4\) meets a module parallelized over mesh\(0=2\)"):
        layer(distribute_tensor(x, simulate(4)))


# -- under data parallelism --------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("shard", ["none", "parameters"])
@pytest.mark.parametrize("frozen", [(), ("head.weight", "head.bias")])
def test_local_outputs_meet_data_parallel_layers(shape, shard, frozen):
    """In a simulation the ranks along "tp" share what left the plan; each rank's own layer takes its copy of it."""
    x, one = torch.randn(4, 6, dtype=torch.float64), Residual().double()
    for name in frozen:
        one.get_parameter(name).requires_grad_(False)
    mesh, many = simulate(shape, axis_names=("dp", "tp")), copy.deepcopy(one)
    parallelize_module(many, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    data_parallel(many, mesh["dp"], shard)
    for model in (one, many):
        model(x).square().mean().backward()
    for (name, got), want in zip(many.named_parameters(), one.parameters(), strict=True):
        if name not in frozen:
            torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=1e-12, atol=1e-14)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 7), nn.Linear(7, 6), nn.Linear(6, 5)

    def forward(self, x):
        hidden = self.down(self.up(x).tanh())
        return self.head(hidden.tanh()) * hidden.sum(-1, keepdim=True)
