"""How many files a reader walks through: the files that one warm call enters, and that none of them calls back up."""

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import shardwise
from shardwise import Replicate, Shard, distribute_tensor, simulate
from shardwise import sharded as S
from shardwise.comm.watch import errors
from tests.test_layers import ROW, unit_of
from tests.workers import device_mesh, run_ranks

ROOT = str(Path(shardwise.__file__).parent)


def walked(call):
    """The files of a warm call, in the order of entering them, and the calls from a lower layer to a higher one."""
    for _ in range(3):
        call()
    files, up = [], []

    def note(frame, event, arg):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            files.append(str(Path(name).relative_to(ROOT)))
            caller = frame.f_back.f_code.co_filename
            if caller.startswith(ROOT):
                here, there = (unit_of("shardwise." + file.removesuffix(".py").replace("/", "."))
                               for file in (str(Path(caller).relative_to(ROOT)), files[-1]))  # fmt: skip
                if ROW[there] < ROW[here]:
                    up.append(f"{caller} -> {name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(dict.fromkeys(files)), up


def walks(rank, world):
    while errors.standing:  # what another test raised in this process is told to the other ranks for a while
        errors.forget()
        time.sleep(0.05)
    mesh = device_mesh((world,))
    x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
    weight = distribute_tensor(torch.randn(8, 8), mesh, [Replicate()])
    places = [f"rank:{r}/cpu" for r in range(world)]
    rows, columns = S.ChunkShardingSpec(0, places), S.ChunkShardingSpec(1, places)
    tensor = S.rand(rows, 8, 8)
    with torch.no_grad():
        return {
            "linear": walked(lambda: F.linear(x, weight)),
            "redistribute": walked(lambda: x.redistribute(placements=[Shard(1)])),
            "reshard": walked(lambda: (tensor.reshard(columns), tensor.reshard(rows))),
        }


def test_walks():
    found = run_ranks(walks, 2)[0]
    for name, (files, _) in found.items():
        print(name, len(files), *files)
    assert len(found["linear"][0]) <= 7
    files, up = found["redistribute"]
    # a cache and a table of torch's names are no stations on the way
    stations = [file for file in files if file != "layout/on_mesh.py" and not file.startswith("torch_private/")]
    assert len(stations) <= 9 and not up, (files, up)
    moving = {file for file in found["reshard"][0] if file.startswith(("move/", "comm/"))}
    assert {"move/run.py", "move/transfer.py", "comm/messages.py"} <= moving
    assert moving <= {*files, "move/tiles.py"}, moving


def test_a_warm_move_of_simulated_ranks_works_nothing_out():
    """Which rank puts what where is kept with the step."""
    x = distribute_tensor(torch.randn(8, 8), simulate(4), [Shard(0)])
    with torch.no_grad():
        files, _ = walked(lambda: x.redistribute(placements=[Shard(1)]))
    assert "move/whole.py" in files and "layout/region.py" not in files, files
