"""The arithmetic of the documentation's explorer agrees with the library."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from shardwise import Partial, Replicate, Shard, plan_move, simulate
from shardwise.layout import Layout
from shardwise.mesh import as_mesh

SCRIPT = Path(__file__).parents[1] / "docs" / "assets" / "explorer.js"
PROGRAM = """
const { tilesOf, moveOf, everyone } = require(process.argv[1]);
const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map(([shape, mesh, from, to, itemsize]) => {
  const move = moveOf(shape, mesh, from, to, itemsize);
  return [everyone(mesh).map((c) => tilesOf(shape, mesh, to, c)), move && move.bytes];
})));
"""


def draw(chance):
    shape = [chance.randint(1, 12) for _ in range(chance.randint(1, 4))]
    mesh = [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]
    places = lambda: [chance.choice(["R", "R", *(f"S{d}" for d in range(len(shape)))]) for _ in mesh]  # noqa: E731
    before, after = places(), places()
    if chance.random() < 0.4:  # a pending sum on one axis, all else as it is
        axis = chance.randrange(len(mesh))
        before, after = list(after), list(after)
        before[axis] = "P"
    return [shape, mesh, before, after, chance.choice([1, 2, 4, 8])]


DTYPES = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}


def placement(word):
    return Replicate() if word == "R" else Partial() if word == "P" else Shard(int(word[1:]))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_thousand_random_cases():
    chance = random.Random(0)
    cases = [draw(chance) for _ in range(1100)]  # of some, the page says that there are several ways
    done = subprocess.run(["node", "-e", PROGRAM, str(SCRIPT)], input=json.dumps(cases), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    compared = 0
    for (shape, sizes, before, after, itemsize), (tiles, received) in zip(cases, json.loads(done.stdout), strict=True):
        mesh = as_mesh(simulate(tuple(sizes)))
        src, dst = (Layout.make(mesh, list(map(placement, places)), shape, DTYPES[itemsize]) for places in (before, after))
        for rank, held in zip(mesh.ranks, tiles, strict=True):
            assert tuple(b - a for a, b in held) == dst.local_shape(rank)
            for tile in dst.tiles(rank):
                assert [[start, start + size] for start, size in zip(*tile)] == held
        plan = plan_move(src, dst)
        if received is not None:
            compared += 1
            assert received == [plan.bytes_in(rank) for rank in mesh.ranks], (shape, sizes, before, after, plan)
    assert compared >= 1000


ASKED = [  # shape, mesh, from, to, bytes per element: what the page says is wrong
    (["10, 64", "2x4", "S0, S1", "R S0", 4], ""),
    (["(10, 64)", "2, 4", "Shard(0), Shard(dim=1)", "Replicate(), Partial()", 4], ""),
    (["", "2", "R", "R", 4], ""),
    (["ten", "4", "S0", "R", 4], '"ten" is no size: write numbers, as 10, 64'),
    (["10", "4", "S0", "Q", 4], '"Q" is no placement: write R, S0, S1, ... or P'),
    (["10", "4", "S", "R", 4], '"S" is no placement: write R, S0, S1, ... or P'),
    (["10", "4", "S0", "R1", 4], '"R1" is no placement: write R, S0, S1, ... or P'),
    (["5", "2, 2", "S0", "R", 4], '"from" must have 2 placements, one for each axis of the mesh; it has 1'),
    (["3", "4", "S0", "S5", 4], "S5 cuts dim 5, and the tensor has 1 dim"),
    (["3", "0", "S0", "R", 4], "the mesh must have 1 to 4,096 ranks"),
    (["3", "128, 64", "S0, R", "R, R", 4], "the mesh must have 1 to 4,096 ranks"),
    (["3", "2", "S0", "R", 0], "an element has 1 byte or more"),
]
READING = """
const { sizesIn, placesIn, problemOf } = require(process.argv[1]);
const asked = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(asked.map(([shape, mesh, from, to, itemsize]) => {
  const read = [sizesIn(shape), sizesIn(mesh), placesIn(from), placesIn(to)];
  return [problemOf(...read, itemsize), read.map(([found]) => found)];
})));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_what_people_write():
    done = subprocess.run(["node", "-e", READING, str(SCRIPT)], input=json.dumps([a for a, _ in ASKED]), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [said for said, _ in found] == [said for _, said in ASKED]
    assert found[0][1] == [[10, 64], [2, 4], ["S0", "S1"], ["R", "S0"]]
    assert found[1][1] == [[10, 64], [2, 4], ["S0", "S1"], ["R", "P"]]
