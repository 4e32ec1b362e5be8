"""Training scripts as they are: their process groups, meshes and devices are played, and their loop is ended."""

import json
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import device_mesh

import shardwise
from shardwise import cli, outline
from shardwise.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    assert torch.cuda.is_available() and dist.is_initialized() and dist.get_rank() == int(os.environ["RANK"])
    tp = 2
    mesh = init_device_mesh("cuda", SHAPE, mesh_dim_names=("dp", "tp"))
    assert isinstance(mesh, DeviceMesh) and dist.get_world_size(mesh["tp"].get_group()) == tp
    with torch.device("cuda", local):
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.zeros(6, 16, device="cuda")
    for step in range(1000):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        MORE
        optimizer.step()
    raise SystemError("the loop should have been ended")

if __name__ == "__main__":
    main()
"""
SHAPE = "(dist.get_world_size() // tp, tp)"


def script(folder, shape=SHAPE, more="pass"):
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("SHAPE", shape).replace("MORE", more))
    return str(path)


def build(mesh):
    """What the script does, for an outlined mesh."""
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.zeros(6, 16, device="cuda")

    def step():
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()

    return step


def run(path, *options, mesh="32x2"):
    return cli.main(["estimate", path, "--mesh", mesh, *options])


def test_a_script_as_it_is(tmp_path, capsys):
    before = device_mesh.init_device_mesh, device_mesh.DeviceMesh, dist.get_rank, torch.cuda.is_available
    assert run(script(tmp_path), "--save", str(tmp_path / "r.json"), "--play", "3") == 0
    assert before == (device_mesh.init_device_mesh, device_mesh.DeviceMesh, dist.get_rank, torch.cuda.is_available)
    assert not dist.is_initialized() and not {"RANK", "WORLD_SIZE", "SHARDWISE_RUN"} & {*os.environ}
    assert "rank 3 of 64 on OutlinedMesh(dp=32, tp=2, device='cuda'" in capsys.readouterr().out
    said = json.loads((tmp_path / "r.json").read_text())
    with outline((32, 2), axis_names=("dp", "tp"), device="cuda", play=3) as mesh:
        report = shardwise.estimate(build(mesh))
    mine = {(one["collective"], one["axis"]): one["bytes"] for one in said["bytes"]}
    assert mine == report.bytes and mine
    assert said["memory"]["peak"] == report.memory.peak
    assert said["memory"]["categories"] == report.memory.categories


@pytest.mark.parametrize(
    ("shape", "mesh", "says", "plays"),
    [
        ("(2, 2)", "32x2", "asks for a mesh of 2x2 ranks; 32x2 are played (--mesh)", "dp=32, tp=2"),
        (SHAPE, "4x16", "asks for a mesh of 32x2 ranks: played so, and not as 4x16", "dp=32, tp=2"),
        (SHAPE, "64", "", "dp=32, tp=2"),
    ],
)
def test_sizes_that_the_script_asks_for(tmp_path, capsys, shape, mesh, says, plays):
    assert run(script(tmp_path, shape), mesh=mesh) == 0
    out, err = capsys.readouterr()
    assert plays in out and says in err and (says == "") == ("asks for" not in err)


def test_sizes_that_cannot_be_played(tmp_path, capsys):
    assert run(script(tmp_path, "(2, 2)"), mesh="64") == 2
    assert "asks for a mesh of 2x2 = 4 ranks, and --mesh 64 has 64; give --mesh 2 sizes" in capsys.readouterr().err


def test_values_that_the_script_looks_at(tmp_path, capsys):
    path = script(tmp_path, more="print('loss', loss.item())")
    assert run(path) == 2
    assert "train.py:28 asks for 'item'" in capsys.readouterr().err
    assert run(path, "--assume", "item=2.5") == 0
    assert "loss 2.5" in capsys.readouterr().out


def test_collectives_of_the_script(tmp_path):
    more = "y = torch.zeros(1024); dist.all_reduce(y); dist.all_reduce(y, group=mesh['dp'].get_group()); dist.barrier()"
    assert run(script(tmp_path, more=more), "--save", str(tmp_path / "with.json")) == 0
    assert run(script(tmp_path), "--save", str(tmp_path / "without.json")) == 0
    bytes_of = lambda name: {
        (one["collective"], one["axis"]): one["bytes"] for one in json.loads((tmp_path / name).read_text())["bytes"]
    }
    found, plain = bytes_of("with.json"), bytes_of("without.json")
    assert found["all_reduce", "world"] == 2 * 63 * 4096 // 64 and ("barrier", "world") in found
    assert found["all_reduce", "dp"] - plain.get(("all_reduce", "dp"), 0) == 2 * 31 * 4096 // 32


def test_what_is_said_wrong(tmp_path, capsys):
    assert run(script(tmp_path), "--set", "batch=2") == 2
    assert "--set is for build()" in capsys.readouterr().err
    assert run(script(tmp_path, more="dist.scatter(loss)")) == 2
    assert "torch.distributed.scatter cannot be played" in capsys.readouterr().err
    assert run(script(tmp_path, more="nn.parallel.DistributedDataParallel(nn.Linear(2, 2))")) == 2
    assert "DistributedDataParallel cannot be played without values; use fully_shard" in capsys.readouterr().err


def test_device_meshes_of_ranks(tmp_path, capsys):
    path = tmp_path / "one.py"
    path.write_text(
        "import sys, torch\nfrom torch import nn\nfrom torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor\n"
        "mesh = DeviceMesh('cuda', list(range(int(sys.argv[1]))))\n"
        "w = nn.Parameter(distribute_tensor(torch.zeros(64, 4), mesh, [Shard(0)]))\n"
        "optimizer = torch.optim.SGD([w])\n"
        "w.sum().backward()\noptimizer.step()\n"
    )
    assert run(str(path), "--args=64", mesh="64") == 0
    assert "rank 0 of 64" in capsys.readouterr().out
    path.write_text("from torch.distributed.device_mesh import DeviceMesh\nDeviceMesh('cuda', [1, 0])\n")
    assert run(str(path), mesh="2") == 2
    assert "in another order, which cannot be played" in capsys.readouterr().err


def test_autocast_of_a_device_that_is_not_here():
    with outline(2, device="cuda"), torch.autocast("cuda", torch.bfloat16):
        assert F.linear(torch.zeros(2, 4, device="cuda"), torch.zeros(3, 4, device="cuda")).dtype is torch.bfloat16
    assert torch.autocast("cpu", torch.bfloat16).device == "cpu"


RESUMES = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from shardwise import checkpoint

dist.init_process_group()
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to("cuda"), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
if sys.argv[1] == "dcp":
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(state, checkpoint_id=sys.argv[2])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    first = 0
else:
    manager = checkpoint.Manager(sys.argv[2], keep=1)
    first = manager.restore({"model": model}, default=0)
    print("first", first)
for step in range(first, first + 9):
    model(torch.zeros(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=sys.argv[2]).result()
    if sys.argv[1] != "dcp":
        manager.save(step, {"model": model})
        checkpoint.save(sys.argv[2], {"model": model}, async_=True).wait()
"""


@pytest.mark.parametrize("how", ["dcp", "manager"])
def test_a_script_that_resumes(how, tmp_path, capsys):
    """It loads no values and changes no file; the step that makes an optimizer's state for a state dict is none."""
    script, saved, report = tmp_path / "resume.py", tmp_path / "saved", tmp_path / "report.json"
    script.write_text(RESUMES)
    if how == "manager":
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        for step in (6, 7):
            shardwise.checkpoint.Manager(saved, sigterm=False).save(step, {"model": model})
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["estimate", str(script), "--mesh", "4", "--args", f"{how} {saved}", "--save", str(report)]) == 0
    said = capsys.readouterr()
    assert f"loads '{saved}" in said.err.replace("\n", "") and ("first 7" in said.out) == (how == "manager")
    assert (
        json.loads(report.read_text())["figures"]["products (flop)"]["value"] == 3 * 2 * 2 * 4 * 8 * 8 - 2 * 4 * 8 * 8
    )
    assert sorted(tmp_path.rglob("*")) == sorted([*before, report])
