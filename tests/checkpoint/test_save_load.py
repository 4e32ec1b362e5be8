"""`checkpoint.save` and `checkpoint.load`: any layout to any layout, any number of processes, all or nothing."""

import json
import os
import zlib

import pytest
import torch
from torch import nn

import shardwise
from shardwise import LayoutError, Partial, Replicate, Shard, checkpoint, distribute_tensor, sharded, simulate
from shardwise.checkpoint import CheckpointError, crc
from shardwise.checkpoint.opening import open_source
from shardwise.parallel import data_parallel
from tests.checkpoint.test_protocol import LAYOUTS, check, state, targets
from tests.workers import device_mesh, run_ranks

R = Replicate()
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16, torch.uint32]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# -- simulated -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shift", range(len(LAYOUTS)))
def test_any_layout_to_any_layout(tmp_path, shift):
    checkpoint.save(tmp_path / "c", state(simulate), step=7)
    loaded = targets(simulate, shift)
    assert checkpoint.load(tmp_path / "c", loaded).step == 7
    check(loaded)


def test_other_meshes_and_small_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("shardwise.checkpoint.blocks.LEAST_BLOCK", 48)
    monkeypatch.setattr("shardwise.checkpoint.source.LEAST_BLOCK", 48)
    x = torch.arange(5 * 7 * 3).view(5, 7, 3)
    mesh = simulate((2, 3, 2))
    saved = {"x": distribute_tensor(x, mesh, [Shard(1), Shard(0), Shard(2)]), "y": distribute_tensor(x, mesh, [Shard(0), R, Shard(0)])}
    checkpoint.save(tmp_path / "c", saved, max_file_bytes=400)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 2
    other = simulate(4)
    into = {"x": distribute_tensor(x * 0, other, [Shard(2)]), "y": distribute_tensor(x * 0, other, [Shard(1, sizes=(0, 6, 0, 1))])}
    checkpoint.load(tmp_path / "c", into, memory=400)
    assert torch.equal(whole(into["x"]), x) and torch.equal(whole(into["y"]), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(tmp_path, dtype):
    bits = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
    x = bits.view(dtype).view(3, 2)
    mesh = simulate(2)
    if not dtype.is_floating_point or dtype.itemsize > 1:
        saved = {"x": x, "y": distribute_tensor(x, mesh, [Shard(0)]), "s": x[0, 0], "e": x[:0]}
    else:
        saved = {"x": x, "s": x[0, 0]}
    checkpoint.save(tmp_path / "c", saved)
    into = {name: torch.zeros(value.shape, dtype=torch.uint8).to(dtype) for name, value in saved.items()}
    checkpoint.load(tmp_path / "c", into)
    for name, value in into.items():
        plain = whole(saved[name]).contiguous().reshape(-1)
        assert bytes(value.reshape(-1).view(torch.uint8).numpy()) == bytes(plain.view(torch.uint8).numpy()), name


def test_other_programs_read_the_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    x = torch.randn(7, 10)
    layouts = {name: distribute_tensor(x, simulate(shape), places) for name, (shape, places) in LAYOUTS.items()}
    for kind in ("shardwise", "safetensors"):
        checkpoint.save(tmp_path / kind, layouts, format=kind)
        found = safetensors.load_file(tmp_path / kind / "model.safetensors")
        assert found.keys() == layouts.keys()
        assert all(torch.equal(value, x) for value in found.values())
    assert not (tmp_path / "safetensors" / "manifest.json").exists()
    into = {name: torch.zeros(7, 10) for name in layouts}
    checkpoint.load(tmp_path / "safetensors", into)
    assert all(torch.equal(value, x) for value in into.values())


class Position:
    """What has a state of its own."""

    def __init__(self, at=0, seen=()):
        self.at, self.seen = at, torch.tensor(seen)

    def state_dict(self):
        return {"at": self.at, "seen": self.seen}

    def load_state_dict(self, state):
        self.at, self.seen = state["at"], state["seen"]


def trained(steps, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": Position(steps, range(steps)), "scaler": torch.amp.GradScaler("cpu"), "epoch": steps, "name": "run", "history": [1.5] * steps, "pair": (steps, None)}


def test_objects(tmp_path):
    saved, into = trained(3), trained(0, seed=1)
    checkpoint.save(tmp_path / "c", saved, step=3)
    checkpoint.load(tmp_path / "c", into)
    assert (into["epoch"], into["history"], into["pair"]) == (3, [1.5] * 3, (3, None))
    assert into["data"].at == 3 and into["data"].seen.tolist() == [0, 1, 2]
    one, other = saved["optimizer"].state_dict(), into["optimizer"].state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for i, states in one["state"].items():
        assert states.keys() == other["state"][i].keys()
        assert all(torch.equal(value, other["state"][i][key]) for key, value in states.items())
    assert into["scheduler"].state_dict() == saved["scheduler"].state_dict()
    for one, other in zip(saved["model"].state_dict().values(), into["model"].state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_random_stream(tmp_path):
    torch.manual_seed(5)
    checkpoint.save(tmp_path / "c", {})
    want = torch.randn(3)
    torch.manual_seed(6)
    checkpoint.load(tmp_path / "c", {}, random=True)
    assert torch.equal(torch.randn(3), want)


# -- errors --------------------------------------------------------------------------------------------------
def test_partial_is_refused(tmp_path):
    part = shardwise.DTensor.from_local(torch.ones(2), simulate(2), [Partial()])
    with pytest.raises(LayoutError, match=r"'w'.*redistribute it to Replicate\(\) or Shard\(dim\) first"):
        checkpoint.save(tmp_path / "c", {"w": part})
    checkpoint.save(tmp_path / "c", {"w": torch.ones(2)})
    with pytest.raises(LayoutError, match="redistribute"):
        checkpoint.load(tmp_path / "c", {"w": part})


@pytest.mark.parametrize(
    ("into", "text"),
    [
        ({"w": torch.zeros(3)}, "not in `into`: 'n'"),
        ({"w": torch.zeros(3), "n": 0, "v": torch.zeros(1)}, "not in the checkpoint: 'v'"),
        ({"w": torch.zeros(4), "n": 0}, r"tensor 'w' has shape \(3,\), `into` has \(4,\)"),
        ({"w": torch.zeros(3).double(), "n": 0}, "tensor 'w' has dtype torch.float32, `into` has torch.float64"),
        ({"w": 1.0, "n": 0}, "'w': a value in `into`, but a tensor in the checkpoint"),
        ({"w": torch.zeros(3), "n": torch.zeros(())}, "'n': a tensor in `into`, but a value in the checkpoint: 5"),
    ],
)
def test_what_does_not_fit(tmp_path, into, text):
    checkpoint.save(tmp_path / "c", {"w": torch.ones(3), "n": 5})
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load(tmp_path / "c", into)
    assert not isinstance(into["w"], torch.Tensor) or not into["w"].any()


def test_not_strict(tmp_path):
    checkpoint.save(tmp_path / "c", {"w": torch.ones(3), "n": 5})
    into = {"w": torch.zeros(3), "v": torch.zeros(1)}
    done = checkpoint.load(tmp_path / "c", into, strict=False)
    assert (done.missing, done.unexpected) == (("v",), ("n",)) and into["w"].all()


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(TypeError, match=r"a\.f: a function cannot be saved"):
        checkpoint.save(tmp_path / "c", {"a": {"f": whole}})
    with pytest.raises(CheckpointError, match="two entries of the state are called 'a.b'"):
        checkpoint.save(tmp_path / "c", {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    with pytest.raises(CheckpointError, match="format='safetensors' has room for tensors only, but 'n' is a value"):
        checkpoint.save(tmp_path / "c", {"n": 1}, format="safetensors")
    with pytest.raises(ValueError, match="format = 'zip'; give one of 'shardwise'"):
        checkpoint.save(tmp_path / "c", {}, format="zip")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("damage", ["flip", "cut", "header", "manifest", "missing", "no manifest"])
def test_damage_is_found(tmp_path, damage):
    folder = tmp_path / "c"
    checkpoint.save(folder, {"a": torch.ones(1000), "w": torch.ones(3000)})
    data, manifest = folder / "model.safetensors", folder / "manifest.json"
    content = bytearray(data.read_bytes())
    if damage == "flip":
        content[-20] ^= 4
    elif damage == "header":
        content[30] ^= 1
    elif damage == "cut":
        del content[-8:]
    data.write_bytes(content)
    if damage == "manifest":
        manifest.write_text(manifest.read_text().replace("3000", "3001"))
    if damage == "missing":
        data.unlink()
    if damage == "no manifest":
        manifest.unlink()
        data.unlink()
    into = {"a": torch.zeros(1000), "w": torch.zeros(3000)}
    text = {"flip": r"model.safetensors: tensor 'w', bytes \d+ to \d+ of the file .* damaged", "cut": "cut short", "header": r"header \(bytes 0", "manifest": "manifest is damaged", "missing": "missing", "no manifest": "no checkpoint"}
    for verify in ("fast", "full"):
        with pytest.raises(CheckpointError, match=text[damage]):
            checkpoint.load(folder, into, verify=verify)
        assert not into["a"].any() and not into["w"].any()
    if damage == "flip":
        checkpoint.load(folder, into, verify="none")
    elif damage != "no manifest":
        with pytest.raises(CheckpointError):
            checkpoint.load(folder, into, verify="none")


def test_damage_found_late_says_what_was_changed(tmp_path):
    folder = tmp_path / "c"
    checkpoint.save(folder, {"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)})
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-20] ^= 4
    (folder / "model.safetensors").write_bytes(content)
    into = {"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20)}
    with pytest.raises(CheckpointError, match="Of `into`, 2 tensor.s. have new values already, wholly or in part: 'a', 'b'"):
        checkpoint.load(folder, into, memory=4 << 20)
    into = {"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20)}
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(folder, into, memory=4 << 20, verify="full")
    assert not into["a"].any()


def test_a_failed_save_leaves_the_last_one(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "c", {"w": torch.ones(3)}, step=1)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match=r"writing tensor 'w' at \(0,\) failed: No space left.*make room"):
            checkpoint.save(tmp_path / "c", {"w": torch.zeros(3)}, step=2)
    assert os.listdir(tmp_path) == ["c"]
    into = {"w": torch.zeros(3)}
    assert checkpoint.load(tmp_path / "c", into).step == 1 and into["w"].all()
    checkpoint.save(tmp_path / "c", {"w": torch.zeros(3)}, step=2)
    assert checkpoint.load(tmp_path / "c", into).step == 2 and not into["w"].any()


def test_foreign_folders_are_not_overwritten(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.txt").write_text("all I have")
    with pytest.raises(CheckpointError, match="exists and is no checkpoint"):
        checkpoint.save(tmp_path / "c", {})
    assert (tmp_path / "c" / "thesis.txt").exists()


def test_checksums_put_together():
    data = os.urandom(4096)
    for cut in (0, 1, 100, 4095):
        both = crc.shifted(crc.raw(data[:cut]), 4096 - cut) ^ crc.raw(data[cut:])
        assert crc.whole(both, 4096) == zlib.crc32(data)


def test_the_manifest_does_not_grow_with_ranks(tmp_path):
    sizes = []
    for n in (2, 64):
        x = distribute_tensor(torch.zeros(64, 8), simulate(n), [Shard(0)])
        checkpoint.save(tmp_path / str(n), {f"t{i}": x for i in range(20)})
        sizes.append(len((tmp_path / str(n) / "manifest.json").read_text()))
        json.loads((tmp_path / str(n) / "manifest.json").read_text())
    assert sizes[1] < 1.01 * sizes[0]


# -- processes -----------------------------------------------------------------------------------------------
def save_from_4(rank, world_size, path):
    tensors = state(device_mesh)
    tensors |= {f"rank {rank}": rank, "step": 3}
    checkpoint.save(path, tensors, step=3)


def load_into(rank, world_size, path, shift):
    if world_size == 4:
        loaded = targets(device_mesh, shift)
    else:
        value = torch.zeros(7, 10)
        places = [Shard(shift % 2)] if shift else [R]
        loaded = {name: distribute_tensor(value, device_mesh((world_size,)), places) for name in LAYOUTS}
        loaded |= {"scalar": torch.zeros(()), "empty": torch.zeros(0, 3), "plain": torch.zeros(2)}
    objects = {f"rank {r}": None for r in range(4)} | {"step": 0}
    into = loaded | objects
    done = checkpoint.load(path, into, memory=1 << 20)
    check({name: into[name] for name in loaded})
    assert [into[f"rank {r}"] for r in range(4)] == [0, 1, 2, 3]
    return done.bytes_read


def test_on_processes(tmp_path):
    run_ranks(save_from_4, 4, tmp_path / "c")
    total = sum(entry.nbytes for entry in open_source(tmp_path / "c").entries.values())
    for shift in (0, 1, 4):
        assert sum(run_ranks(load_into, 4, tmp_path / "c", shift)) == total
    for shift in (0, 1, 2):
        assert sum(run_ranks(load_into, 2, tmp_path / "c", shift)) == total
    into = {name: torch.zeros(7, 10) for name in LAYOUTS}
    checkpoint.load(tmp_path / "c", into, strict=False)
    check(into)


def differ(rank, world_size, path):
    found = []
    for wrong in ({"w": torch.ones(2) * rank}, {"n": rank}, {"w": torch.ones(2 + rank)}, {"f": whole if rank else 1}):
        try:
            checkpoint.save(path, wrong)
        except (CheckpointError, TypeError) as error:
            found.append(str(error))
    return found


def test_processes_that_differ(tmp_path):
    for plain, number, shape, kind in run_ranks(differ, 2, tmp_path / "c"):
        assert "'w' differs between ranks: the plain tensors of ranks 0 and 1 have other values" in plain
        assert "'n' differs between ranks: 0 on rank 0 and 1 on rank 1" in number
        assert "tensor 'w': shape (2,) on rank 0 and (3,) on rank 1" in shape
        assert "f: a function cannot be saved" in kind
    assert not os.listdir(tmp_path)


def on_parts_of_a_mesh(rank, world_size, path):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    x = torch.arange(35.0).view(5, 7)
    tensors = {"w": distribute_tensor(x, mesh["tp"], [Shard(0)]), f"stage {rank // 2}": distribute_tensor(x + rank // 2, mesh["tp"], [Shard(1)])}
    checkpoint.save(path, tensors)
    into = {"w": distribute_tensor(x * 0, mesh["dp"], [Shard(1)]), f"stage {rank % 2}": distribute_tensor(x * 0, mesh["dp"], [Shard(1)])}
    checkpoint.load(path, into)
    assert torch.equal(into["w"].full_tensor(), x)
    assert torch.equal(into[f"stage {rank % 2}"].full_tensor(), x + rank % 2)


def test_parts_of_a_mesh(tmp_path):
    run_ranks(on_parts_of_a_mesh, 4, tmp_path / "c")


def one_fails(rank, world_size, path):
    checkpoint.save(path, {"w": torch.arange(1 << 19)})
    if rank == 1:
        os.preadv, kept = None, os.preadv
    into = {"w": torch.zeros(1 << 19, dtype=torch.int64)}
    try:
        checkpoint.load(path, into)
    except CheckpointError as error:
        return str(error), bool(into["w"].any())
    except TypeError as error:
        return str(error), bool(into["w"].any())
    finally:
        if rank == 1:
            os.preadv = kept
    return None


def test_one_process_fails(tmp_path):
    (one, touched), (other, also) = run_ranks(one_fails, 2, tmp_path / "c")
    assert "not callable" in one and "not callable" in other and not (touched or also)


def tiles_and_models(rank, world_size, path):
    x = torch.arange(70.0).view(10, 7)
    spec = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    tiles = sharded.empty(spec, 10, 7)
    for shard in tiles.local_shards():
        shard.tensor.copy_(x[shard.metadata.shard_offsets[0] :][: shard.metadata.shard_sizes[0]])
    mesh = device_mesh((world_size,))
    torch.manual_seed(0)
    model = data_parallel(nn.Linear(5, 3), mesh, "parameters")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 5)).sum().backward()
    optimizer.step()
    checkpoint.save(path, {"tiles": tiles, "model": model, "optimizer": optimizer})
    torch.manual_seed(1)
    fresh = nn.Linear(5, 3)
    into = {"tiles": sharded.zeros(sharded.ChunkShardingSpec(1, ["rank:1/cpu", "rank:0/cpu"]), 10, 7), "model": fresh, "optimizer": torch.optim.AdamW(fresh.parameters())}
    checkpoint.load(path, into)
    assert torch.equal(into["tiles"].full_tensor(), x)
    for name, value in model.state_dict().items():
        assert torch.equal(whole(value), fresh.state_dict()[name])
    ours, theirs = optimizer.state_dict()["state"], into["optimizer"].state_dict()["state"]
    assert all(torch.equal(whole(ours[i][key]), whole(theirs[i][key])) for i in ours for key in ours[i])
    again = data_parallel(nn.Linear(5, 3), mesh, "parameters")
    checkpoint.load(path, {"model": again, "tiles": torch.zeros(10, 7)}, strict=False)
    assert torch.equal(again(torch.ones(4, 5)), fresh(torch.ones(4, 5)))


def test_tiles_and_models_on_processes(tmp_path):
    run_ranks(tiles_and_models, 2, tmp_path / "c")
