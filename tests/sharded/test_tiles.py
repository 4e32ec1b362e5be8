"""Plans between tiles: exact, balanced, right in both directions. Integers and one process."""

import gc
import random
import time

import numpy as np
import pytest
import torch

from shardwise.comm.messages import Along
from shardwise.errors import MoveError
from shardwise.layout import tiles
from shardwise.layout.tiles import Tiles, first_hole, first_overlap, meetings
from shardwise.layout.tileset import TileSet
from shardwise.move.schedule import Round
from shardwise.move.tiles import TilePlan
from shardwise.move.transfer import Transfer, course_of
from tests.move.postbox import transfer_all
from tests.sharded.common import cut_up


def dealt(boxes, ranks, generator, copies=1):
    """Tiles given to ranks, each to some of them."""
    held = {r: [] for r in ranks}
    for box in boxes:
        for r in generator.sample(list(ranks), generator.randint(1, copies)):
            held[r].append(box)
    return held


def moved(plan, parts):
    """Each rank's target tiles, given its source tiles."""
    like = next(x for held in parts.values() for x in held)
    ranks = sorted({*parts, *plan.ranks})
    return transfer_all(plan, {r: parts.get(r) or [like.new_empty(0)] for r in ranks}, ranks)


def part(value, box):
    return value[tuple(slice(a, a + n) for a, n in zip(*box))].clone()


@pytest.mark.parametrize("seed", range(60))
def test_any_tiles_to_any_tiles(seed):
    generator = random.Random(seed)
    size = [generator.randint(1, 6) for _ in range(generator.randint(0, 3))]
    cut = lambda: cut_up(size, generator.randint(1, 6), generator) if size else [([], [])]
    sources = dealt(cut(), range(4), generator, copies=1 + seed % 3)
    if seed % 5 == 0:  # partial overlaps between holders
        sources[0] += cut()
    targets = dealt(cut(), range(2, 7), generator, copies=1 + seed % 2)  # other ranks too
    plan = TilePlan(sources, targets, itemsize=8)
    value = torch.randn(size, dtype=torch.float64)
    if seed % 4 == 1:  # tiles that are not contiguous, or begin somewhere in their memory
        whole, value = value, value.clone()
        cut_out = lambda box: whole[tuple(slice(a, a + n) for a, n in zip(*box))]
        parts = {r: [cut_out(b) for b in boxes] for r, boxes in sources.items()}
    else:
        parts = {r: [part(value, b) for b in boxes] for r, boxes in sources.items()}
    out = moved(plan, parts)
    for r, boxes in targets.items():
        for box, got in zip(boxes, out.get(r, ())):
            assert torch.equal(got, part(value, box))
        assert plan.bytes_in(r) == plan.lower_bound(r)
    assert sum(plan.bytes_out(r) for r in plan.ranks) == sum(plan.bytes_in(r) for r in plan.ranks)


@pytest.mark.parametrize("seed", range(20))
def test_gradients_take_the_way_back(seed):
    generator = random.Random(seed)
    size = [generator.randint(1, 6) for _ in range(generator.randint(1, 3))]
    sources = dealt(cut_up(size, 5, generator), range(4), generator)
    targets = dealt(cut_up(size, 5, generator), range(4), generator)
    weight = torch.randn(size, dtype=torch.float64)
    plan = TilePlan(sources, targets)
    grads = moved(plan.reverse, {r: [part(weight, b) for b in boxes] for r, boxes in targets.items()})
    for r, boxes in sources.items():
        for box, grad in zip(boxes, grads.get(r, ())):
            assert torch.equal(grad, part(weight, box))
    assert plan.reverse.reverse is plan


def test_what_stays_is_the_same_tensor_and_nothing_travels():
    tiles = {0: [((0, 0), (2, 3))], 1: [((2, 0), (2, 3))]}
    plan = TilePlan(tiles, tiles)
    parts = {0: [torch.ones(2, 3)], 1: [torch.zeros(2, 3)]}
    out = moved(plan, parts)
    assert out[0][0] is parts[0][0] and plan.is_local and plan.bytes_in(0) == 0


def test_what_stays_is_copied_where_room_is_given():
    one, other = ((0, 0), (2, 3)), ((2, 0), (2, 3))
    plan = TilePlan({0: [one, other]}, {0: [other, one]})
    held, room = [torch.ones(2, 3), torch.zeros(2, 3)], [torch.full((2, 3), 7.0) for _ in range(2)]
    out = Transfer(plan, held, 0, Along((0,), (0,), None, "gloo"), room).finish()
    assert out is room and torch.equal(room[0], held[1]) and torch.equal(room[1], held[0])


def test_replicas_share_the_sending():
    box = ((0,), (100,))
    plan = TilePlan({0: [box], 1: [box], 2: [box]}, {r: [box] for r in range(3, 9)})
    assert [plan.bytes_out(r) for r in range(3)] == [200, 200, 200]
    split = TilePlan({0: [box], 1: [box]}, {5: [((10 * i,), (10,)) for i in range(10)]})
    assert [split.bytes_out(r) for r in range(2)] == [50, 50]


def test_an_element_the_rank_holds_never_travels():
    plan = TilePlan({0: [((0,), (8,))], 1: [((4,), (2,))]}, {1: [((0,), (8,))]})
    assert plan.bytes_in(1) == plan.lower_bound(1) == 6


def test_missing_elements_are_named_or_zero():
    with pytest.raises(MoveError, match=r"rank 3 needs the tile at \[2\] of sizes \[5\], of which no rank holds 2"):
        TilePlan({0: [((0,), (5,))]}, {3: [((2,), (5,))]})
    plan = TilePlan({0: [((0,), (5,))]}, {3: [((2,), (5,))]}, holes=True)
    assert moved(plan, {0: [torch.arange(5)]})[3][0].tolist() == [2, 3, 4, 0, 0]
    with pytest.raises(MoveError, match="boxes of 1 dims, but the sources have 2"):
        TilePlan({0: [((0, 0), (5, 5))]}, {0: [((0,), (5,))]})


@pytest.mark.parametrize("seed", range(30))
def test_meetings_against_all_pairs(seed, monkeypatch):
    generator = random.Random(seed)
    box = lambda: ([generator.randint(0, 9) for _ in range(2)], [generator.randint(0, 5) for _ in range(2)])
    monkeypatch.setattr(tiles, "_FEW", 0 if seed % 2 else tiles._FEW)  # by a grid, or all pairs
    one, other = Tiles.of([box() for _ in range(20)]), Tiles.of([box() for _ in range(30)])
    both = lambda i, j: (np.minimum(one.ends[i], other.ends[j]) > np.maximum(one.starts[i], other.starts[j])).all()
    want = {(i, j) for i in range(20) for j in range(30) if both(i, j)}
    got = list(zip(*(side.tolist() for side in meetings(one, other))))
    assert len(got) == len(want) and set(got) == want


def test_overlaps_and_holes_are_found():
    boxes = Tiles.of([((0, 0), (2, 4)), ((2, 0), (2, 2)), ((3, 1), (1, 3))])
    assert first_overlap(boxes) == (1, 2)
    assert first_overlap(boxes.take([0, 1])) is None
    assert first_overlap(Tiles.of([((0,), (3,)), ((0,), (0,)), ((0,), (3,))])) == (0, 2)
    assert first_hole(boxes.take([0, 1]), (4, 4)) == ((2, 2), (2, 2))
    assert first_hole(Tiles.of([((), ())]), ()) is None and first_hole(Tiles.of([], 0), ()) == ((), ())


def test_ten_thousand_tiles_take_milliseconds():
    rows, columns = np.divmod(np.arange(10_000), 100)
    starts = np.stack([rows, columns], axis=1) * 50
    boxes = Tiles(starts, starts + 50)
    sources = TileSet.owned(np.arange(10_000) % 64, boxes)
    targets = TileSet.owned(np.arange(10_000)[::-1] % 48, boxes)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        assert first_overlap(boxes) is None
        plan = TilePlan(sources, targets)
        seconds.append(time.process_time() - start)
    assert plan.bytes_in(5) == plan.lower_bound(5)
    assert min(seconds) < 0.5


@pytest.mark.parametrize("cut", [1, 3])
def test_thousands_of_tiles_are_no_burden_for_the_garbage_collector(cut):
    """What one rank does is kept in a few tuples: no object for each tile that every collection would visit."""
    n = 2_000
    sources = {r: [((6 * i,), (6,)) for i in range(r, n, 2)] for r in range(2)}
    targets = {
        1 - r: [((6 * i + 6 * k // cut,), (6 // cut,)) for i in range(r, n, 2) for k in range(cut)] for r in range(2)
    }
    course = course_of(TilePlan(sources, targets), 0, Along((0, 1), (0, 1), None, "gloo"))
    gc.collect()
    seen, left = {}, [course]
    while left:
        here = left.pop()
        if gc.is_tracked(here) and isinstance(here, (tuple, list, dict, Round)) and id(here) not in seen:
            seen[id(here)] = here
            left += gc.get_referents(here)
    assert len(course.shapes) == n // 2 * cut and len(seen) < 100
