"""The record of a run: what it keeps, that it is bounded and outlives its process, the report, and who is blamed."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from base64 import b64decode
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.blame import run as run_faults
from shardwise import Replicate, Shard, debug, distribute_tensor, simulate
from shardwise.cli import main
from shardwise.comm.calls import Clock
from shardwise.comm.flight import Flight
from shardwise.comm.record import Note
from shardwise.parallel import ColwiseParallel, RowwiseParallel, data_parallel, parallelize_module
from shardwise.reports import Event, Rank, Run, blame, read_run
from shardwise.reports.blame import waiting
from shardwise.reports.chrome import chrome_trace
from shardwise.reports.page import page
from shardwise.reports.summary import summary
from tests.workers import device_mesh, run_ranks

R = Replicate()


def test_a_simulated_run(tmp_path):
    mesh = simulate(4, axis_names=("tp",))
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = distribute_tensor(torch.randn(4, 8), mesh, [R]).requires_grad_()
    with debug.ledger() as log, debug.record(tmp_path):
        net(x).square().sum().backward()
    (rank,) = read_run(tmp_path).ranks.values()
    modules = [event for event in rank.events if event.is_module]
    assert [event.op for event in modules] == ["Sequential", "Sequential.0", "Sequential.1", "Sequential.2"]
    moves = rank.collectives
    assert [(e.op, e.kind, e.axis, e.bytes, e.source, e.backward) for e in moves] == [
        (e.op, e.kind, e.axis, e.bytes, e.source, e.backward) for e in log
    ]
    assert any(e.backward for e in moves) and all(__file__ in e.source and e.left >= e.entered and e.memory for e in moves)
    assert [row[3] for row in rank.parameters] == ["S(0)", "S(0)", "S(1)", "R"]
    assert not blame(read_run(tmp_path)).ranks


def test_modules_that_are_made_for_each_call_have_their_own_names(tmp_path):
    kinds = [torch.nn.ReLU, torch.nn.GELU, torch.nn.Tanh, torch.nn.Sigmoid]
    with debug.record(tmp_path):
        for kind in kinds * 40:  # one that is gone leaves its id to the next
            torch.nn.Sequential(kind())(torch.ones(2))
    (rank,) = read_run(tmp_path).ranks.values()
    lines = (tmp_path / "rank-00000.lines").read_text()
    assert len(rank.events) == 320 and {e.op for e in rank.events} >= {"Sequential", "Sequential.0"}
    assert lines.count('{"parameters"') == 100  # the file stays small


def test_a_step_that_is_repeated_is_named_once(tmp_path):
    mesh = simulate(2)
    x = distribute_tensor(torch.randn(4, 3), mesh, [R]).requires_grad_()
    w = distribute_tensor(torch.randn(6, 3), mesh, [Shard(0)])
    lines = []
    with debug.record(tmp_path):
        for _ in range(3):  # the gradient of x is added up by a step that each backward pass makes anew
            torch.nn.functional.linear(x, w).sum().backward()
            lines.append((tmp_path / "rank-00000.lines").read_text().count('"name"'))
    assert lines[1] == lines[2]
    (rank,) = read_run(tmp_path).ranks.values()
    assert sum(e.backward and e.kind == "all_reduce" for e in rank.collectives) == 3


def test_ops_that_do_not_communicate_are_kept_in_order(tmp_path):
    x = distribute_tensor(torch.ones(8, 4), simulate(4), [Shard(0)])
    with debug.record(tmp_path):
        y = x.relu()
        y.redistribute(placements=[R])
        with pytest.raises(RuntimeError):
            y @ y
        torch.nn.functional.softmax(y, 0)  # a program of several ops is one op
    (rank,) = read_run(tmp_path).ranks.values()
    first = test_ops_that_do_not_communicate_are_kept_in_order.__code__.co_firstlineno
    found = [(e.op, e.kind, int(e.source.rpartition(":")[2]) - first) for e in rank.all_events]
    assert found[:3] == [("relu", "op", 3), ("redistribute", "all_gather", 4), ("softmax", "op", 7)]
    assert [e.op for e in rank.ops] == ["relu", "softmax"] and all(e.left >= e.entered for e in rank.ops)
    assert "[8, 4] (Shard(dim=0),)" in rank.ops[0].layouts
    with debug.record(tmp_path, ops=False):
        x.relu()
    (rank,) = read_run(tmp_path).ranks.values()
    assert not rank.ops and not rank.events


def test_an_op_that_fails_is_marked(tmp_path):
    x = distribute_tensor(torch.ones(8, 4), simulate(4), [Shard(0)])
    with debug.record(tmp_path):
        for _ in range(2):  # while it is planned nothing runs
            with pytest.raises(RuntimeError):
                x.view(-1).masked_scatter_(torch.ones(32, dtype=torch.bool), torch.ones(3))
    (rank,) = read_run(tmp_path).ranks.values()
    assert [(e.op, e.failed) for e in rank.ops if e.op != "view"] == [("masked_scatter_", True)] * 2


def test_memory_by_category(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    parallelize_module(model, simulate(4), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters())
    with debug.record(tmp_path):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    optimizer.step()
    run = read_run(tmp_path)
    tables = summary(run)["memory_by_category"]
    assert tables["categories"] == ["parameters", "gradients", "optimizer", "the rest"]
    begin, end, before_step, after_step = (row[1:4] for row in tables["rows"])  # of all simulated ranks together
    held = 4 * (2 * 64 + 8 + 8)  # the bias of the second layer is one tensor that all ranks share
    assert begin == end == [held, 0, 0] and before_step == [held, held, 0]
    assert after_step[:2] == [held, held] and after_step[2] >= 2 * held
    text = page(run)
    assert "the rest (up to" in text and "of it that are there all the time" in text  # the program does not hide the tensors


@pytest.mark.filterwarnings("error")
def test_memory_while_parameters_are_gathered(tmp_path):
    """They are no leaves then, and have no gradients."""
    mesh = simulate(2)
    model = data_parallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), mesh, "parameters")
    with debug.record(tmp_path):
        model(distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)])).sum().backward()
    assert [row[2] for row in summary(read_run(tmp_path))["memory_by_category"]["rows"]] == [0, 0]


@pytest.mark.parametrize("moves", [True, False])
def test_time_begins_with_the_first_op(tmp_path, moves):
    """Ops that come before the first collective, or alone, stand where they belong."""
    x = distribute_tensor(torch.ones(8), simulate(2), [Shard(0)])
    with debug.record(tmp_path):
        x.sin()
        time.sleep(0.05)
        if moves:
            x.full_tensor()
        x.cos()
    run = read_run(tmp_path)
    traced = [e for e in chrome_trace(run)["traceEvents"] if e["ph"] == "X"]
    assert min(e["ts"] for e in traced) == 0
    assert 0.05 <= summary(run)["seconds"] == pytest.approx(max(e["ts"] + e["dur"] for e in traced) / 1e6, abs=1e-4)
    found = json.loads(page(run).partition('id="data">')[2].partition("</script>")[0])
    begins = np.frombuffer(zlib.decompress(b64decode(found["ranks"][0]["arrays"][1])), "<u4").cumsum()
    assert begins[0] == 0 and 50_000 <= begins[-1] <= found["length"]


def test_records_do_not_nest_and_arguments_are_checked(tmp_path):
    with debug.record(tmp_path), pytest.raises(RuntimeError, match="do not nest"), debug.record(tmp_path):
        pass
    with pytest.raises(TypeError, match="record: path"):
        debug.record(3)
    with pytest.raises(ValueError, match="record: keep must be an int >= 1, got 0"):
        debug.record(tmp_path, keep=0)
    with debug.record(tmp_path):  # and the one that failed left nothing behind
        pass


def test_the_ring_is_bounded(tmp_path):
    x = distribute_tensor(torch.ones(8), simulate(4), [Shard(0)])
    with debug.record(tmp_path, keep=10):
        for _ in range(25):
            x.redistribute(placements=[R])
    (rank,) = read_run(tmp_path).ranks.values()
    assert [event.number for event in rank.events] == list(range(16, 26)) and rank.lost == 15
    assert (tmp_path / "rank-00000.ring").stat().st_size == 4096 + 640


def test_it_is_there_after_a_kill(tmp_path):
    program = f"""
        import os, signal, torch
        from shardwise import *
        x = distribute_tensor(torch.ones(8), simulate(4), [Shard(0)])
        with debug.record({str(tmp_path)!r}):
            x.redistribute(placements=[Replicate()])
            x.redistribute(placements=[Replicate()])
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=240)
    assert done.returncode == -signal.SIGKILL
    with open(tmp_path / "rank-00000.lines", "ab") as file:
        file.write(b'{"name": 7, "wha')  # killed while it wrote
    run = read_run(tmp_path)
    assert [event.source.rpartition(":")[2] for event in run.ranks[0].events] == ["6", "7"]
    assert run.ranks[0].end is None
    assert blame(run).text.startswith("rank 0 ended without an error of its own (killed?), after redistribute: all_gather on '0'")


def recorded(rank, world_size, folder):
    mesh = device_mesh((2, 2), ("dp", "tp"))
    x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), R], src_data_rank=None)
    weight = distribute_tensor(torch.ones(8, 8), mesh, [R, Shard(1)], src_data_rank=None).requires_grad_()
    with debug.record(folder):
        for _ in range(3):
            (x @ weight).square().sum().backward()
            late = x.redistribute(placements=[R, R], async_op=True)
            if rank == 3:
                time.sleep(0.4)  # longer than the others take
            late.wait()
            x.redistribute(placements=[Shard(1), R])
    return True


def test_on_processes(tmp_path, capsys):
    assert run_ranks(recorded, 4, str(tmp_path)) == [True] * 4
    run = read_run(tmp_path)
    assert sorted(run.ranks) == [0, 1, 2, 3] and not run.missing and not blame(run).ranks
    for rank in run.ranks.values():
        kinds = {(event.kind, event.axis, event.backward) for event in rank.collectives}
        assert ("all_gather", "dp", False) in kinds and ("all_reduce", "dp", True) in kinds
        assert all(e.left is not None and "test_record.py:" in e.source for e in rank.collectives)
        assert sum(e.wait for e in rank.collectives) <= 3  # nobody waits for what has come already
        assert next(e for e in rank.collectives if e.kind == "all_gather").bytes == 128
    assert any(e.wait for rank in run.ranks.values() for e in rank.collectives)
    tables = summary(run)
    waited = {row["rank"]: row["others_waited_s"] for row in tables["slow"]}
    assert waited[3] > 0.1  # on a busy machine another may have been late for longer
    assert list(waited.values()) == sorted(waited.values(), reverse=True)
    assert {row["name"] for row in tables["by_axis"]} >= {"dp  all_gather", "dp  all_reduce"}
    trace = chrome_trace(run)["traceEvents"]
    assert {event["pid"] for event in trace} == {0, 1, 2, 3} and any(e.get("tid") == "in flight" for e in trace)
    assert main(["report", str(tmp_path)]) == 0 and main(["blame", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path), "--chrome", str(tmp_path / "trace.json")]) == 0
    assert main(["report", str(tmp_path), "--json", "-"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("\n{\n") :])["ranks"] == [0, 1, 2, 3]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    text = (tmp_path / "report.html").read_text()
    assert "<script src" not in text and "http" not in text.replace("http://www.w3.org", "")
    assert f"<p>Files are in {os.path.dirname(__file__)}/</p>" in text and ">test_record.py:" in text
    assert main(["blame", str(tmp_path / "nowhere")]) == 2


class _Guard:
    """What a record asks of a collective."""

    begun, step, moves = False, None, ""

    def __init__(self, number, clock):
        self.kind, self.where, self.number, self.clock = "all_reduce", "mesh axis 'dp' (8 ranks)", number, clock
        self.note = Note("linear", source=f"train.py:{number % 40}")
        self.along = self

    ranks = tuple(range(8))


def test_a_large_report_is_small(tmp_path, monkeypatch):
    """1,000 steps of 8 ranks, 10 collectives and 8 modules each."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        flight, numbers, clock = Flight(tmp_path, 32_768), count(1), Clock("dp")
        names = [flight.name_module(f"GPT.blocks.{i}", "Block") for i in range(8)]
        for _ in range(1000):
            for i in range(10):
                flight.leave(flight.enter(_Guard(next(numbers), clock), 1), None)
                if i < 8:
                    flight.leave(flight.enter_module(names[i]), None)
        flight.say(end="done", at=1.0)
        flight.close()
    run = read_run(tmp_path)
    assert sum(len(rank.events) for rank in run.ranks.values()) == 8 * 18_000 and run.world == 8
    text = page(run)
    assert len(text) < 5_000_000, len(text)


def test_a_collective_is_recorded_in_microseconds(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    flight, guard = Flight(tmp_path, 1000), _Guard(1, Clock("dp"))
    best = 1.0
    for _ in range(20):
        started = time.process_time()
        for _ in range(500):
            flight.leave(flight.enter(guard, 1), None)
        best = min(best, (time.process_time() - started) / 500)
    flight.close()
    print(f"{best * 1e6:.2f} us a collective")
    assert best < 10e-6  # 1.5 us on a machine of its own


def instructions_of(run):
    """How many of Python's instructions a call takes."""
    counts = []

    def each(frame, event, arg):
        counts.append(event == "opcode")
        return each

    def enter(frame, event, arg):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return each

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(before)
    return sum(counts)


def test_a_warm_record_is_a_few_instructions(tmp_path):
    """What recording adds to an op, a module and a collective with its gradient once their lines are known. Everything
    is made once per line: no words, no line numbers, no layouts."""
    mesh = simulate(2)
    x = distribute_tensor(torch.ones(4, 2), mesh, [R]).requires_grad_()
    y = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
    module = torch.nn.Identity()
    programs = [
        (lambda: torch.neg(x.detach()), 2, 200),
        (lambda: module(0), 1, 260),
        (lambda: y.redistribute(placements=[R]), 1, 420),
        (lambda: torch.nn.functional.linear(x, y).sum().backward(), 4, 400),
    ]
    for run, events, most in programs:
        for _ in range(3):
            run()
        alone = instructions_of(run)
        with debug.record(tmp_path) as recording:
            recording._memory._next, recording._memory._left = float("inf"), 0  # which looks now and then only
            for _ in range(3):
                run()
            said = (tmp_path / "rank-00000.lines").read_text()
            assert (instructions_of(run) - alone) / events < most
            assert (tmp_path / "rank-00000.lines").read_text() == said


def test_modules_are_called_as_before_afterwards(tmp_path):
    call = torch.nn.Module.__call__
    module = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="shapes"), debug.record(tmp_path):
        module(torch.ones(2, 3))
    assert torch.nn.Module.__call__ is call
    with debug.record(tmp_path):
        torch.nn.Module.__call__ = stranger = lambda self, *args, before=torch.nn.Module.__call__: before(self, *args)
        module(torch.ones(2, 2))
    assert torch.nn.Module.__call__ is stranger  # somebody's who came later stays, and what it calls records no more
    torch.nn.Module.__call__ = call
    with debug.record(tmp_path):
        pass
    assert stranger(module, torch.ones(2, 2)).shape == (2, 2) and not read_run(tmp_path).ranks[0].events


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_writes_nothing(tmp_path):
    x = distribute_tensor(torch.ones(8), simulate(4), [Shard(0)])
    with debug.record(tmp_path):
        x.redistribute(placements=[R])
        child = os.fork()
        if child == 0:
            x.redistribute(placements=[R])
            x.neg()
            torch.nn.Identity()(x)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        x.neg()
    (rank,) = read_run(tmp_path).ranks.values()
    assert [e.kind for e in rank.events] == ["all_gather"] and [e.op for e in rank.ops] == ["neg"]
    assert rank.end is not None and rank.end["end"] == "done"


def test_missing_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (0, 2):
        monkeypatch.setenv("RANK", str(rank))
        Flight(tmp_path, 10).close()
    found = blame(read_run(tmp_path))
    assert found.ranks == (1,) and "rank 1 never started" in found.text


def test_nothing_to_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="no record of a run is here"):
        read_run(tmp_path)


FAULTS = ["a rank raises in backward", "is killed in moves", "another layout", "skips a branch", "never comes"]


@pytest.mark.parametrize("fault", FAULTS)
def test_blame(fault):
    """`benchmarks/blame.py` has a hundred of them."""
    (trial,) = run_faults(1, seed=len(fault), only=fault)
    assert not trial.wrong, (trial.wrong, trial.verdict)


def _stuck(rank, layouts, left=None):
    """A rank whose only collective is this one."""
    event = Event(1, 1.0, left, "redistribute", "all_gather", "dp", layouts, "", 8, "train.py:7", (0, 1, 2, 3), "dp", 1, "", 0,
                  False, False, left is not None, 0)  # fmt: skip
    return Rank(rank, 1000, "elsewhere", 1, [event])


def test_ranks_that_do_the_same_are_said_once():
    run = Run(Path("run"), {rank: _stuck(rank, "[S(1)]" if rank == 5 else "[R]") for rank in range(1000)})
    verdict = blame(run)
    assert verdict.ranks == (5,) and "rank 5 came to redistribute: all_gather on 'dp', [S(1)] at train.py:7" in verdict.text
    assert verdict.waits == [
        "ranks 0, 1, 2 ... 999 (999 of them) wait in redistribute: all_gather on 'dp', [R] at train.py:7"
    ]
    assert len(str(verdict)) < 400
    halves = Run(Path("run"), {rank: _stuck(rank, f"[S({rank % 2})]") for rank in range(1000)})
    assert len(str(blame(halves))) < 400 and len(blame(halves).ranks) == 1000
    two = Run(Path("run"), {rank: _stuck(rank, "[R]", 2.0 if rank else None) for rank in range(2)})
    assert waiting(two) == [0]


@pytest.mark.parametrize("here", [0, 2])
def test_one_of_those_that_wait_says_why(here, tmp_path, monkeypatch, capsys):
    run = Run(tmp_path, {rank: _stuck(rank, "[S(1)]" if rank == 1 else "[R]") for rank in range(4)})
    monkeypatch.setattr(sys.modules["shardwise.debug.record"], "read_run", lambda folder: run)
    record = debug.record(tmp_path, limit=3)
    with record:
        record._flight.rank = here
        record._tell()
    said = capsys.readouterr().err
    assert said.startswith("shardwise: a collective takes longer than 3 s: ") and said.count("\n") == (2 if here == 0 else 1)
    text = "the ranks did different things: rank 1 came to" if here == 0 else f"rank 2 waits, too; `shardwise blame {tmp_path}`"
    assert text in said
