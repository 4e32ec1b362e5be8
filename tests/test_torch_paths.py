"""The modules that exist for torch's paths: what a program imports by them is there, and is what it should be."""

import importlib
import importlib.util
import pickle
import subprocess
import sys

import pytest

import shardwise
from shardwise.sharded import metadata
from shardwise.torch_paths import TABLE

NAMES = {
    "_dtensor_spec": "DTensorSpec TensorMeta",
    "_utils": "compute_local_shape_and_global_offset",
    "device_mesh": "DeviceMesh init_device_mesh",
    "parallel.api": "parallelize_module",
    "parallel.style": "ColwiseParallel ParallelStyle PrepareModuleInput PrepareModuleInputOutput PrepareModuleOutput RowwiseParallel SequenceParallel",
    "placement_types": "Partial Placement Replicate Shard",
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
    assert found is sys.modules[f"shardwise.{path}"] is importlib.import_module(f"shardwise.{path}")
    assert importlib.util.find_spec(f"shardwise.{path}").name == found.__name__ == f"shardwise.{path}"
    assert hasattr(found, "__path__") == any(other.startswith(path + ".") for other in NAMES)


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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 1, done.stderr


def test_reloading_keeps_the_names():
    module = importlib.reload(importlib.import_module("shardwise.placement_types"))
    assert module.Shard is shardwise.Shard
