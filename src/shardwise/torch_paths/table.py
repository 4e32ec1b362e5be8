"""Which names torch has at which paths, and where in this library the code behind each name is."""

_HOMES = {
    "api": "distribute_module distribute_tensor",
    "debug": "CommDebugMode visualize_sharding",
    "experimental": "local_map register_sharding",
    "layout": "_StridedShard=StridedShard _Partial=Partial Partial Placement Replicate",
    "mesh": "DeviceMesh init_device_mesh",
    "parallel": "ColwiseParallel parallelize_module ParallelStyle PrepareModuleInput PrepareModuleInputOutput "
    "PrepareModuleOutput RowwiseParallel SequenceParallel",
    "parallel.context": "context_parallel context_parallel_unshard set_rotate_method",
    "sharded": "_collect_local_shard _reshard_output _shard_tensor _sharded_op_impl=custom_sharded_op_impl "
    "ChunkShardingSpec custom_sharded_op_impl custom_sharding_spec_op DevicePlacementSpec empty "
    "EnumerableShardingSpec full init_from_local_shards load_with_process_group named_params_with_sharded_tensor ones "
    "PlacementSpec pre_load_state_dict_hook rand randn Shard shard_module shard_parameter ShardedOptimizer "
    "ShardedTensor ShardedTensorBase ShardedTensorMetadata Sharder ShardingPlan ShardingPlanner ShardingSpec "
    "ShardMetadata state_dict_hook TensorProperties zeros",
    "sharded.checks": "_raise_if_mismatch=raise_if_mismatch build_global_metadata=global_metadata "
    "recalc_global_sharded_tensor_metadata=put_one_after_the_other",
    "sharded.groups": "_parse_and_validate_remote_device=check_remote_device",
    "sharded.metadata": "_flatten_tensor_size=as_size MEM_FORMAT_ENCODING",
    "sharded.ops.registry": "_CUSTOM_SHARDED_OPS=custom_ops _CUSTOM_SHARDING_SPEC_OPS=spec_ops "
    "_dispatch_custom_op=dispatch_spec_op _has_custom_op=has_spec_op",
    "sharded.pickling": "_get_current_process_group=current_process_group _unpickled ProcessGroupState",
    "sharded.remote": "_sharded_tensor_map=sharded_tensor_map",
    "sharded.spec": "_infer_sharding_spec_from_shards_metadata=spec_of get_split_size=chunk_size",
    "sharded.tiles": "check_tensor=check_cover validate_non_overlapping_shards_metadata=check_disjoint",
    "spec": "compute_local_shape_and_global_offset DTensorSpec=Spec ShardOrder ShardOrderEntry TensorMeta",
    "tensor": "DTensor",
    "experimental.context_names": "_context_parallel_shard _ContextParallel _cp_options "
    "_enable_context_parallel_dispatcher _HeadTailLoadBalancer _PTRRLoadBalancer _RotateMethod",
    "parallel.reshard": "input_reshard",
    "torch_paths.collectives": "allgather_cost allreduce_cost check_tensor_meta fill_empty_tensor_to_shards "
    "mesh_broadcast mesh_scatter MeshTopoInfo pad_tensor redistribute_cost reduce_scatter_cost shard_dim_alltoall "
    "spec_to_bytes unpad_tensor",
    "torch_paths.moving": "disable_redistribute_transform_optimization Redistribute redistribute_local_tensor "
    "use_min_cost_redistribution_plan",
    "torch_paths.shapes": "_compute_local_shape_and_global_offset as_list assert_no_mixed_partial_types "
    "compute_global_tensor_info compute_global_tensor_shape compute_local_stride compute_local_tensor_info "
    "ExplicitRedistributionContext infer_broadcast_dims_map is_tensor_dim_sharded is_tensor_evenly_shardable "
    "is_tensor_evenly_shardable_on_dim is_tensor_partial is_tensor_shardable map_placements_after_broadcast "
    "normalize_dim normalize_dims normalize_to_torch_size prod shift_shard_dims_after_insert "
    "shift_shard_dims_after_remove try_find_mesh_from_args",
    "torch_paths.op_schema": "OpSpec OpStrategy PlacementList RuntimeSchemaInfo",
    "torch_paths.registering": "_basic_validation _communicate_result _decorator_func _get_logging_handler "
    "_get_or_create_logger _log_handlers _register_default_op _register_op _register_sharded_op_on_local_shards "
    "_sharded_op_common allclose binary_cmp constant_ equal kaiming_uniform_ normal_ register_tensor_creation_op "
    "same_dtype sharded_clone sharded_deepcopy sharded_detach sharded_embedding sharded_embedding_bag "
    "sharded_inplace_copy sharded_type_as sharded_type_as_check st_is_meta tensor_device "
    "tensor_has_compatible_shallow_copy_type tensor_like_creation_op_map tensor_requires_grad_set uniform_ "
    "validate_param",
    "torch_paths.seeding": "is_rng_supported_mesh manual_seed",
    "torch_paths.tiles": "_check_shard_metadata_pair_overlap _create_tensor_from_params _find_1d_overlapping_shards "
    "_find_nd_overlapping_shards _validate_output_tensor_for_gather build_metadata_from_local_shards "
    "build_reshard_metadata get_chunk_sharding_params get_chunked_dim_size get_idx_from_placements narrow_tensor "
    "narrow_tensor_by_index reshard_local_shard reshuffle_local_shard",
}
"""Module below `shardwise` -> the names that it is the home of. `exported=real`: it has the name under another."""

_PATHS = {
    # torch.distributed.tensor
    "_api": "compute_local_shape_and_global_offset DeviceMesh distribute_module distribute_tensor DTensor DTensorSpec "
    "factories.empty factories.full factories.ones factories.rand factories.randn factories.zeros layout.Shard Partial "
    "Placement redistribute_local_tensor Replicate TensorMeta torch_paths.moving._shard_tensor",
    "_collective_utils": "allgather_cost allreduce_cost check_tensor_meta fill_empty_tensor_to_shards mesh_broadcast "
    "mesh_scatter MeshTopoInfo pad_tensor redistribute_cost reduce_scatter_cost shard_dim_alltoall spec_to_bytes "
    "unpad_tensor",
    "_dtensor_spec": "DTensorSpec ShardOrder ShardOrderEntry TensorMeta",
    "_op_schema": "DTensorSpec OpSpec OpStrategy Placement PlacementList RuntimeSchemaInfo TensorMeta",
    "_ops": "",
    "_ops.utils": "as_list infer_broadcast_dims_map is_tensor_dim_sharded is_tensor_evenly_shardable "
    "is_tensor_evenly_shardable_on_dim is_tensor_partial is_tensor_shardable map_placements_after_broadcast "
    "normalize_dim normalize_dims prod shift_shard_dims_after_insert shift_shard_dims_after_remove",
    "_random": "is_rng_supported_mesh manual_seed",
    "_redistribute": "disable_redistribute_transform_optimization Redistribute redistribute_local_tensor "
    "use_min_cost_redistribution_plan",
    "_utils": "_compute_local_shape_and_global_offset assert_no_mixed_partial_types compute_global_tensor_info "
    "compute_global_tensor_shape compute_local_shape_and_global_offset compute_local_stride compute_local_tensor_info "
    "ExplicitRedistributionContext normalize_to_torch_size try_find_mesh_from_args",
    "debug._comm_mode": "CommDebugMode",
    "debug._visualize_sharding": "visualize_sharding",
    "device_mesh": "DeviceMesh init_device_mesh",
    "experimental._attention": "_context_parallel_shard _cp_options _RotateMethod context_parallel "
    "_ContextParallel _enable_context_parallel_dispatcher _HeadTailLoadBalancer _PTRRLoadBalancer "
    "context_parallel_unshard set_rotate_method",
    "experimental._context_parallel": "_context_parallel_shard _cp_options _RotateMethod context_parallel "
    "_ContextParallel _enable_context_parallel_dispatcher _HeadTailLoadBalancer _PTRRLoadBalancer "
    "context_parallel_unshard set_rotate_method",
    "experimental._context_parallel._attention": "_context_parallel_shard _cp_options _RotateMethod context_parallel "
    "_ContextParallel _enable_context_parallel_dispatcher _HeadTailLoadBalancer _PTRRLoadBalancer "
    "context_parallel_unshard set_rotate_method",
    "experimental._context_parallel._load_balancer": "_HeadTailLoadBalancer _PTRRLoadBalancer",
    "experimental._func_map": "local_map",
    "experimental._register_sharding": "register_sharding",
    "placement_types": "_Partial _StridedShard DTensorSpec fill_empty_tensor_to_shards layout.Shard mesh_broadcast "
    "mesh_scatter pad_tensor Partial Placement Replicate shard_dim_alltoall TensorMeta unpad_tensor",
    "parallel.api": "parallelize_module",
    "parallel.input_reshard": "input_reshard",
    "parallel.style": "ColwiseParallel ParallelStyle PrepareModuleInput PrepareModuleInputOutput PrepareModuleOutput "
    "RowwiseParallel SequenceParallel",
    # torch.distributed._shard
    "sharded._utils": "narrow_tensor narrow_tensor_by_index ShardMetadata",
    "sharded.api": "_collect_local_shard _get_current_process_group _reshard_output _shard_tensor ChunkShardingSpec "
    "load_with_process_group shard_module shard_parameter ShardedTensor Sharder ShardingPlan ShardingSpec",
    "sharded.checkpoint": "torch.distributed.checkpoint.*",
    "sharded.common_op_utils": "_basic_validation _register_default_op",
    "sharded.op_registry_utils": "_basic_validation _decorator_func _register_op",
    "sharded.sharder": "Sharder",
    "sharded.saving": "_unpickled ProcessGroupState",  # not torch's: for older pickles
    # torch.distributed._shard.sharded_optim
    "sharded.sharded_optim": "named_params_with_sharded_tensor ShardedOptimizer ShardedTensor",
    "sharded.sharded_optim.api": "ShardedOptimizer ShardedTensor",
    # torch.distributed._shard.sharding_plan
    "sharded.sharding_plan": "ShardingPlan ShardingPlanner",
    "sharded.sharding_plan.api": "Sharder ShardingPlan ShardingPlanner ShardingSpec",
    # torch.distributed._shard.sharding_spec
    "sharded.sharding_spec": "_infer_sharding_spec_from_shards_metadata ChunkShardingSpec custom_sharding_spec_op "
    "DevicePlacementSpec EnumerableShardingSpec PlacementSpec ShardingSpec ShardMetadata",
    "sharded.sharding_spec._internals": "_check_shard_metadata_pair_overlap _find_1d_overlapping_shards "
    "_find_nd_overlapping_shards check_tensor get_chunk_sharding_params get_chunked_dim_size get_split_size "
    "ShardMetadata validate_non_overlapping_shards_metadata",
    "sharded.sharding_spec.api": "_CUSTOM_SHARDING_SPEC_OPS _decorator_func _dispatch_custom_op _has_custom_op "
    "_infer_sharding_spec_from_shards_metadata check_tensor custom_sharding_spec_op DevicePlacementSpec "
    "EnumerableShardingSpec get_chunked_dim_size get_split_size PlacementSpec ShardingSpec ShardMetadata "
    "validate_non_overlapping_shards_metadata",
    "sharded.sharding_spec.chunk_sharding_spec": "_parse_and_validate_remote_device ChunkShardingSpec "
    "get_chunked_dim_size get_split_size narrow_tensor Shard ShardingSpec ShardMetadata",
    "sharded.sharding_spec.chunk_sharding_spec_ops": "",
    "sharded.sharding_spec.chunk_sharding_spec_ops.embedding": "ChunkShardingSpec sharded_embedding ShardedTensor",
    "sharded.sharding_spec.chunk_sharding_spec_ops.embedding_bag": "ChunkShardingSpec sharded_embedding_bag "
    "ShardedTensor",
    # torch.distributed._shard.sharded_tensor
    "sharded.sharded_tensor": "_CUSTOM_SHARDED_OPS _decorator_func _sharded_op_impl custom_sharded_op_impl empty full "
    "init_from_local_shards ones pre_load_state_dict_hook rand randn Shard sharded.ops.fills.constant_ "
    "sharded.ops.fills.kaiming_uniform_ sharded.ops.fills.normal_ sharded.ops.fills.uniform_ "
    "sharded.ops.methods.allclose sharded.ops.methods.equal sharded_embedding sharded_embedding_bag ShardedTensor "
    "ShardedTensorBase ShardedTensorMetadata ShardingSpec ShardMetadata state_dict_hook TensorProperties zeros",
    "sharded.sharded_tensor.api": "_create_tensor_from_params _CUSTOM_SHARDED_OPS _dispatch_custom_op "
    "_flatten_tensor_size _has_custom_op _parse_and_validate_remote_device _sharded_tensor_map "
    "_validate_output_tensor_for_gather build_global_metadata build_metadata_from_local_shards check_tensor "
    "reshard_local_shard reshuffle_local_shard Shard ShardedTensor ShardedTensorBase ShardedTensorMetadata "
    "ShardMetadata TensorProperties validate_non_overlapping_shards_metadata",
    "sharded.sharded_tensor.logger": "_get_logging_handler _get_or_create_logger _log_handlers",
    "sharded.sharded_tensor.logging_handlers": "_log_handlers",
    "sharded.sharded_tensor.metadata": "MEM_FORMAT_ENCODING ShardedTensorMetadata ShardMetadata TensorProperties",
    "sharded.sharded_tensor.reshard": "build_reshard_metadata get_chunked_dim_size get_idx_from_placements "
    "get_split_size reshard_local_shard reshuffle_local_shard Shard ShardMetadata",
    "sharded.sharded_tensor.shard": "Shard ShardMetadata",
    "sharded.sharded_tensor.utils": "_flatten_tensor_size _parse_and_validate_remote_device _raise_if_mismatch "
    "_validate_output_tensor_for_gather build_global_metadata build_metadata_from_local_shards check_tensor "
    "recalc_global_sharded_tensor_metadata TensorProperties validate_non_overlapping_shards_metadata",
    "sharded.sharded_tensor._ops": "allclose constant_ equal kaiming_uniform_ normal_ sharded_embedding "
    "sharded_embedding_bag uniform_",
    "sharded.sharded_tensor._ops._common": "_basic_validation _register_sharded_op_on_local_shards _sharded_op_common "
    "_sharded_op_impl Shard ShardedTensor",
    "sharded.sharded_tensor._ops.binary_cmp": "_communicate_result allclose binary_cmp equal ShardedTensor",
    "sharded.sharded_tensor._ops.init": "constant_ kaiming_uniform_ normal_ register_tensor_creation_op "
    "tensor_like_creation_op_map uniform_ validate_param",
    "sharded.sharded_tensor._ops.misc_ops": "tensor_has_compatible_shallow_copy_type",
    "sharded.sharded_tensor._ops.tensor_ops": "_register_default_op _register_sharded_op_on_local_shards "
    "_sharded_op_impl same_dtype Shard sharded_clone sharded_deepcopy sharded_detach sharded_inplace_copy "
    "sharded_type_as sharded_type_as_check ShardedTensor st_is_meta tensor_device tensor_requires_grad_set",
}
"""Path below `shardwise` -> the names there: `home.name` where it is not the name's usual home, `home.*` for all."""


def _entry(text: str, homes: dict[str, tuple[str, str]]) -> tuple[str, tuple[str, str]]:
    home, _, name = text.rpartition(".")
    return name, (home, name) if home else homes[name]


def _read() -> dict[str, dict[str, tuple[str, str]]]:
    homes = {}
    for home, names in _HOMES.items():
        for name, _, real in (entry.partition("=") for entry in names.split()):
            homes[name] = (home, real or name)
    return {path: dict(_entry(text, homes) for text in names.split()) for path, names in _PATHS.items()}


TABLE = _read()  # path below `shardwise` -> {name there: (module, its name in the module)}
