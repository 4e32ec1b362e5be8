"""A peer that dies or hangs ends the others with an error that names op and axis, within the group's time-out."""

import time

import pytest
import torch
from torch import nn

from tests.forked import run_forked

SCRIPT = """
import datetime, os, sys, time
import torch, torch.distributed as dist
import shardwise
from shardwise import CommError, Replicate, Shard, distribute_tensor, init_device_mesh

rank, fate = int(sys.argv[1]), sys.argv[3]


def meet(place):
    open(f"{sys.argv[2]}-{place}-{rank}", "w").close()
    while not os.path.exists(f"{sys.argv[2]}-{place}-{1 - rank}"):
        time.sleep(0.01)


limit = datetime.timedelta(seconds=8 if fate == "hangs" else 60)  # a death is noticed long before
meet("loaded")  # to load torch may take one longer than the group waits
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2, timeout=limit)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
meet("laid out")  # what this took of the other rank is over
if rank == 1:
    if fate == "dies":
        os._exit(3)
    time.sleep(240)
try:
    torch.cumsum(x, 0)
except CommError as error:
    print("CommError:", error, flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("fate", ["dies", "hangs"])
def test_a_lost_peer_is_an_error(fate, tmp_path):
    start = time.monotonic()
    first, _ = run_forked(SCRIPT, [(rank, tmp_path / "store", fate) for rank in range(2)], only=0)
    lost = "rank 1 died" if fate == "dies" else "rank 1 did not answer"
    assert (
        f"CommError: cumsum: all_reduce on mesh axis 'dp' (2 ranks) failed at coordinates (0,); {lost}:" in first.said
    ), first.noise
    assert time.monotonic() - start < 200


TRAINING = """
import datetime, os, sys, time
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
from shardwise import CommError, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

rank, store, folder, dies_at = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=4, timeout=datetime.timedelta(seconds=60))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)).double()
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}, axis="tp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for param in model.parameters():  # the state is there to be loaded into
    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def state():
    kept = {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
    return {"model": model.state_dict(), "momentum": kept}


done = [int(name) for name in os.listdir(folder) if os.path.exists(f"{folder}/{name}/.metadata")]
first = max(done, default=-1) + 1
if first:
    dcp.load(state(), checkpoint_id=f"{folder}/{first - 1}")
try:
    for step in range(first, 6):
        if rank == 3 and step == dies_at:
            while not all(os.path.exists(f"{store}-saved-{step - 1}-{other}") for other in range(3)):
                time.sleep(0.01)  # torch's own collectives in a save would name nobody
            os._exit(3)
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        x = distribute_tensor(x, mesh, [Shard(0), Replicate()], src_data_rank=None)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("LOSS", step, repr(loss.item()), flush=True)
        dcp.save(state(), checkpoint_id=f"{folder}/{step}")
        open(f"{store}-saved-{step}-{rank}", "w").close()
except CommError as error:
    print("FAILED", error, flush=True)
    os._exit(1)
os._exit(0)
"""


def losses_on_one_device():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def train(tmp_path, name, folder, dies_at):
    """The losses that rank 0 saw, what the ranks said, and how they ended."""
    folder.mkdir(exist_ok=True)
    ranks = run_forked(TRAINING, [(rank, tmp_path / f"store-{name}", folder, dies_at) for rank in range(4)])
    lines = [line.split() for line in ranks[0].said.splitlines() if line.startswith("LOSS")]
    return [float(value) for _, _, value in lines], ranks, [rank.code for rank in ranks]


@pytest.mark.timeout(600)  # eight processes, one after four others, on a machine that may be busy
def test_a_rerun_after_a_death_goes_on_from_the_checkpoint(tmp_path):
    before, said, codes = train(tmp_path, "dying", tmp_path / "kept", 3)
    assert codes == [1, 1, 1, 3] and len(before) == 3, said
    for rank in said[:3]:
        assert "FAILED" in rank.said and "; rank 3 died" in rank.said, rank
    after, said, codes = train(tmp_path, "again", tmp_path / "kept", -1)
    assert codes == [0] * 4, said
    assert before + after == pytest.approx(list(losses_on_one_device()), rel=0, abs=1e-12)
