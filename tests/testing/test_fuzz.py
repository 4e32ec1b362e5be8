"""The fuzzer of programs: it composes, judges and shrinks them. What it once found is in `test_found.py`."""

import dataclasses
import os

import pytest
import torch

from shardwise.comm.calls import Clock
from shardwise.comm.messages import clocks
from shardwise.testing.fuzz import Program, campaign, compose, judge, shrink
from shardwise.testing.fuzz import defects as table
from shardwise.testing.fuzz.campaign import simulated, try_seed
from shardwise.testing.fuzz.defects import Defect
from shardwise.testing.fuzz.judge import INEXACT, NO_ERROR, OTHER_ERROR, RAISED, RIGHT, TORCHS, WRONG, in_step


def test_a_program_is_its_text():
    for seed in range(20):
        program = compose(seed)
        assert Program.parse(str(program)) == program
        assert compose(seed) == program
    with pytest.raises(ValueError, match="the first line"):
        Program.parse("x = 1")


def test_programs_differ():
    words = " ".join(str(compose(seed)) for seed in range(60))
    for word in ("move(", "Partial(", "sizes=", "call(", "module(", "no_grad", "second(", "backward_passes"):
        assert word in words


def test_a_lost_write_is_not_inexact():
    """What a tensor was made of, before it was written, does not excuse it."""
    lines = ["x1 = tensor((3, 2), at=[Shard(0)])", "y1 = x1 * 2", "y1.mul_(1 if type(x1) is not torch.Tensor else 3)"]
    assert judge(Program((2,), tuple(lines))).kind == WRONG


def test_clocks_of_earlier_process_groups_say_nothing_of_a_simulation(monkeypatch):
    monkeypatch.setitem(clocks, ("0", (0, 1, 2, 3)), Clock("of four ranks"))
    assert judge(Program.parse("# mesh (2,)\nx1 = tensor((3, 2), at=[Shard(0)])")).kind == RIGHT


def test_ranks_in_step_count_the_collectives_of_each_group_alike():
    rows, columns = ("0", (0, 1)), ("1", (0, 2))
    assert in_step([{rows: 3, columns: 1}, {rows: 3}, {columns: 1}])
    assert not in_step([{rows: 3, columns: 1}, {rows: 3}, {columns: 2}])
    assert not in_step([{rows: 3}, {}])


def test_what_differs_may_be_made_of_overlapping_elements():
    lines = ["x1 = tensor((3, 1), at=[Shard(0)])", "y1 = x1.expand(3, 4)", "y2 = y1 * (1 if type(x1) is torch.Tensor else 2)"]
    assert judge(Program((2,), tuple(lines))).kind == WRONG


BROKEN = "# mesh (2,)\nx1 = tensor((3, 2), grad=True, at=[Shard(0)])\n"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("y1 = x1 * (1 if type(x1) is torch.Tensor else 2)", WRONG),
        ("y1 = x1.detach() if type(x1) is torch.Tensor else x1 * 1", WRONG),
        ("y1 = x1.float() if type(x1) is torch.Tensor else x1 * 1", WRONG),
        ("y1 = x1.T if type(x1) is torch.Tensor else x1.T.clone(memory_format=torch.contiguous_format)", WRONG),
        ("y1 = grads(weigh(x1 * x1 * (1 if type(x1) is torch.Tensor else 2)), [x1])", WRONG),
        ("y1 = x1[5] if type(x1) is torch.Tensor else 0", NO_ERROR),
        ("y1 = x1[5] if type(x1) is torch.Tensor else [][0]", RIGHT),
        ("y1 = x1[5] if type(x1) is torch.Tensor else {}[0]", OTHER_ERROR),
        ("y1 = 0 if type(x1) is torch.Tensor else x1[5]", RAISED),
        ("y1 = ((x1 - x1 * (1 + 1e-16)) * 1e16).sign() * (1 if type(x1) is torch.Tensor else 2)", INEXACT),
    ],
)
def test_what_differs_is_found(line, kind):
    assert judge(Program.parse(BROKEN + line)).kind in (kind, RIGHT if kind == INEXACT else kind)


def test_what_rounding_decides_is_inexact():
    noise = "y1 = x1 * 0 + (0 if type(x1) is torch.Tensor else 1e-17)\ny2 = y1.bool()"
    assert judge(Program.parse(BROKEN + noise)).kind == INEXACT
    assert judge(Program.parse(BROKEN + noise.replace("1e-17", "1e-3"))).kind == WRONG
    assert judge(Program.parse(BROKEN + "y1 = x1 * 1\ny2 = y1.bool() ^ (type(y1) is torch.Tensor)")).kind == WRONG


def test_a_defect_of_torch_is_told_by_what_its_definition_gives(monkeypatch):
    here = torch.__version__.partition("+")[0]
    doubled = Defect("twice as much", here, here, op=r"double\((\w+)\)", instead=r"(\1 * 2)")
    words = Defect("an error of its own", here, here, op="broken", says="out of range")
    past = Defect("mended since", "1.0.0", "1.0.1", op=r"double\((\w+)\)", instead=r"(\1 * 2)")
    double = "double = lambda x: x * 3 if type(x) is torch.Tensor else x * {by}\ny1 = double(x1)"
    raises = "broken = 1\ny1 = x1[5] if type(x1) is torch.Tensor else 0"
    for known, line, kind in (
        (doubled, double.format(by=2), TORCHS),
        (doubled, double.format(by=4), WRONG),
        (past, double.format(by=2), WRONG),
        (words, raises, NO_ERROR),
        (dataclasses.replace(words, says="out of bounds"), raises, TORCHS),
    ):
        monkeypatch.setattr(table, "DEFECTS", (known,))
        assert judge(Program.parse(BROKEN + line)).kind == kind


def test_shrinking_keeps_what_fails():
    text = """# mesh (2, 2)
x1 = tensor((5, 4), seed=3, grad=True, at=[Shard(dim=0, sizes=(5, 0)), Partial("sum")])
x2 = tensor((5, 4), seed=4, grad=True, at=[Shard(0), Shard(1)])
y1 = torch.sin(x2)
y2 = torch.relu(x1 + y1)
y3 = y2 * (1 if type(y2) is torch.Tensor else 2)
y4 = y3.sum(0)
g1 = grads(weigh(y4, y1), [x1, x2])"""
    program = Program.parse(text)
    short, verdict = shrink(program, judge(program), judge)
    assert verdict.kind == WRONG
    assert short.mesh == (2,) and len(short.lines) == 2 and "type(" in short.lines[1]


def test_a_campaign_tells_of_every_program():
    found = list(simulated(0, 6, None, 2))
    assert sorted(f.seed for f in found) == list(range(6))


def test_random_programs():
    """A seeded part of the campaign."""
    failed = [f"{found.text}\n{found.message}" for seed in range(40) if not (found := try_seed(seed)).right]
    assert not failed, "\n\n".join(failed)


def dies(*_):
    os._exit(1)


def test_a_campaign_goes_on_where_plain_torch_dies_of_a_program(monkeypatch):
    monkeypatch.setattr(campaign, "_text_on_ranks", dies)
    found = campaign.Group(2, "cpu", 0, None, True).of_program_without_end(7, "exit codes {0: -11}")
    assert found.seed == 7 and found.right and not campaign.is_in_step(found)
    monkeypatch.undo()
    found = campaign.Group(2, "cpu", 0, None, True).of_program_without_end(7, "no answer")
    assert found.kind == campaign.HANG and Program.parse(found.text).lines and not campaign.is_in_step(found)
