"""Values from files: whatever a pickle says, it gives a valid object or an error that names what is wrong."""

import copy
import io
import itertools
import pickle
import time

import pytest
import torch
import torch.distributed as dist

from shardwise import (
    DTensor,
    LayoutError,
    MeshError,
    Partial,
    RankTensor,
    Replicate,
    Shard,
    distribute_tensor,
    simulate,
)
from shardwise.layout import Layout
from shardwise.mesh import as_mesh
from shardwise.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from shardwise.sharded import Shard as Tile
from shardwise.sharded.spec import DevicePlacementSpec
from tests.workers import run_ranks

MESH = simulate((2, 2), axis_names=("dp", "tp"))


ROWS = (Shard(0), Replicate())


def tensor(places=ROWS, dtype=torch.float32):
    return distribute_tensor(torch.arange(10).view(5, 2).to(dtype), MESH, places)


def noted():
    x = tensor().requires_grad_()
    x.mine = {"a": 1}
    return x


TILES = [ShardMetadata([0, 0], [2, 3], "rank:0/cpu"), ShardMetadata([2, 0], [2, 3], "rank:1/cpu")]
OBJECTS = {
    "tensor": tensor,
    "uneven tensor": lambda: tensor([Shard(0, sizes=(5, 0)), Shard(1)]),
    "pending tensor": lambda: tensor([Partial(), Partial("avg")]),
    "integers": lambda: tensor([Replicate(), Partial("max")], torch.int64),
    "tensor with notes": noted,
    "parameter": lambda: torch.nn.Parameter(tensor()),
    "mesh": lambda: MESH,
    "part of a mesh": lambda: MESH["tp"],
    "layout": lambda: tensor().layout,
    "local value": lambda: RankTensor([torch.ones(2), torch.ones(3)]),
    "Shard": lambda: Shard(1, sizes=(3, 0, 2)),
    "rows of sizes": lambda: Shard(0, sizes=((1, 2), (3, 0))),
    "Partial": lambda: Partial("max"),
    "ShardMetadata": lambda: TILES[0],
    "tile": lambda: Tile(torch.ones(2, 3), TILES[0]),
    "TensorProperties": TensorProperties,
    "ShardedTensorMetadata": lambda: ShardedTensorMetadata(list(TILES), torch.Size([4, 3])),
    "ChunkShardingSpec": lambda: ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]),
    "EnumerableShardingSpec": lambda: EnumerableShardingSpec(list(TILES)),
    "DevicePlacementSpec": lambda: DevicePlacementSpec("rank:0/cpu"),
}


def alike(one, other):
    """Whether two objects say the same."""
    if isinstance(one, DTensor):
        assert one.layout is other.layout and one.requires_grad == other.requires_grad
        assert torch.equal(one.detach().full_tensor(), other.detach().full_tensor())
        assert getattr(one, "mine", None) == getattr(other, "mine", None)
    elif isinstance(one, RankTensor):
        assert all(map(torch.equal, one.ranks, other.ranks))
    elif isinstance(one, Tile):
        assert torch.equal(one.tensor, other.tensor) and one.metadata == other.metadata
    else:
        assert one == other


@pytest.mark.parametrize("name", OBJECTS)
def test_copies(name):
    made = OBJECTS[name]()
    file = io.BytesIO()
    torch.save(made, file)
    for again in (pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy(made)):
        alike(made, again)
    for safe in (False, True):
        file.seek(0)
        alike(made, torch.load(file, weights_only=safe)) if not safe or name not in UNSAFE else None


UNSAFE = {"layout", "local value", "mesh", "part of a mesh", "DevicePlacementSpec"}  # not on torch's list

BAD = [
    None,
    -1,
    7,
    2**40,
    2.5,
    True,
    "nonsense",
    b"x",
    (),
    (-2, 2),
    [3],
    {"_local": 1},
    torch.ones(3),
    torch.int8,
    dict,
]


def mutations(value, deep=3):
    """`value` with one thing in it changed: another value, one less, one more, two swapped."""
    yield from BAD
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list) and deep:
        kind = type(value)
        for i, item in enumerate(value):
            yield kind((*value[:i], *value[i + 1 :]))
            yield kind((*value[:i], item, *value[i:]))
            for other in mutations(item, deep - 1):
                yield kind((*value[:i], other, *value[i + 1 :]))
        yield kind(reversed(value))
    elif isinstance(value, dict) and deep:
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
            for other in mutations(value[key], deep - 1):
                yield {**value, key: other}
        yield {**value, "_local": 1}
        yield {**value, "to_local": None}
    elif isinstance(value, torch.Tensor):
        yield value.double()
        yield value.reshape(-1)
        yield value[:1]
        yield value.to_sparse()
        yield value.to("meta")


NO_STATE = object()


def rebuilt(made, args, state):
    """What an unpickler does with a function, its arguments and a state."""
    result = made(*args)
    if state is not NO_STATE:
        result.__setstate__(state)
    return result


def broken(made):
    """Calls of an unpickler that differ from the right one in one thing."""
    function, args, *rest = made.__reduce_ex__(4)
    state = rest[0] if rest and rest[0] is not None else NO_STATE
    for other in mutations(args):
        if isinstance(other, tuple) and state is NO_STATE:
            yield lambda other=other: rebuilt(function, other, state)
    if state is not NO_STATE:
        for other in mutations(state):
            yield lambda other=other: rebuilt(function, args, other)


def use(made):
    """Whatever came out can be used."""
    repr(made)
    if isinstance(made, DTensor):
        made.detach().full_tensor()
        (made + made).to_local()
    elif isinstance(made, Layout):
        [made.local_shape(rank) for rank in made.mesh.ranks]
    elif isinstance(made, (ChunkShardingSpec, EnumerableShardingSpec)):
        pickle.dumps(made)


@pytest.mark.parametrize("name", OBJECTS)
def test_whatever_a_pickle_says(name):
    count = refused = 0
    for load in broken(OBJECTS[name]()):
        count += 1
        try:
            made = load()
        except (TypeError, ValueError, NotImplementedError) as error:
            assert str(error), name
            refused += 1
            continue
        use(made)
    assert count > 10 and refused > count // 4 or name in ("TensorProperties",), (count, refused)


def test_errors_name_the_field():
    function, (parts, structure, source, state, flags) = tensor().__reduce_ex__(4)
    again = lambda **new: function(  # noqa: E731
        new.get("parts", parts), new.get("structure", structure), new.get("source", source), new.get("state", state),
        new.get("flags", flags), new.get("notes"),
    )  # fmt: skip
    for changed, message in (
        ({"parts": [p.double() for p in parts]}, r"rank at \(0, 0\) has a part of shape \(3, 2\), torch.float64"),
        ({"parts": [p.t() for p in parts]}, r"a part of shape \(2, 3\).* must be of shape \(3, 2\)"),
        ({"structure": (0, 0, 0, 0)}, "its structure must number its 2 parts"),
        ({"structure": (0, 1)}, "structure must say which part each of the 4 ranks"),
        ({"structure": (0, 1, 0, 1)}, "the rank at"),
        ({"source": 3}, "device_mesh: expected a DeviceMesh"),
        ({"state": state[:3]}, "its state must be five values"),
        ({"flags": (1, 2)}, "its flags must be two bools"),
        ({"notes": {"_local": 1}}, "its notes set '_local', which is no attribute that a program may set"),
        ({"notes": {"redistribute": 1}}, "its notes set 'redistribute'"),
        ({"notes": {"__class__": int}}, "its notes set '__class__'"),
        ({"notes": {3: 1}}, "its notes set 3"),
    ):
        with pytest.raises((LayoutError, MeshError), match=message):
            again(**changed)
    with pytest.raises(LayoutError, match="a part that another rank has"):
        function(parts[:1], (0, 0, 0, 0), source, (state[0], (6, 2), *state[2:]), flags)


def test_meshes():
    function, args = MESH.__reduce__()
    for changed, message in (
        (((-2, 2), *args[1:]), r"shape must be one or more ints > 0, got \(-2, 2\)"),
        ((args[0], ("dp",), *args[2:]), r"axis_names \('dp',\) must name each of the 2 axes"),
        ((*args[:2], (0, 5), *args[3:]), r"axes \(0, 5\) must be some of the 2 axes"),
        ((*args[:3], "nonsense", 0), "device must be a kind of device, as 'cpu' or 'cuda', got 'nonsense'"),
        ((*args[:4], -1), "first_rank must be an int >= 0, got -1"),
    ):
        with pytest.raises(MeshError, match=message):
            function(*changed)


def test_a_few_bytes_cannot_ask_for_millions_of_ranks():
    begun = time.process_time()
    with pytest.raises(MeshError, match="has 4000000 ranks, and at most 262144 can be simulated"):
        MESH.__reduce__()[0]((2000, 2000), ("a", "b"), (0, 1), "cpu")
    assert time.process_time() - begun < 1


def broken_sharded(rank, world_size):
    spec = ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(world_size)])
    function, args, state = shardwise_ones(spec).__reduce_ex__(4)
    whole = rebuilt(function, args, state)
    assert torch.equal(whole.local_tensor(), torch.ones(whole.local_tensor().shape))
    calls = [(other, state) for other in mutations(args, 2) if isinstance(other, tuple)]
    calls += [(args, other) for other in mutations(state, 3)]
    shard, metadata = state[0][0], state[1]
    calls += [
        (args, ([Tile.unchecked(t, shard.metadata)], *state[1:])) for t in (torch.ones(1, 3), shard.tensor.double())
    ]
    calls += [(args, (state[0], ShardedTensorMetadata(tiles, metadata.size), *state[2:])) for tiles in
              (metadata.shards_metadata[:1], metadata.shards_metadata * 2, [])]  # fmt: skip
    refused = 0
    for other, state in calls:
        try:
            made = rebuilt(function, other, state)
        except (TypeError, ValueError, NotImplementedError) as error:
            assert str(error)
            refused += 1
            continue
        except RuntimeError as error:
            assert "at save time was" in str(error) or "Number of local shards" in str(error), error
            refused += 1
            continue
        assert made.local_tensor().sum() == 6 and made.size() == torch.Size([4, 3]), (other, state)
    assert refused > len(calls) // 2
    dist.barrier()


def shardwise_ones(spec):
    made = ShardedTensor(spec, 4, 3)
    made.local_tensor().fill_(1)
    return made


def test_sharded_tensors():
    run_ranks(broken_sharded, 2)


def test_mesh_of_a_pickle_is_the_same():
    assert pickle.loads(pickle.dumps(MESH)) is MESH
    assert pickle.loads(pickle.dumps(as_mesh(MESH))) is as_mesh(MESH)
    assert list(itertools.islice(mutations(()), 3)) == BAD[:3]
