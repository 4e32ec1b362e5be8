"""Every example on every layout it lists: loss, gradients and parameters after 3 steps of AdamW equal one device's."""

import importlib.util
import socket
import sys
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.workers import device_mesh, run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))  # as for a script that is run there


def example(name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


LAYOUTS = [(name, layout) for name in ("gpt_3d", "vit", "lora") for layout in example(name).LAYOUTS]
HUGGING = [("llama", "data x tensor"), ("llama", "zero x tensor"), ("gpt2", "data x tensor"), ("gpt2", "zero x tensor")]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_simulated(name, layout):
    module = example(name)
    mesh = module.make_mesh(layout, 8) if name == "gpt_3d" else module.make_mesh()
    losses, difference, moved = module.compare(layout, mesh)
    assert len(losses) == 3 and difference < 1e-10 and moved > 0


@pytest.mark.parametrize(("name", "layout"), HUGGING)
def test_hugging_face_simulated(name, layout):
    pytest.importorskip("transformers")
    module = example("huggingface")
    losses, difference, _ = module.compare(name, layout, module.make_mesh())
    assert len(losses) == 3 and difference < 1e-10


def on_ranks(rank, world_size, cases):
    worst = {}
    for name, *layout in cases:
        module = example(name)
        mesh = device_mesh((2, 2), ("dp", "tp")) if name == "huggingface" else real_mesh(module, *layout)
        worst[name, *layout] = module.compare(*layout, mesh)[1]
    return worst


def real_mesh(module, layout):
    if module.__name__ != "gpt_3d":
        return device_mesh((2, 2), ("dp", "mp") if module.__name__ == "vit" else ("dp", "tp"))
    axes = module.LAYOUTS[layout][0]
    return device_mesh(tuple(sizes[0] for sizes in axes.values()), tuple(axes))


def test_on_processes():
    cases = [case for case in LAYOUTS if case[1].startswith("zero")]  # "data" is the same with whole parameters
    for worst in run_ranks(on_ranks, 4, cases):
        assert len(worst) == len(cases) and max(worst.values()) < 1e-10, worst


def test_hugging_face_on_processes():
    pytest.importorskip("transformers")
    for worst in run_ranks(on_ranks, 4, [("huggingface", *case) for case in HUGGING]):
        assert len(worst) == len(HUGGING) and max(worst.values()) < 1e-10, worst


RANK = """
import os, runpy, sys
script, steps, rank, port = sys.argv[1:]
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="4", MASTER_ADDR="localhost", MASTER_PORT=port)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
sys.argv, sys.path[0] = [script, steps], os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
"""


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize(("script", "lines"), [("gpt_4d", 4)])
def test_the_script_runs(script, lines):
    """On ranks that find what torchrun gives them, without the time to load torch in each."""
    port = free_port()
    ranks = run_forked(RANK, [(EXAMPLES / f"{script}.py", 2, rank, port) for rank in range(4)])
    assert [rank.code for rank in ranks] == [0] * 4, "".join(rank.noise for rank in ranks)
    said = "".join(rank.said for rank in ranks)
    assert said.count("loss ") == lines and "largest difference to one device" in said


def test_examples_are_short():
    for name in ("gpt_3d", "gpt_4d", "vit", "lora", "huggingface"):
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 150, name
