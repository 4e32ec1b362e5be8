"""examples/embedding_tables.py: four processes train as one does."""

import importlib.util
from pathlib import Path

import pytest

from tests.workers import run_ranks

PATH = Path(__file__).parents[2] / "examples" / "embedding_tables.py"


def example():
    spec = importlib.util.spec_from_file_location("embedding_tables", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(rank, world, steps):
    return example().train(rank, world, steps)[0]


def test_the_losses_are_those_of_one_process():
    want = example().reference(8)
    for losses in run_ranks(trained, 4, 8):
        assert losses == pytest.approx(want, abs=1e-12)
