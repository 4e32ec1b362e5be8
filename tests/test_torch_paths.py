"""The modules that exist for torch's paths: what a program imports by them is there, and is what it should be."""

import importlib
import importlib.util
import pickle
import sys

import pytest
import torch

import shardwise
from shardwise import LayoutError, Replicate, Shard
from shardwise.sharded import metadata
from shardwise.torch_paths import TABLE
from tests.only_torch import run_with_torch

NAMES = {
    "_ops": "utils",
    "_ops.utils": "as_list infer_broadcast_dims_map is_tensor_dim_sharded is_tensor_evenly_shardable is_tensor_evenly_shardable_on_dim is_tensor_partial is_tensor_shardable map_placements_after_broadcast normalize_dim normalize_dims prod shift_shard_dims_after_insert shift_shard_dims_after_remove",
    "_collective_utils": "MeshTopoInfo allgather_cost allreduce_cost check_tensor_meta fill_empty_tensor_to_shards mesh_broadcast mesh_scatter pad_tensor redistribute_cost reduce_scatter_cost shard_dim_alltoall spec_to_bytes unpad_tensor",
    "parallel.input_reshard": "input_reshard",
    "experimental._context_parallel._load_balancer": "_HeadTailLoadBalancer _PTRRLoadBalancer",
    "_api": "DTensor DTensorSpec DeviceMesh Partial Placement Replicate Shard TensorMeta _shard_tensor compute_local_shape_and_global_offset distribute_module distribute_tensor empty full ones rand randn redistribute_local_tensor zeros",
    "_dtensor_spec": "DTensorSpec ShardOrder ShardOrderEntry TensorMeta",
    "_op_schema": "DTensorSpec OpSpec OpStrategy Placement PlacementList RuntimeSchemaInfo TensorMeta",
    "_random": "is_rng_supported_mesh manual_seed",
    "_redistribute": "Redistribute disable_redistribute_transform_optimization redistribute_local_tensor use_min_cost_redistribution_plan",
    "_utils": "ExplicitRedistributionContext _compute_local_shape_and_global_offset assert_no_mixed_partial_types compute_global_tensor_info compute_global_tensor_shape compute_local_shape_and_global_offset compute_local_stride compute_local_tensor_info normalize_to_torch_size try_find_mesh_from_args",
    "debug._comm_mode": "CommDebugMode",
    "debug._visualize_sharding": "visualize_sharding",
    "device_mesh": "DeviceMesh init_device_mesh",
    "experimental._attention": "_RotateMethod _context_parallel_shard _cp_options context_parallel context_parallel_unshard set_rotate_method",
    "experimental._context_parallel": "_RotateMethod _attention _context_parallel_shard _cp_options context_parallel context_parallel_unshard set_rotate_method",
    "experimental._context_parallel._attention": "_RotateMethod _context_parallel_shard _cp_options context_parallel context_parallel_unshard set_rotate_method",
    "experimental._func_map": "local_map",
    "experimental._register_sharding": "register_sharding",
    "parallel.api": "parallelize_module",
    "parallel.style": "ColwiseParallel ParallelStyle PrepareModuleInput PrepareModuleInputOutput PrepareModuleOutput RowwiseParallel SequenceParallel",
    "placement_types": "DTensorSpec Partial Placement Replicate Shard TensorMeta _Partial _StridedShard fill_empty_tensor_to_shards mesh_broadcast mesh_scatter pad_tensor shard_dim_alltoall unpad_tensor",
    "sharded._utils": "ShardMetadata narrow_tensor narrow_tensor_by_index",
    "sharded.api": "ChunkShardingSpec ShardedTensor Sharder ShardingPlan ShardingSpec _collect_local_shard _get_current_process_group _reshard_output _shard_tensor load_with_process_group shard_module shard_parameter",
    "sharded.checkpoint": "FileSystemReader FileSystemWriter load save",
    "sharded.common_op_utils": "_basic_validation _register_default_op",
    "sharded.op_registry_utils": "_basic_validation _decorator_func _register_op",
    "sharded.sharded_optim": "api ShardedOptimizer ShardedTensor named_params_with_sharded_tensor",
    "sharded.sharded_optim.api": "ShardedOptimizer ShardedTensor",
    "sharded.sharded_tensor": "Shard ShardMetadata ShardedTensor ShardedTensorBase ShardedTensorMetadata ShardingSpec TensorProperties _CUSTOM_SHARDED_OPS _decorator_func _ops _sharded_op_impl allclose api constant_ custom_sharded_op_impl empty equal full init_from_local_shards kaiming_uniform_ metadata normal_ ones pre_load_state_dict_hook rand randn reshard shard sharded_embedding sharded_embedding_bag state_dict_hook uniform_ utils zeros",
    "sharded.sharded_tensor._ops": "allclose binary_cmp constant_ equal init kaiming_uniform_ misc_ops normal_ sharded_embedding sharded_embedding_bag tensor_ops uniform_",
    "sharded.sharded_tensor._ops._common": "Shard ShardedTensor _basic_validation _register_sharded_op_on_local_shards _sharded_op_common _sharded_op_impl",
    "sharded.sharded_tensor._ops.binary_cmp": "ShardedTensor _communicate_result allclose binary_cmp equal",
    "sharded.sharded_tensor._ops.init": "constant_ kaiming_uniform_ normal_ register_tensor_creation_op tensor_like_creation_op_map uniform_ validate_param",
    "sharded.sharded_tensor._ops.misc_ops": "tensor_has_compatible_shallow_copy_type",
    "sharded.sharded_tensor._ops.tensor_ops": "Shard ShardedTensor _register_default_op _register_sharded_op_on_local_shards _sharded_op_impl same_dtype sharded_clone sharded_deepcopy sharded_detach sharded_inplace_copy sharded_type_as sharded_type_as_check st_is_meta tensor_device tensor_requires_grad_set",
    "sharded.sharded_tensor.api": "_CUSTOM_SHARDED_OPS _dispatch_custom_op _flatten_tensor_size _has_custom_op _parse_and_validate_remote_device _validate_output_tensor_for_gather build_global_metadata build_metadata_from_local_shards check_tensor reshard_local_shard reshuffle_local_shard validate_non_overlapping_shards_metadata Shard ShardMetadata ShardedTensor ShardedTensorBase ShardedTensorMetadata TensorProperties _create_tensor_from_params _sharded_tensor_map",
    "sharded.sharded_tensor.logger": "_get_logging_handler _get_or_create_logger _log_handlers",
    "sharded.sharded_tensor.logging_handlers": "_log_handlers",
    "sharded.sharded_tensor.metadata": "MEM_FORMAT_ENCODING ShardMetadata ShardedTensorMetadata TensorProperties",
    "sharded.sharded_tensor.reshard": "Shard ShardMetadata build_reshard_metadata get_chunked_dim_size get_idx_from_placements get_split_size reshard_local_shard reshuffle_local_shard",
    "sharded.sharded_tensor.shard": "Shard ShardMetadata",
    "sharded.sharded_tensor.utils": "TensorProperties _flatten_tensor_size _parse_and_validate_remote_device _raise_if_mismatch _validate_output_tensor_for_gather build_global_metadata build_metadata_from_local_shards check_tensor recalc_global_sharded_tensor_metadata validate_non_overlapping_shards_metadata",
    "sharded.sharder": "Sharder",
    "sharded.saving": "ProcessGroupState _unpickled",
    "sharded.sharding_plan": "api ShardingPlan ShardingPlanner",
    "sharded.sharding_plan.api": "Sharder ShardingPlan ShardingPlanner ShardingSpec",
    "sharded.sharding_spec": "ChunkShardingSpec DevicePlacementSpec EnumerableShardingSpec PlacementSpec ShardMetadata ShardingSpec _infer_sharding_spec_from_shards_metadata api chunk_sharding_spec custom_sharding_spec_op",
    "sharded.sharding_spec._internals": "ShardMetadata _check_shard_metadata_pair_overlap _find_1d_overlapping_shards _find_nd_overlapping_shards check_tensor get_chunk_sharding_params get_chunked_dim_size get_split_size validate_non_overlapping_shards_metadata",
    "sharded.sharding_spec.api": "_CUSTOM_SHARDING_SPEC_OPS DevicePlacementSpec EnumerableShardingSpec PlacementSpec ShardMetadata ShardingSpec _decorator_func _dispatch_custom_op _has_custom_op _infer_sharding_spec_from_shards_metadata check_tensor custom_sharding_spec_op get_chunked_dim_size get_split_size validate_non_overlapping_shards_metadata",
    "sharded.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec Shard ShardMetadata ShardingSpec _parse_and_validate_remote_device get_chunked_dim_size get_split_size narrow_tensor",
    "sharded.sharding_spec.chunk_sharding_spec_ops": "embedding embedding_bag",
    "sharded.sharding_spec.chunk_sharding_spec_ops.embedding": "ChunkShardingSpec ShardedTensor sharded_embedding",
    "sharded.sharding_spec.chunk_sharding_spec_ops.embedding_bag": "ChunkShardingSpec ShardedTensor sharded_embedding_bag",
}
MODULES = {path.rpartition(".")[2] for path in NAMES}


def test_the_table_has_every_path():
    assert set(TABLE) == set(NAMES)


@pytest.mark.parametrize("path", NAMES)
def test_every_name_is_there(path):
    module = importlib.import_module(f"shardwise.{path}")
    names = NAMES[path].split()
    listed = {}
    exec(f"from shardwise.{path} import *", listed)
    for name in names:
        found = getattr(module, name)
        assert name in dir(module) or path == "sharded.checkpoint"
        assert path == "sharded.checkpoint" or listed[name] is found
        if name in MODULES and not callable(found):
            assert found is sys.modules[f"shardwise.{path}.{name}"]
    with pytest.raises(AttributeError, match=f"module 'shardwise.{path}' has no attribute 'nowhere'|checkpoint"):
        module.nowhere  # noqa: B018
    with pytest.raises(ImportError):
        exec(f"from shardwise.{path} import nowhere")


@pytest.mark.parametrize("path", NAMES)
def test_every_module_is_an_attribute_and_has_a_spec(path):
    found = shardwise
    for name in path.split("."):
        found = getattr(found, name)
    if path == "parallel.input_reshard":  # the function, as in torch's documentation; the module by its import
        assert found is shardwise.parallel.input_reshard
        found = sys.modules[f"shardwise.{path}"]
        assert found.input_reshard is shardwise.parallel.input_reshard
    assert found is sys.modules[f"shardwise.{path}"] is importlib.import_module(f"shardwise.{path}")
    assert importlib.util.find_spec(f"shardwise.{path}").name == found.__name__ == f"shardwise.{path}"
    is_package = path == "sharded.checkpoint" or any(other.startswith(path + ".") for other in NAMES)
    assert hasattr(found, "__path__") == is_package


def test_a_name_is_the_thing_itself():
    from shardwise.placement_types import Shard
    from shardwise.sharded.sharded_tensor._ops.tensor_ops import ShardedTensor
    from shardwise.sharded.sharding_spec._internals import ShardMetadata

    assert Shard is shardwise.Shard and ShardMetadata is metadata.ShardMetadata
    assert ShardedTensor is shardwise.sharded.ShardedTensor is shardwise.sharded.sharded_tensor.ShardedTensor
    assert shardwise.sharded.sharded_tensor.api.ShardedTensor is ShardedTensor


def test_a_class_is_unpickled_by_its_path():
    text = b"cshardwise.sharded.sharded_tensor.metadata\nShardMetadata\n."
    assert pickle.loads(text) is metadata.ShardMetadata


@pytest.mark.parametrize("path", ["sharded.sharding_spec._internals", "sharded.sharded_tensor._ops.init", "_utils"])
def test_the_deepest_module_can_be_imported_first(path):
    program = f"import shardwise.{path} as m; print(len(dir(m)))"
    done = run_with_torch(program)
    assert done.returncode == 0 and int(done.stdout) > 1, done.stderr


def test_reloading_keeps_the_names():
    module = importlib.reload(importlib.import_module("shardwise.placement_types"))
    assert module.Shard is shardwise.Shard


# -- functions that only these paths have ------------------------------------------------------------------
def test_what_a_rank_holds_under_another_layout():
    from shardwise._dtensor_spec import DTensorSpec
    from shardwise._redistribute import redistribute_local_tensor

    mesh = shardwise.simulate((2, 2))
    value = torch.arange(30.0).reshape(5, 6)
    a = shardwise.distribute_tensor(value, mesh, [Shard(0), Shard(1)])
    b = shardwise.distribute_tensor(value, mesh, [Replicate(), Shard(0)])
    moved = redistribute_local_tensor(a.to_local(), a._spec, b._spec)
    for got, want in zip(moved.ranks, b.to_local().ranks, strict=True):
        assert torch.equal(got, want)
    with pytest.raises(TypeError, match="current_spec.*_spec of a DTensor"):
        redistribute_local_tensor(a.to_local(), None, b._spec)
    with pytest.raises(LayoutError, match="no tensor_meta"):
        redistribute_local_tensor(a.to_local(), DTensorSpec(a._spec.mesh, a._spec.placements), b._spec)


def test_seeds_of_a_mesh():
    from shardwise._random import is_rng_supported_mesh, manual_seed

    mesh = shardwise.simulate(3)
    made = []
    for _ in range(2):
        manual_seed(7, mesh)
        made.append(shardwise.randn(4, 5, device_mesh=mesh, placements=[Shard(0)]).full_tensor())
    torch.manual_seed(7)
    made.append(shardwise.randn(4, 5, device_mesh=mesh, placements=[Shard(1)]).full_tensor())
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2]) and is_rng_supported_mesh(mesh)
    with pytest.raises(TypeError, match="seed"):
        manual_seed("seven", mesh)


def test_records_of_strategies():
    from shardwise._op_schema import OpSpec, OpStrategy

    mesh = shardwise.simulate((2, 3))
    spec = lambda *places: shardwise.distribute_tensor(torch.ones(6, 4), mesh, places)._spec
    cut, whole = spec(Shard(0), Shard(0)), spec(Replicate(), Shard(1))
    strategy = OpStrategy([OpSpec(whole, [cut, whole]), OpSpec(cut)])
    assert strategy.mesh is mesh and (strategy.ndim, strategy.shape, strategy.max_num_shards()) == (2, (6, 4), 6)
    assert strategy.strategies[0].input_spec(1) is whole and strategy.strategies[0].output_spec is whole
    with pytest.raises(ValueError, match="without input_specs"):
        strategy.strategies[1].input_spec()
    with pytest.raises(IndexError, match="index 2 of 2 tensors"):
        strategy.strategies[0].input_spec(2)
    with pytest.raises(ValueError, match="no single result"):
        OpSpec((cut, None)).output_spec  # noqa: B018


def test_context_parallel_by_its_private_names():
    from shardwise.experimental._attention import _context_parallel_shard, _cp_options

    mesh = shardwise.simulate(2)
    (part,) = _context_parallel_shard(mesh, [torch.arange(8)], [0])
    assert [p.tolist() for p in part.ranks] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    _cp_options.enable_load_balance = True
    assert _cp_options.enable_load_balance
    with pytest.raises(LayoutError, match="enable_load_balance = False: here it is always True"):
        _cp_options.enable_load_balance = False
    with pytest.raises(AttributeError, match="it has enable_load_balance"):
        _cp_options.nothing  # noqa: B018
    with pytest.raises(LayoutError, match="load_balancer"):
        _context_parallel_shard(mesh, [torch.arange(8)], [0], load_balancer=3)


def test_the_state_of_an_optimizer_that_has_not_stepped():
    from shardwise.checkpoint.state_dict import _init_optim_state

    value = torch.arange(5.0)
    param = torch.nn.Parameter(shardwise.distribute_tensor(value, shardwise.simulate(2), [Shard(0)]))
    optimizer = torch.optim.AdamW([param], lr=0.1)
    _init_optim_state(optimizer)
    assert torch.equal(optimizer.state[param]["exp_avg"].full_tensor(), torch.zeros(5)) and param.grad is None
    assert torch.equal(param.full_tensor(), value) and optimizer.param_groups[0]["lr"] == 0.1
