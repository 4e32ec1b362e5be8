"""The names and places of torch.distributed._shard: a program moves over by changing its imports."""

import importlib
import inspect
import warnings

import pytest

import shardwise

NAMES = {
    "": "load_with_process_group shard_module shard_parameter _shard_tensor",
    ".api": "_collect_local_shard _get_current_process_group _reshard_output _shard_tensor load_with_process_group shard_module shard_parameter",
    "._utils": "narrow_tensor narrow_tensor_by_index",
    ".metadata": "ShardMetadata",
    ".sharder": "Sharder",
    ".sharding_plan": "ShardingPlan ShardingPlanner",
    ".sharding_plan.api": "Sharder ShardingPlan ShardingPlanner ShardingSpec",
    ".sharded_optim": "ShardedOptimizer named_params_with_sharded_tensor",
    ".sharded_optim.api": "ShardedOptimizer ShardedTensor",
    ".sharding_spec": "ChunkShardingSpec DevicePlacementSpec EnumerableShardingSpec PlacementSpec ShardMetadata ShardingSpec _infer_sharding_spec_from_shards_metadata",
    ".sharding_spec.api": "DevicePlacementSpec EnumerableShardingSpec PlacementSpec ShardingSpec _infer_sharding_spec_from_shards_metadata custom_sharding_spec_op _has_custom_op _dispatch_custom_op",
    ".sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
    ".sharding_spec._internals": "check_tensor get_chunk_sharding_params get_chunked_dim_size get_split_size validate_non_overlapping_shards_metadata",
    ".sharded_tensor": "Shard ShardMetadata ShardedTensor ShardedTensorBase ShardedTensorMetadata TensorProperties custom_sharded_op_impl empty full init_from_local_shards ones pre_load_state_dict_hook rand randn state_dict_hook zeros",
    ".sharded_tensor.api": "Shard ShardedTensor ShardedTensorBase ShardedTensorMetadata TensorProperties _create_tensor_from_params",
    ".sharded_tensor.metadata": "MEM_FORMAT_ENCODING ShardMetadata ShardedTensorMetadata TensorProperties",
    ".sharded_tensor.shard": "Shard",
    ".sharded_tensor.utils": "_flatten_tensor_size _parse_and_validate_remote_device build_global_metadata build_metadata_from_local_shards",
}


def modules(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("shardwise.sharded" + path), importlib.import_module(
            "torch.distributed._shard" + path
        )


@pytest.mark.parametrize("path", NAMES)
def test_every_name_is_where_torch_has_it(path):
    ours, theirs = modules(path)
    for name in NAMES[path].split():
        mine, torchs = getattr(ours, name), getattr(theirs, name)
        if inspect.isclass(torchs):
            assert inspect.isclass(mine), name
            for method, of in vars(torchs).items():
                if inspect.isfunction(of) and not method.startswith("_"):
                    assert takes_all(getattr(mine, method), of), (name, method)
            if "__init__" in vars(torchs) and torchs.__init__ is not object.__init__:
                assert takes_all(mine.__init__, torchs.__init__), name
        else:
            assert takes_all(mine, torchs), name


def takes_all(mine, theirs):
    """Whether every argument of torch's function can be given to ours, in torch's order."""
    have, want = inspect.signature(mine).parameters, inspect.signature(theirs).parameters
    rest = any(p.kind is p.VAR_KEYWORD for p in have.values())
    named = [n for n, p in want.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if [n for n in have if n in named] != [n for n in named if n in have]:
        return False
    return rest or all(
        n in have for n in want if want[n].kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    )


def test_everything_is_in_the_package_itself():
    for path in (".sharded_tensor", ".sharding_spec", ".sharding_plan", ".sharded_optim", ".api"):
        for name in NAMES[path].split():
            if not name.startswith("_"):
                assert hasattr(shardwise.sharded, name), name
    assert all(hasattr(shardwise.sharded, name) for name in shardwise.sharded.__all__)
