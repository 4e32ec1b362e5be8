"""Every program that once gave something else than plain torch: random ones that the fuzzer found, made short, and those
found by hand. `found/` has them by family."""

from pathlib import Path

import pytest

from shardwise.testing.fuzz import Program, judge
from shardwise.testing.fuzz.judge import RIGHT
from tests.workers import device_mesh, run_ranks

FOLDER = Path(__file__).parent / "found"
ON_PROCESSES = "on_processes"


def programs(family):
    return FOLDER.joinpath(f"{family}.txt").read_text().strip().split("\n\n")


FAMILIES = sorted({path.stem for path in FOLDER.glob("*.txt")} - {ON_PROCESSES})
FOUND = [pytest.param(text, id=f"{family}-{i}") for family in FAMILIES for i, text in enumerate(programs(family))]


@pytest.mark.parametrize("text", FOUND)
def test_found(text):
    assert str(judge(Program.parse(text))) == RIGHT


def judged(rank, world_size, texts):
    mesh = device_mesh((world_size,))
    return [str(judge(Program.parse(text), mesh)) for text in texts]


def test_found_on_processes():
    texts = programs(ON_PROCESSES)
    assert run_ranks(judged, 2, texts) == [[RIGHT] * len(texts)] * 2
