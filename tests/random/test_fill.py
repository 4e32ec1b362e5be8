"""Any box of a tensor is filled with the numbers it has in the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.random import distributions as draws
from shardwise.random import fill, philox
from shardwise.random.fill import fill_held, fill_tile
from shardwise.random.torch_stream import held_before

DTYPES = {
    "normal": (torch.float32, torch.float64, torch.complex64),
    "uniform": (torch.bfloat16,),
    "bernoulli": (torch.bool,),
}


def whole(shape, what, dtype, key=11):
    return fill_tile(torch.empty(shape, dtype=dtype), (0,) * len(shape), shape, what, key)


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=4)))
    offsets = tuple(draw(st.integers(0, n)) for n in shape)
    sizes = tuple(draw(st.integers(0, n - a)) for n, a in zip(shape, offsets, strict=True))
    order = draw(st.permutations(range(len(shape))))
    return shape, offsets, sizes, order, draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(boxes(), st.sampled_from(["normal", "uniform", "bernoulli"]), st.sampled_from([1 << 30, 8, 3]))
def test_any_box(box, name, chunk):
    """In any memory order, with holes or without, in chunks of any size."""
    shape, offsets, sizes, order, holes = box
    what = getattr(draws, name)()
    saved = philox.CHUNK, fill.CHUNK
    for dtype in DTYPES[name]:
        want = whole(shape, what, dtype)[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
        stored = torch.empty([sizes[d] * (2 if holes else 1) for d in order], dtype=dtype)
        stored = stored[tuple(slice(None, None, 2) for _ in order)] if holes else stored
        target = stored.permute(*[order.index(d) for d in range(len(order))]) if order else stored
        try:
            fill.CHUNK = max(chunk if chunk < 1 << 30 else saved[1], 4)
            got = fill_tile(target, offsets, shape, what, 11)
        finally:
            fill.CHUNK = saved[1]
        assert got is target and torch.equal(got, want)


def test_large_tensors_in_chunks():
    """More than one chunk, with runs that begin anywhere in a block."""
    for dtype in (torch.float32, torch.float64):
        shape = (3, 130_001)
        everything = whole(shape, draws.normal(), dtype)
        part = fill_tile(torch.empty((3, 99_999), dtype=dtype), (0, 7), shape, draws.normal(), 11)
        assert torch.equal(part, everything[:, 7 : 7 + 99_999])
        flat = whole((3 * 130_001,), draws.normal(), dtype)
        assert torch.equal(flat.view(shape), everything), "numbers depend on the place in the flat tensor"


def test_numbers_beyond_32_bits():
    """A tensor that no machine holds: a box far inside of it."""
    shape, at = (1 << 20, 1 << 21), (1 << 19, 12345)
    near = fill_tile(torch.empty(2, 40), at, shape, draws.normal(), 3)
    wider = fill_tile(torch.empty(4, 100), (at[0] - 1, at[1] - 31), shape, draws.normal(), 3)
    assert torch.equal(near, wider[1:3, 31:71])
    border = 1 << 34  # where the number of the block needs a 33rd bit
    run = fill_tile(torch.empty(64), (border - 32,), (1 << 40,), draws.normal(), 3)
    assert torch.equal(run[20:50], fill_tile(torch.empty(30), (border - 12,), (1 << 40,), draws.normal(), 3))
    assert len(run.unique()) == 64


def test_several_pieces():
    sides = (((0, 2), (5, 6)), ((1, 4),))
    everything = whole((7, 5), draws.normal(), torch.float64)
    got = fill_held(torch.empty(3, 3, dtype=torch.float64), sides, (7, 5), draws.normal(), 11)
    assert torch.equal(got, everything[[0, 1, 5], 1:4])


def test_nothing_is_written_elsewhere():
    memory = torch.zeros(10, 10)
    fill_tile(memory[2:5, 3:7], (0, 0), (3, 4), draws.uniform(1, 2), 5)
    assert (memory != 0).sum() == 12 and memory[2:5, 3:7].min() >= 1


@given(st.integers(0, 60), st.integers(0, 200))
def test_held_before(number, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 5, 3)
    masks = [torch.rand(n, generator=generator) < 0.6 for n in shape]
    held = masks[0][:, None, None] & masks[1][:, None] & masks[2]
    sides = [tuple((i, i + 1) for i in range(len(m)) if m[i]) for m in masks]
    assert held_before(sides, shape, number) == int(held.flatten()[:number].sum())


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_meta_tensors_have_no_numbers(dtype):
    assert fill_tile(torch.empty(3, device="meta"), (0,), (3,), draws.normal(), 1).device.type == "meta"
