"""The example with dropout: the same losses on every mesh and layout (fifty steps of it: examples/gpt_dropout.py)."""

import importlib.util
import sys
from pathlib import Path

import pytest

from shardwise import simulate
from tests.workers import device_mesh, run_ranks

STEPS = 4


def example():
    if "gpt_dropout" not in sys.modules:
        path = Path(__file__).parents[2] / "examples" / "gpt_dropout.py"
        spec = importlib.util.spec_from_file_location("gpt_dropout", path)
        sys.modules["gpt_dropout"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["gpt_dropout"])
    return sys.modules["gpt_dropout"]


@pytest.fixture(scope="module")
def alone():
    return example().train(simulate((1,)), "data parallel", STEPS)


@pytest.mark.parametrize("layout", example().LAYOUTS)
def test_same_losses(layout, alone):
    gpt = example()
    axes = len(gpt.LAYOUTS[layout][1])
    for ranks in (2, 8) if axes == 2 else (4,):
        got = gpt.train(simulate((ranks,) if axes == 1 else gpt.MESHES[ranks]), layout, STEPS)
        assert got == pytest.approx(alone, abs=1e-9, rel=0)
    assert alone[0] != alone[1]


def test_same_losses_with_activation_checkpointing(alone):
    got = example().train(simulate((3,)), "tensor parallel", STEPS, save_memory=True)
    assert got == pytest.approx(alone, abs=1e-9, rel=0)


def test_dropout_matters(alone):
    gpt = example()
    assert gpt.train(simulate((1,)), "data parallel", STEPS, seed=1) != pytest.approx(alone, abs=1e-3)


def on_processes(rank, world_size):
    return example().train(device_mesh((2, 2)), "data x tensor parallel", STEPS)


def test_same_losses_on_processes(alone):
    for got in run_ranks(on_processes, 4):
        assert got == pytest.approx(alone, abs=1e-9, rel=0)
