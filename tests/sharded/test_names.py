"""The names and places of torch.distributed._shard: a program moves over by changing its imports."""

import importlib
import inspect
import logging
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwise
from shardwise import sharded as S
from shardwise.sharded import common_op_utils, op_registry_utils
from shardwise.sharded.ops import registry
from shardwise.sharded.sharded_tensor import api, logger, reshard, utils
from shardwise.sharded.sharded_tensor.logging_handlers import _log_handlers
from shardwise.sharded.sharding_spec import _internals
from shardwise.sharded.sharding_spec.chunk_sharding_spec_ops.embedding import sharded_embedding
from shardwise.sharded.sharding_spec.chunk_sharding_spec_ops.embedding_bag import sharded_embedding_bag
from tests.sharded.common import chunks, sharded, specs_for, values, whole
from tests.workers import run_ranks

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
    ".sharding_spec.api": "DevicePlacementSpec EnumerableShardingSpec PlacementSpec ShardingSpec _infer_sharding_spec_from_shards_metadata custom_sharding_spec_op _has_custom_op _dispatch_custom_op check_tensor get_split_size validate_non_overlapping_shards_metadata",
    ".sharding_spec.chunk_sharding_spec": "ChunkShardingSpec _parse_and_validate_remote_device get_chunked_dim_size get_split_size narrow_tensor",
    ".sharding_spec._internals": "_check_shard_metadata_pair_overlap _find_1d_overlapping_shards _find_nd_overlapping_shards check_tensor get_chunk_sharding_params get_chunked_dim_size get_split_size validate_non_overlapping_shards_metadata",
    ".sharded_tensor": "Shard ShardMetadata ShardedTensor ShardedTensorBase ShardedTensorMetadata TensorProperties _sharded_op_impl sharded_embedding sharded_embedding_bag custom_sharded_op_impl empty full init_from_local_shards ones pre_load_state_dict_hook rand randn state_dict_hook zeros",
    ".sharded_tensor.api": "Shard ShardedTensor ShardedTensorBase ShardedTensorMetadata TensorProperties _create_tensor_from_params _dispatch_custom_op _flatten_tensor_size _has_custom_op _parse_and_validate_remote_device _validate_output_tensor_for_gather build_global_metadata build_metadata_from_local_shards check_tensor reshard_local_shard reshuffle_local_shard validate_non_overlapping_shards_metadata",
    ".sharded_tensor.metadata": "MEM_FORMAT_ENCODING ShardMetadata ShardedTensorMetadata TensorProperties",
    ".sharded_tensor.shard": "Shard",
    ".sharded_tensor.utils": "_flatten_tensor_size _parse_and_validate_remote_device _raise_if_mismatch _validate_output_tensor_for_gather build_global_metadata build_metadata_from_local_shards check_tensor recalc_global_sharded_tensor_metadata validate_non_overlapping_shards_metadata",
    ".sharded_tensor.reshard": "build_reshard_metadata get_chunked_dim_size get_idx_from_placements get_split_size reshard_local_shard reshuffle_local_shard",
    ".sharded_tensor._ops": "sharded_embedding sharded_embedding_bag equal allclose uniform_ normal_ kaiming_uniform_ constant_",
    ".sharded_tensor._ops._common": "_basic_validation _sharded_op_common _register_sharded_op_on_local_shards",
    ".sharded_tensor._ops.binary_cmp": "_communicate_result allclose binary_cmp equal",
    ".sharded_tensor._ops.init": "constant_ kaiming_uniform_ normal_ register_tensor_creation_op uniform_ validate_param",
    ".sharded_tensor._ops.misc_ops": "tensor_has_compatible_shallow_copy_type",
    ".sharded_tensor._ops.tensor_ops": "same_dtype sharded_clone sharded_deepcopy sharded_detach sharded_inplace_copy sharded_type_as sharded_type_as_check st_is_meta tensor_device tensor_requires_grad_set",
    ".checkpoint": "FileSystemReader FileSystemWriter load load_state_dict save save_state_dict",
    ".sharded_tensor.logger": "_get_logging_handler _get_or_create_logger",
    ".common_op_utils": "_basic_validation _register_default_op",
    ".op_registry_utils": "_basic_validation _decorator_func _register_op",
    ".sharding_spec.chunk_sharding_spec_ops.embedding": "sharded_embedding",
    ".sharding_spec.chunk_sharding_spec_ops.embedding_bag": "sharded_embedding_bag",
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
            if not name.startswith(("_", "sharded_emb")):
                assert hasattr(shardwise.sharded, name), name
    assert all(hasattr(shardwise.sharded, name) for name in shardwise.sharded.__all__)


# -- what the less known ones do ---------------------------------------------------------------------------------
def of_rank(rank, *tiles, size):
    shards = [S.ShardMetadata(offsets, sizes, f"rank:{rank}/cpu") for offsets, sizes in tiles]
    return S.ShardedTensorMetadata(shards, torch.Size(size), S.TensorProperties())


def test_global_metadata_worked_out_anew():
    told = [of_rank(0, ([0, 0], [2, 3]), ([7, 0], [1, 3]), size=[9, 3]), of_rank(1, ([3, 0], [2, 3]), size=[9, 3])]
    made = utils.build_global_metadata(told, recalc_metadata=True)
    assert [s.shard_offsets for s in made.shards_metadata] == [[0, 0], [2, 0], [3, 0]] and made.size == (5, 3)
    assert told[0].shards_metadata[1].shard_offsets == [7, 0]
    with pytest.raises(ValueError, match="does not match tensor volume"):
        utils.build_global_metadata(told)
    utils.recalc_global_sharded_tensor_metadata(made, 1)
    assert [s.shard_offsets for s in made.shards_metadata] == [[0, 0], [0, 3], [0, 6]] and made.size == (5, 9)


def test_small_checks():
    with pytest.raises(ValueError, match="dtype=1, the other local shard tensor dtype=2"):
        utils._raise_if_mismatch(1, 2, "dtype", 3)
    with pytest.raises(ValueError, match="dtype=1 on rank:3, and dtype=2 on rank:4"):
        utils._raise_if_mismatch(1, 2, "dtype", [3, 4], is_local=False)
    utils._raise_if_mismatch(1, 1, "dtype", 3)
    with pytest.raises(ValueError, match="must be specified on destination rank 0"):
        utils._validate_output_tensor_for_gather(0, 0, torch.Size([2]), None)
    utils._validate_output_tensor_for_gather(1, 0, torch.Size([2]), None)
    tiles = [S.ShardMetadata([4 * i, 0], [5 if i == 1 else 4, 2]) for i in range(20)]
    assert _internals._find_1d_overlapping_shards(tiles, 0) == (1, 2)
    assert _internals._find_nd_overlapping_shards(tiles, [0, 1]) == (1, 2)
    assert _internals._find_1d_overlapping_shards(tiles[2:], 0) is None
    assert _internals._check_shard_metadata_pair_overlap(tiles[1], tiles[2])
    assert not _internals._check_shard_metadata_pair_overlap(tiles[0], tiles[1])


def test_logger():
    assert logger._get_or_create_logger() is logger._get_or_create_logger()
    assert isinstance(_log_handlers["default"], logging.NullHandler)
    with pytest.raises(KeyError, match="no handler for 'nowhere'"):
        logger._get_logging_handler("nowhere")


def test_tables_of_ops():
    table = {}
    with pytest.raises(TypeError, match="expects signature"):
        op_registry_utils._register_op(torch.add, lambda x: x, table)
    mine = lambda types, args, kwargs, process_group: None
    assert op_registry_utils._decorator_func(mine, torch.add, table) is mine and table == {torch.add: mine}
    with pytest.raises(ValueError, match="No input for 'add'"):
        common_op_utils._basic_validation(torch.add)
    with pytest.raises(TypeError, match="without any sharded tensor"):
        common_op_utils._basic_validation(torch.add, (torch.ones(1),))


def test_modules_are_attributes():
    for path in ("api", "checkpoint", "metadata", "sharder", "sharding_spec.chunk_sharding_spec", "sharding_plan.api"):
        found = S
        for name in path.split("."):
            found = getattr(found, name)
        assert inspect.ismodule(found)
    assert S.sharded_tensor._ops.init.validate_param(1, "a") is None and S.sharded_optim.api and S.sharding_spec.api
    assert not hasattr(S.checkpoint, "nowhere")


def less_known(rank, world):
    value = values(7, 6)
    specs = specs_for((7, 6), range(world))
    for one in ("chunk 0", "turned 1"):
        for name, spec in specs.items():
            st = sharded(value, specs[one], requires_grad=True)
            move = reshard.reshuffle_local_shard if name == one else reshard.reshard_local_shard
            shards, tiles = move(st.local_tensor(), st.size(), specs[one], spec, dist.group.WORLD)
            want = sharded(value, spec)
            assert tiles == want.metadata().shards_metadata, (one, name)
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(shards, want.local_shards(), strict=True))
    spec = chunks(0, list(range(world))[::-1])
    tiles, places = reshard.build_reshard_metadata(torch.Size([7, 6]), spec, world)
    assert places == list(range(world))[::-1] and [t.placement.rank() for t in tiles] == list(range(world))
    assert reshard.get_idx_from_placements(spec.placements, 0) == world - 1
    with pytest.raises(RuntimeError, match="rank 9"):
        reshard.get_idx_from_placements(spec.placements, 9)
    ids, st = torch.tensor([[1, 2 + rank]]), sharded(value, spec)
    assert torch.allclose(sharded_embedding((), (ids, st), {}, None), F.embedding(ids, value))
    assert torch.allclose(sharded_embedding_bag((), (ids, st), {"mode": "sum"}, None), value[ids[0]].sum(0))
    return default_ops(st, value) and ops_on_shards(st, value)


def ops_on_shards(st, value):
    """Ops as they are registered: shard by shard, with a check and an early end, or by a function of one's own."""
    from shardwise.sharded.sharded_tensor._ops import _common, binary_cmp, init, tensor_ops

    def positive(*args, **kwargs):
        if args[1] < 0:
            raise ValueError("negative")

    _common._register_sharded_op_on_local_shards(torch.pow, lambda x, n: n == 1, positive)
    _common._register_sharded_op_on_local_shards(torch.asinh, customized_func=tensor_ops.sharded_clone)
    init.register_tensor_creation_op(torch.full_like)
    try:
        assert torch.pow(st, 1) is st and torch.allclose(whole(torch.pow(st, 2)), value**2)
        with pytest.raises(ValueError, match="negative"):
            torch.pow(st, -1)
        assert torch.equal(whole(torch.asinh(st)), value)
        made = torch.full_like(st, 2)
        assert made.dtype == st.dtype and torch.equal(whole(made), torch.full_like(value, 2))
    finally:
        for op in (torch.pow, torch.asinh, torch.full_like):
            del registry.custom_ops[op]
    assert binary_cmp.equal((), (st, st.clone()), {}, None) and not binary_cmp.allclose((), (st, st + 1), {}, None)
    assert binary_cmp._communicate_result(True, st._process_group)
    assert not binary_cmp._communicate_result(dist.get_rank() == 0, st._process_group)
    with pytest.raises(ValueError, match="Expected two arguments"):
        binary_cmp.equal((), (st,), {}, None)
    assert torch.equal(whole(init.constant_((), (st.clone(), 3))), torch.full_like(value, 3))
    for make in (tensor_ops.sharded_deepcopy, tensor_ops.sharded_detach):
        shards, metadata = make((st,), {}, None)
        assert metadata == st.metadata() and torch.equal(shards[0].tensor, st.local_tensor())
    assert tensor_ops.sharded_type_as((st, torch.ones(1)), {}, None)[1].tensor_properties.dtype == torch.float32
    with pytest.raises(ValueError, match="tensor to cast type as"):
        tensor_ops.sharded_type_as_check(st)
    return True


def default_ops(st, value):
    """An op registered as it is, on top of one of the user's."""
    for op in (torch.sin, torch.cumsum):
        common_op_utils._register_default_op(op, S.custom_sharded_op_impl)
        assert op in api._CUSTOM_SHARDED_OPS
        args = (0,) if op is torch.cumsum else ()
        assert torch.allclose(whole(op(st, *args)), op(value, *args))
        del registry.custom_ops[op]
    return True


def test_less_known():
    assert all(run_ranks(less_known, 2))
