"""Models of several families run on an outlined mesh, with the communications that they have on simulated ranks."""

import pytest

import shardwise
from shardwise import outline, simulate
from tests.outline.models import FAMILIES, HUGGING_FACE
from tests.outline.programs import entries

AXES = ("dp", "tp")
ASSUME = {"nonzero": 0.25, "item": 1, "experts": "even"}


def summed(build, shape):
    ranks = []
    for rank in range(shape[0] * shape[1]):
        with outline(shape, axis_names=AXES, play=rank, assume=ASSUME) as mesh:
            ranks.append(entries(build, mesh, steps=1))
    return [(*same[0][:-1], sum(entry[-1] for entry in same)) for same in zip(*ranks, strict=True)]


@pytest.mark.parametrize("name", FAMILIES)
def test_communications_are_those_of_simulated_ranks(name):
    mine = summed(FAMILIES[name], (2, 2))
    assert mine == entries(FAMILIES[name], simulate((2, 2), axis_names=AXES), steps=1)
    assert mine


@pytest.mark.parametrize("name", FAMILIES)
def test_families_on_many_ranks(name):
    with outline((4, 8), axis_names=AXES) as mesh:
        report = shardwise.estimate(FAMILIES[name](mesh), warmup=0)
    assert report.memory.categories["parameters"] > 0 and report.bytes


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models(name):
    pytest.importorskip("transformers")
    with outline((64, 2), axis_names=AXES, assume=ASSUME) as mesh:
        report = shardwise.estimate(HUGGING_FACE[name](mesh), warmup=0)
    assert report.memory.categories["parameters"] > 0
    assert sum(size for (_, axis), size in report.bytes.items() if axis == "dp") > 0
    assert ("tp" in {axis for _, axis in report.bytes}) == (name == "hugging_face_llama")
