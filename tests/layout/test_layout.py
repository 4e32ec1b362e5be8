"""Layouts against a brute-force table of the global indices that every rank holds."""

import copy
import itertools
import math
import pickle
import random
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise import Partial, Replicate, Shard, simulate
from shardwise.errors import LayoutError
from shardwise.layout import Layout, Tile, contiguous_stride
from shardwise.layout.nesting import shards_from_table
from shardwise.mesh import as_mesh
from tests.layout.brute import Dealt, chunked, deal, deterministic, grid, mesh_shapes, rngs, runs, shapes, spell


def make(mesh_shape, placements, shape, dtype=torch.float32, **more):
    return Layout.make(as_mesh(simulate(mesh_shape)), placements, shape, dtype, **more)


def test_a_layout_that_is_there_is_not_checked_again(monkeypatch):
    mesh, pieces = as_mesh(simulate(2)), [[[(0, 1), (3, 4)], [(1, 3)]]]
    given = [Shard(-1, pieces=pieces)], (4,), torch.float32
    first = Layout.make(mesh, *given)
    monkeypatch.setattr("shardwise.layout.checks._check_pieces", None)  # which would take long on many ranks
    assert Layout.make(mesh, first.placements, (4,), torch.float32) is first.replace(dtype=torch.float32) is first
    with pytest.raises(TypeError):  # what is new is checked
        Layout.make(mesh, first.placements, (5,), torch.float32)
    monkeypatch.undo()
    assert Layout.make(mesh, *given) is first  # another spelling of it
    with pytest.raises(LayoutError):
        Layout.make(mesh, first.placements, (5,), torch.float32)


# -- what each rank holds ----------------------------------------------------------------------------------
@deterministic(250)
@given(mesh_shapes, shapes, rngs)
def test_held_and_local_shape(mesh_shape, shape, rng):
    dealt = deal(rng, mesh_shape, shape, partial_ops=("sum", "avg"))
    layout = dealt.layout()
    for rank, coords in enumerate(grid(mesh_shape)):
        assert layout.mesh.coords(rank) == coords
        assert layout.local_shape(rank) == layout.local_shape_at(coords) == dealt.local_shape(coords)
        for dim in range(len(shape)):
            held = dealt.held(coords, dim)
            assert layout.held(dim, coords) == runs(held)
            assert layout.offset_at(dim, coords) == min(held, default=0)


@deterministic(100)
@given(mesh_shapes, shapes, rngs)
def test_held_of_the_first_axes_is_the_parent(mesh_shape, shape, rng):
    """held(dim, coords, axes) is what a layout with the other axes replicated holds; row() relates child to parent."""
    dealt = deal(rng, mesh_shape, shape)
    layout = dealt.layout()
    for axis, placement in enumerate(layout.placements):
        if not isinstance(placement, Shard):
            continue
        outer = layout.replace(placements=[*layout.placements[:axis], *[Replicate()] * (len(mesh_shape) - axis)])
        for coords in grid(mesh_shape):
            parent = layout.held(placement.dim, coords, axis)
            assert parent == outer.held(placement.dim, coords)
            row = layout.row(axis, coords)
            assert sorted(spell(part for parts in row for part in parts)) == list(range(len(spell(parent))))
            mine = [spell(parent)[at] for at in spell(row[coords[axis]])]
            assert runs(mine) == layout.held(placement.dim, coords, axis + 1)


@deterministic(100)
@given(mesh_shapes, st.integers(0, 12), rngs)
def test_every_axis_on_one_dim(mesh_shape, n, rng):
    """Each outer part deals in its own way; row() finds the row of the part that the coordinates are in."""
    dealt = Dealt(mesh_shape, (n,))
    for _ in mesh_shape:
        dealt.cut(0, rng.choice(("sizes", "pieces")), rng)
    layout = dealt.layout()
    for coords in grid(mesh_shape):
        held = list(range(n))
        for axis, i in enumerate(coords):
            held = [held[at] for at in spell(layout.row(axis, coords)[i])]
        assert held == dealt.held(coords, 0) == spell(layout.held(0, coords))


@deterministic(150)
@given(mesh_shapes, shapes, rngs)
def test_tiles_cover_what_is_held_once_and_in_order(mesh_shape, shape, rng):
    dealt = deal(rng, mesh_shape, shape)
    layout = dealt.layout()
    for rank, coords in enumerate(grid(mesh_shape)):
        tiles = layout.tiles(rank)
        assert tiles == layout.tiles_at(coords)
        assert all(isinstance(tile, Tile) and all(size > 0 for size in tile.sizes) for tile in tiles)
        assert [tile.offsets for tile in tiles] == sorted(tile.offsets for tile in tiles)
        inside = [index for tile in tiles for index in box(tile)]
        held = set(itertools.product(*(dealt.held(coords, dim) for dim in range(len(shape)))))
        assert len(inside) == len(set(inside)) and set(inside) == held


def box(tile):
    return itertools.product(*(range(a, a + n) for a, n in zip(tile.offsets, tile.sizes, strict=True)))


@deterministic(100)
@given(mesh_shapes, shapes, rngs)
def test_holders(mesh_shape, shape, rng):
    dealt = deal(rng, mesh_shape, shape)
    layout = dealt.layout()
    replicas = math.prod(k for k, p in zip(mesh_shape, layout.placements, strict=True) if not p.is_shard())
    for index in itertools.islice(itertools.product(*map(range, shape)), 60):
        expected = tuple(
            rank
            for rank, coords in enumerate(grid(mesh_shape))
            if all(i in dealt.held(coords, dim) for dim, i in enumerate(index))
        )
        assert layout.holders(index) == expected
        assert len(expected) == replicas


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (3, 2), (2, 3), (2, 2, 2), (1, 4), (3, 1, 2)])
def test_chunks_nest_like_torch_chunk(mesh_shape):
    """Axis by axis, in mesh order: what a coordinate holds is torch.chunk of what its parent holds."""
    dims = (None, 0, 1)
    for shape in [(8, 8), (7, 5), (3, 2), (1, 9), (0, 4)]:
        whole = torch.arange(math.prod(shape)).view(shape)
        for cut in itertools.product(dims, repeat=len(mesh_shape)):
            places = [Replicate() if dim is None else Shard(dim) for dim in cut]
            layout = make(mesh_shape, places, shape)
            for rank, coords in enumerate(grid(mesh_shape)):
                local = whole
                for axis, dim in enumerate(cut):
                    if dim is not None:
                        parts = local.chunk(mesh_shape[axis], dim)
                        i = coords[axis]
                        local = parts[i] if i < len(parts) else local.narrow(dim, 0, 0)
                assert layout.local_shape(rank) == tuple(local.shape)
                values = {whole[index].item() for tile in layout.tiles(rank) for index in box(tile)}
                assert values == set(local.flatten().tolist())


def test_no_dims_and_nothing_to_hold():
    scalar = make((2, 2), [Replicate(), Partial()], ())
    assert scalar.local_shape(3) == () and scalar.tiles(0) == (Tile((), ()),) and scalar.holders(()) == (0, 1, 2, 3)
    empty = make((3,), [Shard(0)], (0, 4))
    assert [empty.local_shape(rank) for rank in range(3)] == [(0, 4)] * 3 and empty.tiles(1) == ()
    few = make((4,), [Shard(0)], (2, 3))
    assert [few.local_shape(rank) for rank in range(4)] == [(1, 3), (1, 3), (0, 3), (0, 3)]
    assert few.tiles(2) == () and few.offset_at(0, (2,)) == 0


def test_sub_mesh_has_the_ranks_of_its_axes():
    mesh = simulate((2, 3), axis_names=("dp", "tp"))
    layout = Layout.make(as_mesh(mesh["tp"]), [Shard(0)], (5,), torch.float32)
    assert [layout.local_shape(rank) for rank in layout.mesh.ranks] == [(2,), (2,), (1,)]
    assert layout.holders((4,)) == (2,)
    assert mesh.mesh.tolist() == [[0, 1, 2], [3, 4, 5]] and mesh["tp"].mesh.tolist() == [0, 1, 2]
    assert mesh["dp"].mesh.tolist() == [0, 3]
    other = Layout.make(as_mesh(mesh["tp", "dp"]), [Shard(0), Shard(1)], (3, 2), torch.float32)
    assert other.mesh.ranks == (0, 3, 1, 4, 2, 5) and other.holders((1, 1)) == (4,)


# -- one object for equal layouts --------------------------------------------------------------------------
@deterministic(60)
@given(mesh_shapes, shapes, rngs)
def test_equal_layouts_are_one_object(mesh_shape, shape, rng):
    dealt = deal(rng, mesh_shape, shape, partial_ops=("sum", "avg"))
    layout = dealt.layout()
    again = Layout.make(layout.mesh, tuple(dealt.placements), list(shape), torch.float64, contiguous_stride(shape))
    assert again is layout and hash(again) == hash(layout) and again == layout
    assert Layout.make(layout.mesh, layout.placements, shape, torch.float64) is layout  # the canonical form stays
    assert layout.replace() is layout
    assert layout.replace(dtype=torch.float32) is not layout
    assert layout.replace(dtype=torch.float32).replace(dtype=torch.float64) is layout


def test_layouts_that_differ_are_different_objects():
    one = make((2, 2), [Shard(0), Replicate()], (4, 4))
    others = [
        one.replace(placements=[Replicate(), Shard(0)]),
        one.replace(placements=[Shard(1), Replicate()]),
        one.replace(placements=[Shard(0), Partial()]),
        one.replace(placements=[Shard(0, sizes=(3, 1)), Replicate()]),
        one.replace(shape=(4, 5)),
        one.replace(stride=(1, 4)),
        one.replace(dtype=torch.int64),
        one.replace(device=torch.device("meta")),
        make((4, 1), [Shard(0), Replicate()], (4, 4)),
    ]
    assert len({one, *others}) == 10


def test_replace_of_the_shape_makes_the_stride_contiguous():
    layout = make((2,), [Shard(0)], (4, 6), stride=(1, 4))
    assert layout.stride == (1, 4)
    assert layout.replace(shape=(2, 3)).stride == (3, 1)
    assert layout.replace(placements=[Replicate()]).stride == (1, 4)
    assert layout.replace(placements=[Replicate()], stride=None).stride == (6, 1)


def test_threads_get_the_same_layout():
    found = []

    def work():
        found.extend(make((3,), [Shard(0, sizes=(n, 1, 0))], (n + 1, 77)) for n in range(200))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 800 and len(set(found)) == 200


# -- canonical form ----------------------------------------------------------------------------------------
def test_negative_dims_count_from_the_end():
    assert make((2,), [Shard(-1)], (4, 6)) is make((2,), [Shard(1)], (4, 6))
    assert make((2,), [Shard(-2, sizes=(1, 3))], (4, 6)) is make((2,), [Shard(0, sizes=(1, 3))], (4, 6))
    assert make((2,), [Shard(-1)], (4, 6)).placements == (Shard(1),)


def test_explicit_sizes_that_equal_chunks_become_chunks():
    assert make((4,), [Shard(0, sizes=(3, 3, 3, 1))], (10,)) is make((4,), [Shard(0)], (10,))
    assert make((4,), [Shard(0, sizes=(1, 1, 0, 0))], (2,)) is make((4,), [Shard(0)], (2,))
    assert make((2,), [Shard(0, pieces=[[[(2, 4), (0, 2)], [(4, 8)]]])], (8,)) is make((2,), [Shard(0)], (8,))
    assert make((4,), [Shard(0, sizes=(3, 3, 2, 2))], (10,)).placements == (Shard(0, sizes=(3, 3, 2, 2)),)
    nested = make((2, 2), [Shard(0), Shard(0, sizes=((2, 2), (2, 1)))], (7,))
    assert nested is make((2, 2), [Shard(0), Shard(0)], (7,))


def test_one_row_of_sizes_serves_all_equal_parents():
    short = make((2, 2), [Shard(0), Shard(0, sizes=(1, 3))], (8,))
    assert short is make((2, 2), [Shard(0), Shard(0, sizes=((1, 3), (1, 3)))], (8,))
    assert [short.local_shape(rank) for rank in range(4)] == [(1,), (3,), (1,), (3,)]


@deterministic(60)
@given(mesh_shapes, st.tuples(st.integers(0, 8)), rngs)
def test_chunks_spelled_out_are_chunks(mesh_shape, shape, rng):
    """The same cuts given as sizes or as pieces give the chunk layout itself."""
    chunks, spelled = Dealt(mesh_shape, shape), Dealt(mesh_shape, shape)
    for k in mesh_shape:
        pieces = [[runs(part) for part in chunked(list(range(len(held))), k)] for held in chunks.parents[0].values()]
        chunks.cut(0, "chunk", rng)
        sizes = [[sum(b - a for a, b in part) for part in row] for row in pieces]
        spelled.keep(Shard(0, pieces=pieces) if rng.random() < 0.5 else Shard(0, sizes=sizes))
    assert spelled.layout() is chunks.layout()
    assert all(p.pieces is None for p in spelled.layout().placements)


def test_is_plain_and_is_partial():
    assert make((2, 2), [Replicate(), Replicate()], (4,)).is_plain
    assert make((2, 1), [Replicate(), Shard(0)], (4,)).is_plain
    assert not make((2, 2), [Replicate(), Shard(0)], (4,)).is_plain
    assert make((2, 2), [Replicate(), Partial()], (4,)).is_partial
    assert not make((2, 2), [Replicate(), Shard(0)], (4,)).is_partial
    assert make((2, 3, 2), [Shard(1), Shard(0), Shard(1)], (4, 4)).axes_of(1) == (0, 2)


# -- tables ------------------------------------------------------------------------------------------------
@deterministic(150)
@given(mesh_shapes, st.integers(0, 9), rngs)
def test_shards_from_table_round_trip(mesh_shape, n, rng):
    dealt = Dealt(mesh_shape, (n,))
    for _ in mesh_shape:
        dealt.cut(0, rng.choice(("chunk", "sizes", "pieces")), rng)
    table = {c: runs(dealt.held(c, 0)) for c in grid(mesh_shape)}
    found = shards_from_table(mesh_shape, n, table.__getitem__, 0)
    assert make(mesh_shape, found, (n,), torch.float64) is dealt.layout()
    assert found == dealt.layout().placements


@deterministic(60)
@given(mesh_shapes, st.integers(0, 9), rngs)
def test_shards_from_any_table(mesh_shape, n, rng):
    """Any dealing of the indices to the ranks can be said with one Shard an axis."""
    ranks = grid(mesh_shape)
    owner = [rng.choice(ranks) for _ in range(n)]
    table = {c: runs(i for i in range(n) if owner[i] == c) for c in ranks}
    layout = make(mesh_shape, shards_from_table(mesh_shape, n, table.__getitem__, 0), (n,))
    assert all(layout.held(0, c) == table[c] for c in ranks)


# -- values: copies, pickles, text -------------------------------------------------------------------------
PLACEMENTS = [
    Replicate(),
    Shard(0),
    Shard(-1),
    Shard(2, sizes=(3, 0, 2)),
    Shard(0, sizes=((1, 2), (2, 1))),
    Shard(1, pieces=[[[(0, 2), (4, 6)], [(2, 4)]]]),
    *(Partial(op) for op in ("sum", "avg", "product", "max", "min", "band", "bor", "bxor")),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
def test_placements_are_values(placement):
    for other in (copy.copy(placement), copy.deepcopy(placement), pickle.loads(pickle.dumps(placement))):
        assert other == placement and hash(other) == hash(placement) and repr(other) == repr(placement)
    assert sum(p == placement for p in PLACEMENTS) == 1
    assert placement != "R" and placement != 0
    with pytest.raises(AttributeError, match="immutable"):
        placement.dim = 3
    assert placement.is_replicate() + placement.is_shard() + placement.is_partial() == 1


def test_what_placements_say_of_themselves():
    assert Shard(1).is_shard(1) and not Shard(1).is_shard(0) and Shard(1).is_shard()
    assert Partial().is_partial("sum") and not Partial("max").is_partial("sum") and Partial("max").is_partial()
    assert Partial() == Partial("sum") and Shard(0, [2, 1]) == Shard(0, sizes=(2, 1)) != Shard(0)
    assert Shard(0, sizes=(3, 0, 2)).sizes == (3, 0, 2) and Shard(0).sizes is None
    assert Shard(0, sizes=((1, 2), (2, 1))).sizes == ((1, 2), (2, 1))
    assert Shard(0, pieces=[[[(1, 2)], [(0, 1)]]]).sizes is None
    assert Shard(0, sizes=(1, 2)).at(3) == Shard(3, sizes=(1, 2)) and Shard(0).at(0) == Shard(0)


@pytest.mark.parametrize(
    ("placement", "long", "short"),
    [
        (Replicate(), "Replicate()", "R"),
        (Shard(1), "Shard(dim=1)", "S(1)"),
        (Shard(0, sizes=(3, 0)), "Shard(dim=0, sizes=(3, 0))", "S(0, sizes=(3, 0))"),
        (Shard(0, pieces=[[[(1, 2)], [(0, 1)]]]), "Shard(dim=0, pieces=((((1, 2),), ((0, 1),)),))", None),
        (Partial("max"), "Partial(max)", "P(max)"),
    ],
)
def test_text_of_placements(placement, long, short):
    assert repr(placement) == long
    assert short is None or str(placement) == short


def test_text_of_many_pieces_is_short():
    strided = Shard(0, pieces=[[[(i, i + 1) for i in range(start, 200, 2)] for start in (0, 1)]])
    assert repr(strided) == "Shard(dim=0, pieces=<200 intervals>)"


def test_text_of_a_layout():
    layout = Layout.make(
        as_mesh(simulate((2, 4), axis_names=("dp", "tp"))), [Shard(0), Partial()], (8, 3), torch.bfloat16
    )
    assert repr(layout) == "Layout((8, 3) bfloat16 [S(0), P(sum)] on mesh(dp=2, tp=4))"


@deterministic(40)
@given(mesh_shapes, shapes, rngs)
def test_copies_and_pickles_of_a_layout_are_the_layout(mesh_shape, shape, rng):
    layout = deal(rng, mesh_shape, shape, partial_ops=("sum",)).layout(rng.choice((torch.float16, torch.bool)))
    assert copy.copy(layout) is layout
    assert copy.deepcopy(layout) is layout
    assert pickle.loads(pickle.dumps(layout)) is layout


def test_a_pickle_keeps_sub_mesh_stride_and_device():
    mesh = as_mesh(simulate((2, 3), axis_names=("dp", "tp"))["tp"])
    layout = Layout.make(mesh, [Shard(0)], (5, 2), torch.float32, stride=(1, 5), device=torch.device("meta"))
    assert pickle.loads(pickle.dumps(layout)) is layout


def test_many_coordinates_stay_cheap():
    """A layout is integers: thousands of ranks cost nothing until they are asked for."""
    layout = make((64, 64), [Shard(0), Shard(0)], (1_000_000, 3))
    rng = random.Random(0)
    for _ in range(100):
        i = rng.randrange(1_000_000)
        coords = (i // 15625, i % 15625 // 245)
        ((a, b),) = layout.held(0, coords)
        assert a <= i < b
