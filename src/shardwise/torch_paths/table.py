"""Which names torch has at which paths, and where in this library the code behind each name is."""

TABLE: dict[str, dict[str, str]] = {
    # torch.distributed.tensor
    "_dtensor_spec": {"spec": "DTensorSpec=Spec TensorMeta"},
    "_utils": {"spec": "compute_local_shape_and_global_offset"},
    "device_mesh": {"mesh": "DeviceMesh init_device_mesh"},
    "placement_types": {"layout": "Partial Placement Replicate Shard"},
    "parallel.api": {"parallel": "parallelize_module"},
    "parallel.style": {
        "parallel": "ColwiseParallel ParallelStyle PrepareModuleInput PrepareModuleInputOutput PrepareModuleOutput "
        "RowwiseParallel SequenceParallel"
    },
    # torch.distributed._shard
    "sharded._utils": {
        "sharded.metadata": "ShardMetadata",
        "torch_paths.tiles": "narrow_tensor narrow_tensor_by_index",
    },
    "sharded.api": {
        "sharded": "ChunkShardingSpec ShardedTensor Sharder ShardingPlan ShardingSpec _collect_local_shard "
        "_reshard_output _shard_tensor load_with_process_group shard_module shard_parameter",
        "sharded.pickling": "_get_current_process_group=current_process_group",
    },
    "sharded.checkpoint": {"torch.distributed.checkpoint": "*"},
    "sharded.common_op_utils": {"torch_paths.registering": "_basic_validation _register_default_op"},
    "sharded.op_registry_utils": {"torch_paths.registering": "_basic_validation _decorator_func _register_op"},
    "sharded.sharder": {"sharded": "Sharder"},
    "sharded.saving": {"sharded.pickling": "ProcessGroupState _unpickled"},  # not torch's: for older pickles
    # torch.distributed._shard.sharded_optim
    "sharded.sharded_optim": {"sharded": "ShardedOptimizer ShardedTensor named_params_with_sharded_tensor"},
    "sharded.sharded_optim.api": {"sharded": "ShardedOptimizer ShardedTensor"},
    # torch.distributed._shard.sharding_plan
    "sharded.sharding_plan": {"sharded": "ShardingPlan ShardingPlanner"},
    "sharded.sharding_plan.api": {"sharded": "Sharder ShardingPlan ShardingPlanner ShardingSpec"},
    # torch.distributed._shard.sharding_spec
    "sharded.sharding_spec": {
        "sharded": "ChunkShardingSpec DevicePlacementSpec EnumerableShardingSpec PlacementSpec ShardMetadata "
        "ShardingSpec custom_sharding_spec_op",
        "sharded.spec": "_infer_sharding_spec_from_shards_metadata=spec_of",
    },
    "sharded.sharding_spec._internals": {
        "sharded.metadata": "ShardMetadata",
        "sharded.spec": "get_split_size=chunk_size",
        "sharded.tiles": "check_tensor=check_cover validate_non_overlapping_shards_metadata=check_disjoint",
        "torch_paths.tiles": "_check_shard_metadata_pair_overlap _find_1d_overlapping_shards "
        "_find_nd_overlapping_shards get_chunk_sharding_params get_chunked_dim_size",
    },
    "sharded.sharding_spec.api": {
        "sharded": "DevicePlacementSpec EnumerableShardingSpec PlacementSpec ShardMetadata ShardingSpec "
        "custom_sharding_spec_op",
        "sharded.ops.registry": "_CUSTOM_SHARDING_SPEC_OPS=spec_ops _dispatch_custom_op=dispatch_spec_op "
        "_has_custom_op=has_spec_op",
        "sharded.spec": "_infer_sharding_spec_from_shards_metadata=spec_of get_split_size=chunk_size",
        "sharded.tiles": "check_tensor=check_cover validate_non_overlapping_shards_metadata=check_disjoint",
        "torch_paths.registering": "_decorator_func",
        "torch_paths.tiles": "get_chunked_dim_size",
    },
    "sharded.sharding_spec.chunk_sharding_spec": {
        "sharded": "ChunkShardingSpec Shard ShardMetadata ShardingSpec",
        "sharded.groups": "_parse_and_validate_remote_device=check_remote_device",
        "sharded.spec": "get_split_size=chunk_size",
        "torch_paths.tiles": "get_chunked_dim_size narrow_tensor",
    },
    "sharded.sharding_spec.chunk_sharding_spec_ops": {},
    "sharded.sharding_spec.chunk_sharding_spec_ops.embedding": {
        "sharded": "ChunkShardingSpec ShardedTensor",
        "torch_paths.registering": "sharded_embedding",
    },
    "sharded.sharding_spec.chunk_sharding_spec_ops.embedding_bag": {
        "sharded": "ChunkShardingSpec ShardedTensor",
        "torch_paths.registering": "sharded_embedding_bag",
    },
    # torch.distributed._shard.sharded_tensor
    "sharded.sharded_tensor": {
        "sharded": "Shard ShardMetadata ShardedTensor ShardedTensorBase ShardedTensorMetadata ShardingSpec "
        "TensorProperties custom_sharded_op_impl empty full init_from_local_shards ones pre_load_state_dict_hook rand "
        "randn state_dict_hook zeros _sharded_op_impl=custom_sharded_op_impl",
        "sharded.ops.methods": "allclose equal",
        "sharded.ops.fills": "constant_ kaiming_uniform_ normal_ uniform_",
        "sharded.ops.registry": "_CUSTOM_SHARDED_OPS=custom_ops",
        "torch_paths.registering": "_decorator_func sharded_embedding sharded_embedding_bag",
    },
    "sharded.sharded_tensor.api": {
        "sharded": "Shard ShardMetadata ShardedTensor ShardedTensorBase ShardedTensorMetadata TensorProperties",
        "sharded.groups": "_parse_and_validate_remote_device=check_remote_device",
        "sharded.ops.registry": "_CUSTOM_SHARDED_OPS=custom_ops _dispatch_custom_op=dispatch_spec_op "
        "_has_custom_op=has_spec_op",
        "sharded.remote": "_sharded_tensor_map=sharded_tensor_map",
        "sharded.tiles": "check_tensor=check_cover validate_non_overlapping_shards_metadata=check_disjoint",
        "sharded.checks": "build_global_metadata=global_metadata",
        "sharded.metadata": "_flatten_tensor_size=as_size",
        "torch_paths.tiles": "_create_tensor_from_params _validate_output_tensor_for_gather "
        "build_metadata_from_local_shards reshard_local_shard reshuffle_local_shard",
    },
    "sharded.sharded_tensor.logger": {
        "torch_paths.registering": "_get_logging_handler _get_or_create_logger _log_handlers"
    },
    "sharded.sharded_tensor.logging_handlers": {"torch_paths.registering": "_log_handlers"},
    "sharded.sharded_tensor.metadata": {
        "sharded.metadata": "MEM_FORMAT_ENCODING ShardMetadata ShardedTensorMetadata TensorProperties"
    },
    "sharded.sharded_tensor.reshard": {
        "sharded": "Shard ShardMetadata",
        "sharded.spec": "get_split_size=chunk_size",
        "torch_paths.tiles": "build_reshard_metadata get_chunked_dim_size get_idx_from_placements reshard_local_shard "
        "reshuffle_local_shard",
    },
    "sharded.sharded_tensor.shard": {"sharded": "Shard ShardMetadata"},
    "sharded.sharded_tensor.utils": {
        "sharded": "TensorProperties",
        "sharded.checks": "_raise_if_mismatch=raise_if_mismatch build_global_metadata=global_metadata "
        "recalc_global_sharded_tensor_metadata=put_one_after_the_other",
        "sharded.metadata": "_flatten_tensor_size=as_size",
        "sharded.groups": "_parse_and_validate_remote_device=check_remote_device",
        "sharded.tiles": "check_tensor=check_cover validate_non_overlapping_shards_metadata=check_disjoint",
        "torch_paths.tiles": "_validate_output_tensor_for_gather build_metadata_from_local_shards",
    },
    "sharded.sharded_tensor._ops": {
        "torch_paths.registering": "allclose constant_ equal kaiming_uniform_ normal_ sharded_embedding "
        "sharded_embedding_bag uniform_"
    },
    "sharded.sharded_tensor._ops._common": {
        "sharded": "Shard ShardedTensor _sharded_op_impl=custom_sharded_op_impl",
        "torch_paths.registering": "_basic_validation _register_sharded_op_on_local_shards _sharded_op_common",
    },
    "sharded.sharded_tensor._ops.binary_cmp": {
        "sharded": "ShardedTensor",
        "torch_paths.registering": "_communicate_result allclose binary_cmp equal",
    },
    "sharded.sharded_tensor._ops.init": {
        "torch_paths.registering": "constant_ kaiming_uniform_ normal_ register_tensor_creation_op "
        "tensor_like_creation_op_map uniform_ validate_param"
    },
    "sharded.sharded_tensor._ops.misc_ops": {"torch_paths.registering": "tensor_has_compatible_shallow_copy_type"},
    "sharded.sharded_tensor._ops.tensor_ops": {
        "sharded": "Shard ShardedTensor _sharded_op_impl=custom_sharded_op_impl",
        "torch_paths.registering": "_register_default_op _register_sharded_op_on_local_shards same_dtype sharded_clone "
        "sharded_deepcopy sharded_detach sharded_inplace_copy sharded_type_as sharded_type_as_check st_is_meta "
        "tensor_device tensor_requires_grad_set",
    },
}
"""Path below `shardwise` -> {module below `shardwise`: its names there}.

`exported=real` is a name that the module has under another name. "*" is every name of the module.
"""
