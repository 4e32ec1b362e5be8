"""Private names of torch's that programs call: the same script with torch's own and with ours gives the same."""

import copy

import pytest
import torch
import torch.distributed.tensor as theirs
import torch.distributed.tensor._collective_utils as their_collectives
import torch.distributed.tensor._dtensor_spec as their_spec
import torch.distributed.tensor._ops.utils as their_ops
import torch.distributed.tensor._utils as their_utils
from torch import nn
from torch.distributed.tensor.placement_types import _StridedShard as TheirStrided

import shardwise
from shardwise import (
    LayoutError,
    Replicate,
    Shard,
    _collective_utils,
    _utils,
    debug,
    distribute_module,
    distribute_tensor,
    simulate,
    strict,
)
from shardwise._dtensor_spec import DTensorSpec, TensorMeta
from shardwise._ops import utils
from shardwise.experimental import local_map
from shardwise.parallel import (
    PrepareModuleInput,
    PrepareModuleOutput,
    fully_shard,
    loss_parallel,
    parallelize_module,
    register_fsdp_forward_method,
)
from shardwise.placement_types import _StridedShard
from tests.compat.common import grid, line
from tests.versions import since_213
from tests.workers import run_ranks


def words(function, *args, **kwargs):
    """What a call gives; of an error its words."""
    try:
        return function(*args, **kwargs)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return f"error: {error}"


def of_placements(of, strided, rank):
    """The methods of placements, on a line of 4 ranks and over one axis of a grid."""
    cut, places, ten = of.Shard(0), [of.Shard(0), of.Shard(1), strided(0, split_factor=2)], torch.arange(10.0)
    matrix = torch.arange(42.0).reshape(6, 7)
    for place, pads, n in ((p, b, n) for p in places for b in (p is not places[2], False) for n in (1, 2, 4, 5, 8)):
        yield place._split_tensor(matrix, n, with_padding=pads, contiguous=True)
    yield [cut._local_shard_size_and_offset(n, 4, r) for n in (10, 2, 0) for r in range(4)]
    yield [places[2].local_shard_size_and_offset(10, 2, r) for r in range(2)]
    for mesh, axis, k in ((line(), 0, 4), (grid(), 1, 2), (grid(), 0, 2)):
        at, whole = mesh.get_coordinate()[axis], ten + 100 * rank
        for source in (0, 1, None):
            yield cut._shard_tensor(whole, mesh, axis, src_data_rank=source)
            yield of.Replicate()._replicate_tensor(whole.clone(), mesh, axis, src_data_rank=source)
        mine = torch.tensor_split(ten, [(-(-10 // k)) * i for i in range(1, k)])[at] + rank
        yield cut._to_replicate_tensor(mine, mesh, axis, [10])
        yield cut._replicate_to_shard(whole, mesh, axis, at)
        yield cut._reduce_shard_tensor(whole, mesh, "sum", axis)
        for op in ("sum", "avg", "max"):
            yield of.Partial(op)._reduce_value(whole, mesh, axis)
            yield of.Partial(op)._partition_value(whole, mesh, axis)
        yield of.Partial()._reduce_shard_value(whole, mesh, axis, cut)


def of_modules(of, spec, collectives, sizes, ops, rank):
    """Functions about sizes, parts and costs."""
    mesh, row, matrix = grid(), line(), torch.arange(42.0).reshape(6, 7)
    both = [of.Shard(0), of.Shard(0)], [of.Shard(1), of.Replicate()], [of.Shard(0), of.Partial()]
    for places in both:
        coords = list(mesh.get_coordinate())
        yield sizes._compute_local_shape_and_global_offset((7, 6), (2, 2), coords, places)
        yield sizes.compute_local_shape_and_global_offset((3, 6), mesh, places)
        yield words(sizes.compute_global_tensor_info, torch.ones(2, 3).t(), mesh, places)
        meta = spec.TensorMeta(torch.Size([7, 6]), (6, 1), torch.float32)
        laid = spec.DTensorSpec(mesh, tuple(places), tensor_meta=meta)
        yield str(laid), laid.sums, laid.num_shards, laid.shape, laid.stride, laid.shard_order
        if places is not both[0]:  # torch refuses two axes that cut one dim
            yield laid.dim_map
        yield ops.is_tensor_shardable((1, 6), laid), ops.is_tensor_evenly_shardable((8, 5), laid)
        yield ops.is_tensor_partial(laid), ops.is_tensor_dim_sharded(laid, 1), collectives.spec_to_bytes(laid)
    yield sizes.compute_local_tensor_info(torch.ones(8, 6).t(), mesh, [of.Shard(0), of.Shard(1)])
    yield sizes.compute_local_stride((1, 6), (3, 2)), sizes.normalize_to_torch_size(((1, 2),))
    yield sizes.compute_global_tensor_shape(torch.Size([rank + 1, 2]), row, [of.Shard(0)])
    yield words(sizes.compute_global_tensor_shape, torch.Size([2, rank + 1]), row, [of.Shard(0)])
    yield ops.infer_broadcast_dims_map(torch.Size([2, 3, 4]), torch.Size([3, 1])), ops.normalize_dims((-1, 0), 2)
    yield ops.map_placements_after_broadcast((of.Shard(1), of.Partial()), torch.Size([2, 3, 4]), [-1, 0, 1])
    yield collectives.pad_tensor(matrix, 0, 2), collectives.unpad_tensor(matrix, 1, 2)
    yield collectives.fill_empty_tensor_to_shards([matrix], 1, 2)
    yield collectives.shard_dim_alltoall(torch.arange(8.0).reshape(2, 4) + rank, 0, 1, row, 0)
    for axis in (0, 1):
        sent, got = torch.full((2,), float(rank)), torch.empty(1)
        collectives.mesh_broadcast(sent, mesh, mesh_dim=axis, group_src=1)
        collectives.mesh_scatter(got, [torch.ones(1) * i + 10 * rank for i in range(2)], mesh, mesh_dim=axis)
        yield sent, got
    yield of_api(of)._shard_tensor(torch.arange(8.0) + rank, [of.Shard(0)], row).to_local()


def of_api(of):
    return theirs._api if of is theirs else shardwise._api


def alike(rank, world_size):
    pairs = [
        (of_placements(theirs, TheirStrided, rank), of_placements(shardwise, _StridedShard, rank)),
        (
            of_modules(theirs, their_spec, their_collectives, their_utils, their_ops, rank),
            of_modules(shardwise, shardwise._dtensor_spec, _collective_utils, _utils, utils, rank),
        ),
    ]
    seen = 0
    for want, got in pairs:
        for step, (a, b) in enumerate(zip(want, got, strict=True)):
            torch.testing.assert_close(b, a, msg=lambda text, step=step: f"{step}: {text}") if isinstance(
                a, torch.Tensor
            ) else check_same(a, b, step)
            seen += 1
    return seen


def check_same(a, b, step):
    if isinstance(a, (tuple, list)) and any(isinstance(x, (torch.Tensor, list, tuple)) for x in a):
        assert len(a) == len(b), step
        for x, y in zip(a, b, strict=True):
            check_same(x, y, step)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), (step, a, b)
    else:
        assert a == b, (step, a, b)


@since_213("private functions take other arguments")
def test_alike_on_processes():
    assert min(run_ranks(alike, 4)) > 80


def test_a_spec_is_a_value_that_can_be_changed():
    x = distribute_tensor(torch.ones(4, 2), simulate((2, 2)), [Shard(0), Replicate()])
    spec, same = x._spec, x._spec
    assert spec == same and hash(spec) == hash(same) and spec is not same
    spec.placements = (Shard(1), Replicate())
    assert spec != same and hash(spec) != hash(same) and x.placements == (Shard(0), Replicate())
    other = same.shallow_copy_with_tensor_meta(TensorMeta(torch.Size([8]), (1,), torch.int64))
    assert other.placements == same.placements and other.shape == (8,) and str(other) == "Spec(i64[8](S(0)R))"
    assert DTensorSpec.from_dim_map(same.mesh, [0, -1], [], same.tensor_meta) == same
    with pytest.raises(ValueError, match="tensor_meta is not set"):
        _ = DTensorSpec(same.mesh, same.placements).shape


def test_costs_follow_the_bytes():
    mesh, meta = simulate((2, 2)), TensorMeta(torch.Size([8, 6]), (6, 1), torch.float32)
    cut, whole, pending = (
        DTensorSpec(mesh, (place, Replicate()), meta) for place in (Shard(0), Replicate(), shardwise.Partial())
    )
    cost = _collective_utils.redistribute_cost
    assert cost(cut, cut) == cost(whole, cut) == 0 < cost(cut, whole) < cost(pending, whole)
    assert cost(pending, cut) < cost(pending, whole) and cost(cut, pending) == float("inf")


def test_explicit_moves_only():
    mesh = simulate(2)
    a, b = (distribute_tensor(torch.ones(4, 4), mesh, [Shard(dim)]) for dim in (0, 1))
    with _utils.ExplicitRedistributionContext():
        with pytest.raises(RuntimeError, match="would communicate"):
            _ = a + b
        with _utils.ExplicitRedistributionContext(enable=False):
            _ = a + b
        a.redistribute(placements=[Replicate()])
    with strict(), pytest.raises(LayoutError, match="Invalid mode warn"):
        _utils.ExplicitRedistributionContext(mode="warn")
    _ = a + b


def test_the_words_that_programs_look_for():
    mesh, x = simulate(2), torch.ones(4, 4)
    laid = distribute_tensor(x, mesh, [Shard(0)])
    for error, text, call in (
        (
            ValueError,
            "`placements` must have the same length as `device_mesh.ndim`! Found placements length: 1, and device_mesh.ndim: 2.",
            lambda: distribute_tensor(x, simulate((2, 2)), [Shard(0)]),
        ),
        (RuntimeError, "placements is needed for redistribute!", laid.redistribute),
        (
            RuntimeError,
            "`distribute_tensor` should be used to distribute leaf tensors! but found non-leaf",
            lambda: distribute_tensor(x.requires_grad_() * 2, mesh, [Shard(0)]),
        ),
        (ValueError, "to a different device mesh", lambda: distribute_tensor(laid, simulate(3), [Shard(0)])),
        (ValueError, "to a different placements", lambda: distribute_tensor(laid, mesh, [Replicate()])),
        (
            ValueError,
            "input_fn should take in 3 arguments, but got 1 arguments!",
            lambda: distribute_module(nn.ReLU(), mesh, None, lambda a: a),
        ),
        (
            AssertionError,
            "desired module inputs should not be None!",
            lambda: PrepareModuleInput(input_layouts=Shard(0)),
        ),
        (
            AssertionError,
            "input_kwarg_layouts and desired_input_kwarg_layouts should have same length!",
            lambda: PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)}),
        ),
        (
            TypeError,
            r"Expect Union\[ParallelStyle, Dict\[str, ParallelStyle\]\] for parallelize_plan, <class 'int'> found!",
            lambda: parallelize_module(nn.ReLU(), mesh, 3),
        ),
        (
            ValueError,
            "argument 0 in local_map has a mismatched placements: arg placements is",
            lambda: local_map(torch.abs, [Replicate()], ([Replicate()],))(laid),
        ),
        (
            AssertionError,
            "expects placements but received None!",
            lambda: local_map(torch.abs, [Shard(0)], (None,))(laid),
        ),
        (
            AssertionError,
            "input_layouts and desired_input_layouts should have same length!",
            lambda: PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=(Replicate(), None)),
        ),
        (
            AssertionError,
            "output_layouts and desired_output_layouts should have same length!",
            lambda: PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=(Replicate(), None)),
        ),
        (ValueError, "module inputs and input_layouts should have same length!", lambda: prepared(mesh)(x, x)),
        (ValueError, "does not support containers", lambda: fully_shard(nn.ModuleList([nn.ReLU()]), mesh=mesh)),
        (ValueError, "expects a 1D or 2D", lambda: fully_shard(nn.Linear(2, 2), mesh=simulate((2, 1, 1)))),
        (AssertionError, "can only be applied to a module once", lambda: fully_shard(sharded(mesh), mesh=mesh)),
        (
            ValueError,
            "Expects FSDPModule but got <class 'torch.nn.modules.activation.ReLU'>",
            lambda: sharded(mesh).set_modules_to_forward_prefetch([nn.ReLU()]),
        ),
        (
            ValueError,
            "FSDPLinear.* does not have a method nothing",
            lambda: register_fsdp_forward_method(sharded(mesh), "nothing"),
        ),
        (ValueError, "should be a bool or an int representing", lambda: sharded(mesh, reshard_after_forward="x")),
        (ValueError, "should be a factor of 2, not 3", lambda: sharded(mesh, reshard_after_forward=3)),
        (
            ValueError,
            "Invalid shard_placement_fn result: R",
            lambda: sharded(mesh, shard_placement_fn=lambda p: Replicate()),
        ),
        (
            AssertionError,
            "Shard dim 5 is invalid for 2D tensor: torch.Size",
            lambda: sharded(mesh, shard_placement_fn=lambda p: Shard(5)),
        ),
    ):
        with pytest.raises(error, match=text):
            call()
    with pytest.warns(match="could not be resolved"):
        parallelize_module(nn.ReLU(), mesh, {"nowhere": PrepareModuleInput()})


def sharded(mesh, **options):
    return fully_shard(nn.Linear(2, 2), mesh=mesh, **options)


def prepared(mesh):
    style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    return parallelize_module(nn.Bilinear(4, 4, 2), mesh, style)


def test_a_module_is_distributed_once():
    mesh, seen = simulate(2), []
    module = distribute_module(nn.ReLU(), mesh, None, lambda module, inputs, mesh: seen.append(1))
    for again in (module, copy.deepcopy(module)):
        with pytest.raises(RuntimeError, match="distribute_module should only be called once on a module"):
            distribute_module(again, mesh)
    module(torch.ones(2))
    assert seen == [1]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_parallel_reduces_three_numbers_a_sample_and_none_in_backward(reduction):
    mesh, target = simulate(4), torch.tensor([0, 3, 5, 7])
    logits = distribute_tensor(torch.randn(4, 8), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        with debug.CommDebugMode() as forward:
            loss = nn.functional.cross_entropy(logits, target, reduction=reduction)
        with debug.CommDebugMode() as backward:
            loss.sum().backward()
    assert dict(forward.get_comm_counts()) == {torch.ops.c10d_functional.all_reduce: 3}
    assert backward.get_total_counts() == 0
