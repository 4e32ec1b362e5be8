"""Estimates of memory, bytes and time, and the questions that they answer."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwise
from shardwise import DTensor, MeshError, OutlineError, Replicate, Shard, cli, outline, simulate
from shardwise.forecast import Figure, Hardware, compare, every_kind, largest, measuring_host, sweep
from shardwise.forecast.allocator import played
from shardwise.forecast.grids import Grid
from shardwise.forecast.hardware import HardwareError, known
from shardwise.forecast.kernels import Kernel
from shardwise.forecast.memory import Block, Change, Memory, rounded
from shardwise.forecast.progress import Bar
from shardwise.forecast.timing import Looked, play
from shardwise.parallel import data_parallel, dispatch

GB = 10**9


def linear(mesh, batch=64, width=1024):
    """Columns of a square matrix over the last axis, rows of the batch over the first."""
    w = nn.Parameter(shardwise.ones(width, width, device_mesh=mesh, placements=[Replicate(), Shard(0)]))
    x = shardwise.ones(batch, width, device_mesh=mesh, placements=[Shard(0), Replicate()])
    optimizer = torch.optim.AdamW([w])

    def step():
        nn.functional.linear(x, w).relu().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def report_of(shape=(4, 8), **settings):
    with outline(shape, axis_names=("dp", "tp")) as mesh:
        return shardwise.estimate(linear(mesh, **settings), tokens=64)


def test_memory_by_category():
    memory = report_of().memory
    part = 1024 * 1024 // 8 * 4  # bytes of the rank's part of the matrix
    assert memory.categories["parameters"] == part
    assert memory.categories["optimizer state"] == 2 * part + rounded(4)
    assert memory.categories["gradients"] == part
    assert memory.peak == sum(memory.categories.values()) >= 4 * part
    assert max(alive for _, alive in memory.over_time) == memory.peak


def test_activations_are_those_that_are_alive():
    with outline((2, 1), axis_names=("dp", "tp")) as mesh:
        x = shardwise.ones(1024, 256, device_mesh=mesh, placements=[Shard(0), Replicate()]).requires_grad_()
        kept = shardwise.estimate(lambda: x.exp().exp().exp().sum().backward(), warmup=0).memory
        freed = shardwise.estimate(lambda: x.detach().exp().exp().exp().sum(), warmup=0).memory
    one = 512 * 256 * 4
    assert kept.categories["activations"] == 3 * one + 2 * rounded(4)  # the sum of the rank, and of all
    assert freed.peak - freed.start == 2 * one


def test_bytes_are_exact_and_checked():
    report = report_of()
    sizes = {("all_reduce", "dp"): 2 * 3 * (1024 * 128 * 4) // 4}
    assert {k: n for k, n in report.bytes.items() if n > 64} == sizes
    step = linear(simulate((4, 8), axis_names=("dp", "tp")))
    with shardwise.debug.ledger() as log:
        step()
    ranks = report.ranks
    real = [type(e)(e.op, e.kind, e.axis, e.bytes // ranks, e.source, e.backward, e.reason) for e in log]
    assert report.check(real).good and report.check(real, report.memory.peak).peak_error == 0
    bad = report.check(real[1:], report.memory.peak * 2)
    assert not bad.good and bad.peak_error == -0.5 and "-50.0% of the measured one" in str(bad)


def test_time_grows_with_work_and_overlap_is_played():
    small, large = report_of(width=4096), report_of(width=8192)
    assert large.time.total > small.time.total and large.time.flops == 4 * small.time.flops
    assert small.time.total <= small.time.compute + small.time.communication + small.time.host
    assert small.tokens_per_second == pytest.approx(64 / small.time.total)
    assert {figure.basis for figure in small.figures.values()} == {"exact", "assumed"}


def test_files(tmp_path):
    report = report_of()
    report.save(tmp_path / "r.json")
    report.save(tmp_path / "r.trace.json")
    report.save(tmp_path / "r.txt")
    said = json.loads((tmp_path / "r.json").read_text())
    assert said["memory"]["peak"] == report.memory.peak and said["figures"]["step (s)"]["basis"] == "assumed"
    events = json.loads((tmp_path / "r.trace.json").read_text())["traceEvents"]
    queues = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {queues[e["tid"]] for e in events if e["ph"] == "X"} == {"compute", "communication"}
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C") == report.memory.peak
    assert "rank 0 of 32" in (tmp_path / "r.txt").read_text()


class Blocks(nn.Module):
    def __init__(self, layers=20):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_tables_have_modules_lines_and_a_profile_in_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with outline(4, axis_names=("dp",)) as mesh:
        model = data_parallel(Blocks(), mesh)
        report = shardwise.estimate(lambda: model(torch.ones(2, 8)).sum().backward(), warmup=0)
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    of_layers = [line for line in text.splitlines() if "Blocks.layers.*" in line]
    assert len(of_layers) == 1  # 20 layers are one row
    assert "received by line" in text and text.count("test_estimate.py") >= 2  # folded or not, nothing is cut off
    assert "…" not in text
    profile = text.splitlines()[next(i for i, line in enumerate(text.splitlines()) if "memory over time" in line) + 1]
    assert len(profile) == 72 and "█" in profile and len(set(profile)) > 2


def test_a_bar_is_shown_on_terminals_only(monkeypatch, capsys):
    report_of()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Bar(2) as outer:  # a bar inside of another one is not shown, and no error
        assert not outer.disable
        largest(linear, outline((1, 1), axis_names=("dp", "tp")), limit=10)
    assert "playing" in capsys.readouterr().err


def test_kinds_of_ranks_and_the_worst():
    def uneven(mesh):
        x = shardwise.ones(10, 4096, device_mesh=mesh, placements=[Shard(0)]).requires_grad_()
        return lambda: x.exp().sum().backward()

    report = every_kind(uneven, outline(4, play=3))  # 3, 3, 3 and 1 rows
    assert report.rank == 0 and [rank for rank, _ in report.kinds] == [3, 0]
    assert report.kinds[0][1] < report.kinds[1][1] == report.memory.peak


def test_every_dispatch_looks_at_its_counts():
    """The table of who sends what is made once, but a rank waits for its device each time."""
    looks = []
    for layers in (1, 3):
        with outline(4, axis_names=("ep",), assume={"experts": "even"}) as mesh:
            x = shardwise.zeros(16, 8, device_mesh=mesh, placements=[Shard(0)])
            chosen = shardwise.zeros(16, 2, dtype=torch.int64, device_mesh=mesh, placements=[Shard(0)])
            before, mesh.mode.looked = mesh.mode.looked, lambda: looks.append(layers)  # noqa: B023
            for _ in range(layers):
                dispatch(x, chosen, 8)
            mesh.mode.looked = before
    assert looks.count(3) >= looks.count(1) + 2


def test_moments_come_one_after_the_other():
    report = report_of()  # of the second step; what the optimizer keeps was made in the first
    moments = [moment for moment, _ in report.memory.over_time]
    assert moments == sorted(moments) and moments[0] == -1
    assert report.memory.start >= report.memory.categories["optimizer state"] > 0
    counted = [e["args"]["bytes"] for e in report.trace()["traceEvents"] if e["ph"] == "C"]
    assert min(counted) >= report.memory.start


def test_bad_questions():
    mesh = outline((1, 1), axis_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"sweep: batch must be a list of what to try, as batch=\[2\]; got 2"):
        sweep(linear, [mesh], batch=2)
    with pytest.raises(ValueError, match="sweep: meshes must be a list"):
        sweep(linear, mesh)
    for ask in (lambda m: sweep(linear, [m]), lambda m: largest(linear, m), lambda m: every_kind(linear, m)):
        with pytest.raises(MeshError, match=r"must be what shardwise.outline\(...\) gives, got SimulatedMesh"):
            ask(simulate(2))
    with pytest.raises(ValueError, match="largest: limit must be a number of bytes or None, got '70 GB'"):
        largest(linear, mesh, limit="70 GB")
    with pytest.raises(TypeError, match="compare: give two reports"):
        compare(report_of(), 3)


def test_questions():
    mesh = outline((1, 1), axis_names=("dp", "tp"))
    batch, report = largest(linear, mesh, limit=report_of((1, 1), batch=48).memory.peak, start=16)
    assert batch == 48 and report.memory.peak == report_of((1, 1), batch=48).memory.peak
    assert largest(linear, mesh, limit=10) == (0, None)
    found = sweep(linear, [mesh, outline((1, 8), axis_names=("dp", "tp"))], batch=(16,), quiet=True)
    assert len(found.rows) == 2 and found.best and found.table().row_count == 2
    assert compare(found.rows[0][1], found.rows[1][1]).row_count > 5
    assert "tp=8" in str(compare(found.rows[0][1], found.rows[1][1])) and "1x8" in repr(found)


def test_hardware(tmp_path):
    for name in known():
        hardware = Hardware.load(name)
        assert hardware.memory.source and all(f.source for f in hardware.flops.values())
        hardware.save(tmp_path / "copy.json")
        assert Hardware.load(tmp_path / "copy.json") == hardware
    with pytest.raises(HardwareError, match="'abacus' is not known; use one of a100"):
        Hardware.load("abacus")
    near, far = (Hardware.load("h100-sxm").exchange_seconds([8], [stride], GB)[0] for stride in (1, 8))
    assert far > 5 * near


def test_no_mesh():
    with pytest.raises(OutlineError, match="no outlined mesh is active"):
        shardwise.estimate(lambda: None)


def test_commands(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(
        "import shardwise\nfrom shardwise import Shard\n"
        "def build(mesh, rows=64):\n"
        "    x = shardwise.ones(rows, 8, device_mesh=mesh, placements=[Shard(0)])\n"
        "    return lambda: x.sum().full_tensor()\n"
    )
    saved = tmp_path / "out.json"
    assert cli.main(["estimate", str(script), "--mesh", "4096", "--set", "rows=8192", "--save", str(saved)]) == 0
    assert "rank 0 of 4,096" in capsys.readouterr().out and json.loads(saved.read_text())["fits"]
    assert cli.main(["estimate", str(tmp_path / "none.py"), "--mesh", "2"]) == 2
    if not torch.cuda.is_available():
        assert cli.main(["calibrate", "--device", "cuda"]) == 2
        assert "device 'cuda' is not here" in capsys.readouterr().err


def test_plain_tensors_enter(recwarn):
    with outline((2, 2), axis_names=("dp", "tp")) as mesh:
        x = DTensor.from_local(torch.zeros(4, 4), mesh["dp"], [Shard(0)])
        assert shardwise.estimate(lambda: x + 1).memory.peak > 0


def test_tensors_of_another_mesh_do_not_count():
    with outline(2) as other:
        held = shardwise.ones(4096, device_mesh=other, placements=[Replicate()])
    with outline(2) as mesh:
        x = shardwise.ones(256, device_mesh=mesh, placements=[Replicate()])
        assert shardwise.estimate(lambda: x + 1, warmup=0).memory.peak == 2 * rounded(256 * 4)
    assert held.shape == (4096,)


def reserved_by(steps, is_expandable=False, room=math.inf):
    return played([(*step, "")[:3] for step in steps], is_expandable, room).most


def test_the_caching_allocator_is_played():
    mib = 1 << 20
    assert reserved_by([("a", 512), ("b", 1 * mib)]) == 2 * mib  # one small segment
    assert reserved_by([("a", 2 * mib), ("b", 3 * mib)]) == 20 * mib
    assert reserved_by([("a", 33 * mib)]) == 34 * mib
    assert reserved_by([("a", 32 * mib), ("a", 0), ("b", 31 * mib)]) == 32 * mib  # kept, and taken again
    # the hole of 12 MiB is cut, and what is left of it is joined again
    holes = [("a", 40 * mib), ("a", 0), ("b", 12 * mib), ("c", 28 * mib), ("b", 0), ("d", 4 * mib), ("e", 8 * mib)]
    assert reserved_by(holes) == 40 * mib
    assert reserved_by([*holes, ("d", 0), ("e", 0), ("f", 12 * mib)]) == 40 * mib
    assert reserved_by([*holes, ("d", 0), ("f", 12 * mib)]) == 52 * mib  # fragments do not hold it
    memory = report_of().memory
    assert memory.peak <= memory.reserved


def test_streams_and_expandable_segments_are_played():
    mib = 1 << 20
    steps = [("a", 40 * mib), ("a", 0)]
    assert reserved_by([*steps, ("b", 40 * mib, "other")]) == 80 * mib  # no stream uses the memory of another
    assert reserved_by([*steps, ("b", 60 * mib)]) == 100 * mib
    assert reserved_by([*steps, ("b", 60 * mib)], is_expandable=True) == 60 * mib  # the end has grown
    assert reserved_by([("a", 21 * mib)], is_expandable=True) == 40 * mib  # by 20 MiB at a time
    # a hole is taken before the end, which can grow
    holes = [("a", 20 * mib), ("b", 20 * mib), ("c", 20 * mib), ("a", 0), ("c", 0), ("d", 18 * mib), ("e", 20 * mib)]
    assert reserved_by(holes, is_expandable=True) == 60 * mib
    assert reserved_by([*holes, ("f", 2 * mib)], is_expandable=True) == 60 * mib
    assert reserved_by([("a", 3 * mib), ("b", 512)], is_expandable=True) == 22 * mib  # small blocks have their own


def test_the_state_of_an_optimizer_lies_where_the_first_step_left_room():
    mib, changes = 1 << 20, []
    for category, sizes in (("activations", [40]), ("optimizer state", [21, 21]), ("activations", [40])):
        blocks = [Block(0, category, "", "") for _ in sizes]
        changes += [Change(1, block, size * mib) for block, size in zip(blocks, sizes, strict=True)]
        changes += [Change(2, block, -40 * mib) for block in blocks if category == "activations"]
    assert Memory(changes).peak == Memory(changes, is_warm=True).peak == 82 * mib
    assert Memory(changes).reserved == (22 + 22 + 40) * mib
    assert Memory(changes, is_warm=True).reserved == (40 + 22 + 40) * mib  # half of the first segment is left over


def test_what_fits_is_what_the_allocator_gets(monkeypatch):
    mib = 1 << 20
    assert not played([("a", 40 * mib, ""), ("a", 0, ""), ("b", 60 * mib, "")], room=60 * mib).failed  # given back
    cut = [("a", 40 * mib, ""), ("b", 20 * mib, ""), ("a", 0, ""), ("c", 2 * mib, ""), ("b", 0, ""), ("d", 40 * mib, "")]
    assert played(cut, room=64 * mib).failed and not played(cut, room=80 * mib).failed  # "c" holds a segment
    report = report_of()
    groups = {entry.axis for entry in report.entries}
    said = report.hardware.beside
    assert report.beside.value == said["context"].value + len(groups) * said["communicator"].value
    assert report.beside.basis == "assumed" and report.fits
    room = report.beside.value + report.memory.peak
    small = lambda more: replace(report.hardware, memory=Figure(room + more, "assumed"))
    report.hardware = small(0)
    assert not report.fits  # segments are larger than what is in them
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert report.fits
    report.hardware = small(-1)
    assert not report.fits


def test_grids():
    grid = Grid.of(("m", "n"), {(m, n): 1e-9 * m * n for m in (2, 8) for n in (4, 64)}, "made up")
    assert grid.at_sizes((4, 16)) == pytest.approx(64e-9)  # a power of each size, between the points
    assert grid.at_sizes((8, 128)) == pytest.approx(1024e-9) and grid.at_sizes((1, 1)) == pytest.approx(8e-9)
    hardware = replace(
        Hardware.load("h100-sxm"), grids={"matmul bfloat16": grid}, hosts={"view": Figure(1e-6, "assumed")}
    )
    assert hardware.op_seconds(1, 1, "bfloat16", "matmul", grids=("matmul bfloat16",), sizes=(8, 64)) == (
        pytest.approx(512e-9),
        "measured",
    )
    assert hardware.host_seconds("forward", view=2, module=3) == pytest.approx(hardware.host.value + 2e-6)
    with pytest.raises(ValueError, match="has 1 times"):
        Grid(("m",), ((1, 2),), (1.0,))


def test_the_host_runs_ahead():
    """A step takes what the slower of host and device takes; a value that is looked at makes one wait for the other."""
    hardware = replace(Hardware.load("h100-sxm"), host=Figure(1e-6, "assumed"), launch=Figure(1e-6, "assumed"))
    slow, quick = Kernel("mm", 0, int(1e9), "float32", "memory"), Kernel("add", 0, 1, "float32", "memory")
    busy = hardware.op_seconds(0, 1e9, "float32", "memory")[0]
    assert play([slow, *[quick] * 10], hardware).total == pytest.approx(busy + 10e-6)
    looked = play([slow, Looked(), *[quick] * 10], hardware)
    assert looked.total == pytest.approx(busy + 11e-6)  # the last of a step and the start of the next overlap
    assert play([quick] * 10, replace(hardware, host=Figure(5e-6, "assumed"))).total == pytest.approx(50e-6)


def test_recomputed_parts_and_hooks_are_told_apart():
    lay_out = lambda module, mesh: data_parallel(module, mesh, compute_dtype=torch.bfloat16)
    plain, ours = measuring_host._counted(recompute=True), measuring_host._counted(lay_out=lay_out)
    assert plain["parts"] == 6 and plain["library"] == ours["parts"] == 0
    assert ours["library"] >= 6 * 16  # a copy for the gradient of each parameter
