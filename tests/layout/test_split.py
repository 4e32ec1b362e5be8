"""The algebra of intervals against plain sets of ints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout import split
from tests.layout.brute import chunked, deterministic, runs, spell

indices = st.sets(st.integers(0, 30))
messy = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)  # any order, overlapping, backwards


def is_normal(intervals):
    gaps = zip(intervals, intervals[1:], strict=False)
    return isinstance(intervals, tuple) and all(a < b for a, b in intervals) and all(p[1] < q[0] for p, q in gaps)


@deterministic(300)
@given(messy)
def test_normalize(intervals):
    result = split.normalize(intervals)
    assert is_normal(result)
    assert spell(result) == sorted(set(spell(intervals)))


@deterministic(100)
@given(indices)
def test_normalize_again_changes_nothing(held):
    assert split.normalize(runs(held)) == runs(held)
    assert split.normalize(reversed(runs(held))) == runs(held)
    assert split.count(runs(held)) == len(held)
    assert split.is_contiguous(runs(held)) == (not held or max(held) - min(held) + 1 == len(held))


def test_normalize_takes_lists_and_other_ints():
    import numpy

    result = split.normalize([[numpy.int64(3), numpy.int64(5)], [1, 3]])
    assert result == ((1, 5),) and all(type(i) is int for pair in result for i in pair)


@deterministic(400)
@given(indices, st.data())
def test_compose(parent, data):
    ordered = sorted(parent)
    child = data.draw(st.sets(st.integers(0, len(ordered) - 1)) if ordered else st.just(set()))
    expected = runs(ordered[at] for at in child)
    assert split.compose(runs(parent), runs(child)) == expected
    assert split.positions(runs(parent), expected) == runs(child)  # the inverse


@deterministic(300)
@given(indices, indices)
def test_positions_of_what_is_there(parent, other):
    """Indices of `other` outside of the parent have no position."""
    ordered = sorted(parent)
    assert split.positions(runs(parent), runs(other)) == runs(ordered.index(i) for i in parent & other)


@deterministic(300)
@given(indices, indices)
def test_intersect(left, right):
    assert split.intersect(runs(left), runs(right)) == runs(left & right)
    assert split.intersect(runs(right), runs(left)) == runs(left & right)


@deterministic(200)
@given(indices, st.integers(0, 35), st.integers(0, 4))
def test_repeat(held, step, times):
    assert split.repeat(runs(held), step, times) == runs({i + step * t for t in range(times) for i in held})


@deterministic(100)
@given(indices, st.integers(-40, 40))
def test_shift(held, by):
    assert split.shift(runs(held), by) == runs(i + by for i in held)


@pytest.mark.parametrize("parts", range(1, 9))
def test_chunk_pieces_is_torch_chunk(parts):
    for n in range(25):
        pieces = split.chunk_pieces(n, parts)
        assert [spell(part) for part in pieces] == chunked(list(range(n)), parts)
        assert all(is_normal(part) for part in pieces)
        for i, part in enumerate(pieces):
            a, b = split.chunk_bounds(n, parts, i)
            assert list(range(a, b)) == spell(part) and 0 <= a <= b <= n


@deterministic(100)
@given(st.lists(st.integers(0, 5), max_size=6))
def test_sizes_to_pieces(sizes):
    pieces = split.sizes_to_pieces(sizes)
    assert [split.count(part) for part in pieces] == sizes
    assert spell(interval for part in pieces for interval in part) == list(range(sum(sizes)))
    assert all(is_normal(part) for part in pieces)
