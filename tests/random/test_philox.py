"""The integers: published vectors, any block on its own; the functions: right to the last bits."""

import math

import numpy as np
import pytest

from shardwise.random import elementary
from shardwise.random.philox import CHUNK, SCRATCH, words

# Random123's known answers for philox4x32 with 10 rounds: counter, key, result
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox(counter, key):
    """The definition, in Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = second >> 32 ^ c1 ^ k0, second & 0xFFFFFFFF, first >> 32 ^ c3 ^ k1, first & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def made(blocks, key, draw=0):
    return words(np.asarray(blocks, dtype=np.int64), key, draw).elements(False).reshape(-1, 4).tolist()


@pytest.mark.parametrize("counter,key,result", KNOWN)
def test_published_vectors(counter, key, result):
    assert philox(counter, key) == result


def test_published_vector_of_the_implementation():
    assert made([0], 0)[0] == list(KNOWN[0][2])


@pytest.mark.parametrize("first", [0, 5, (1 << 32) - 3, (1 << 32) + 7, (1 << 48) - 2])
@pytest.mark.parametrize("draw", [0, 1, 0xFFFFFFFF])
@pytest.mark.parametrize("key", [0, 0x123456789ABCDEF0, (1 << 64) - 1])
def test_blocks_are_by_definition(first, draw, key):
    """Also where the number of the block grows past 32 bits in the middle of a chunk."""
    got = made(range(first, first + 7), key, draw)
    for i, block in enumerate(range(first, first + 7)):
        assert got[i] == list(philox((block & 0xFFFFFFFF, block >> 32, draw, 0), (key & 0xFFFFFFFF, key >> 32)))


def test_a_block_does_not_depend_on_its_chunk():
    everything = made(range(CHUNK), 77)
    assert made([17], 77)[0] == everything[17] and made(range(100, 200), 77) == everything[100:200]


def test_pairs_are_the_words_of_elements():
    numbers = words(np.arange(3), 9).elements(True).tolist()
    low = made(range(3), 9)
    assert numbers == [row[i] | row[i + 1] << 32 for row in low for i in (0, 2)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_elementary_functions(dtype):
    rng = np.random.default_rng(0)
    ulp = np.finfo(dtype).eps
    u = np.concatenate([rng.random(20000), 2.0 ** -rng.integers(0, 32, 200), 1 - rng.random(200) * 1e-3]).astype(dtype)
    u = u[u > 0]
    SCRATCH.start()
    want = np.log(u.astype(np.float128 if hasattr(np, "float128") else np.float64))
    assert np.abs(elementary.log(u.copy()) / np.where(want == 0, 1, want) - (want != 0)).max() < 4 * ulp
    v = rng.uniform(-1, 1, 20000).astype(dtype)
    cos, sin = elementary.turn(v)
    angle = v.astype(np.longdouble) * (math.pi / 2)
    assert np.abs(cos - np.cos(angle)).max() < 3 * ulp and np.abs(sin - np.sin(angle)).max() < 3 * ulp


def test_exponential():
    x = np.concatenate([np.linspace(-40, 40, 30001), [-750.0, -745.0, -1e6, 709.0, 710.0, 1e6, 0.0, np.inf, -np.inf]])
    got = elementary.exp(x.copy())
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(got, np.exp(x), rtol=1e-15, atol=5e-324)
