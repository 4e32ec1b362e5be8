"""One training step of a GPT equals one device to 1e-10 in loss, every gradient and every parameter."""

import pytest

from shardwise import simulate
from tests.model import gpt
from tests.workers import device_mesh, run_ranks


@pytest.fixture(scope="module")
def one_device():
    return gpt.step(gpt.build(), *gpt.batch())


@pytest.mark.parametrize("layout", gpt.LAYOUTS)
def test_simulated(layout, one_device):
    gpt.assert_equal(gpt.run(simulate(gpt.LAYOUTS[layout][0]), layout), one_device)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_foreach_and_fused_optimizer(options, one_device):
    gpt.assert_equal(gpt.run(simulate((2, 2)), "zero x tensor", **options), one_device)


def on_gloo(rank, world_size, layout):
    want = gpt.step(gpt.build(), *gpt.batch())
    gpt.assert_equal(gpt.run(device_mesh(gpt.LAYOUTS[layout][0]), layout), want)


@pytest.mark.parametrize("layout", gpt.LAYOUTS)
def test_gloo(layout):
    run_ranks(on_gloo, 4, layout)
