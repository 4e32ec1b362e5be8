"""What a captured function says of itself, its passes, and the check of all ranks."""

import dataclasses

import pytest
import torch
from torch import nn

import shardwise
from shardwise import CaptureError, Replicate, Shard, ShardwiseError
from shardwise.captures.passes import UnknownPass
from shardwise.captures.sequence import check_sizes
from shardwise.errors import RanksDifferError
from tests.captures.common import COLUMNS, ROWS, batches, both, laid_out, module


def there_and_back(x):
    y = x.redistribute(placements=COLUMNS)
    z = x.redistribute(placements=COLUMNS)
    return (y + z).redistribute(placements=ROWS) + y.redistribute(placements=ROWS)


@pytest.mark.parametrize("passes, moves", [((), 4), (("merge",), 3), (("merge", "inverse"), 2), (("inverse",), 3)])
def test_moves_are_merged_and_dropped(passes, moves):
    captured = both(lambda: there_and_back, passes=passes)
    assert len(captured.programs[0].moves()) == moves
    with shardwise.debug.ledger() as ledger:
        captured(laid_out(batches()[0]))
    assert len(ledger) == moves


def test_a_write_in_between_keeps_both_moves():
    def write(x):
        x = x.clone()
        y = x.redistribute(placements=COLUMNS)
        x.add_(1)
        z = x.redistribute(placements=COLUMNS)
        back = z.redistribute(placements=ROWS)
        z.mul_(2)
        return y + z, back

    captured = both(lambda: write)
    assert len(captured.programs[0].moves()) == 3


def test_all_passes_together():
    def make():
        model = module(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(there_and_back(x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, None, lambda: list(model.parameters())

    both(make, passes=("overlap", "bucket", "unused", "inverse", "merge", "aliases"))


def test_an_unknown_pass():
    with pytest.raises(UnknownPass, match="no pass 'fuse'; passes are aliases"):
        shardwise.capture(there_and_back, passes=["fuse"])
    assert issubclass(UnknownPass, ShardwiseError) and issubclass(UnknownPass, ValueError)


def test_explain_and_code():
    captured = shardwise.capture(there_and_back)
    assert "Not called yet" in captured.explain() and captured.code == ""
    captured(laid_out(batches()[0]))
    text = captured.explain()
    assert all(len(line) <= 120 for line in text.splitlines())
    for word in ("all_to_all", "redistribute", "dp+tp", "merge", "test_views.py", "forward"):
        assert word in text, word
    assert "def run(x0" in captured.code and "add(" in captured.code and "# " in captured.code
    assert repr(captured) == "<captured there_and_back: 1 captures, 0 replays>"


def test_ledgers_see_replays_as_they_see_eager_calls():
    weight = laid_out(torch.randn(8, 8), [Replicate(), Shard(0)]).requires_grad_()

    def step(x):
        loss = (x @ weight).square().sum()
        loss.backward()
        return loss

    captured = shardwise.capture(step, passes=())
    x = laid_out(batches()[0])
    for _ in range(2):
        captured(x)
    entries = []
    for call in (step, captured):
        with shardwise.debug.ledger() as ledger:
            call(x)
        entries.append([dataclasses.astuple(entry) for entry in ledger])
    assert entries[0] == entries[1] and captured.replays


def test_saved_programs_are_compared(tmp_path):
    path = tmp_path / "program.json"
    captured = shardwise.capture(there_and_back)
    with pytest.raises(CaptureError, match="no captured program yet"):
        captured.save(path)
    captured(laid_out(batches()[0]))
    captured.save(path)
    again = shardwise.capture(there_and_back)
    again.load(path)
    again(laid_out(batches()[1]))
    other = shardwise.capture(there_and_back)
    other.load(path)
    with pytest.raises(CaptureError, match="fingerprint"):
        other(laid_out(torch.randn(7, 8)))
    with pytest.raises(CaptureError, match="there_and_back"):
        shardwise.capture(lambda x: x).load(path)


def test_sizes_match_for_every_rank(monkeypatch):
    captured = shardwise.capture(there_and_back)
    captured(laid_out(torch.randn(7, 3)))
    assert captured.check() == 2
    program = captured.programs[0]
    step = next(step for step in program.moves()[0].steps if step.kind != "local")
    honest = type(step).incoming
    monkeypatch.setattr(type(step), "incoming", lambda self, at: [] if at == (0, 1) else honest(self, at))
    with pytest.raises(RanksDifferError, match=r"the rank at \(.*\) sends \d+ elements, the rank at .* waits for 0"):
        check_sizes(program)


def test_old_programs_are_dropped():
    captured = shardwise.capture(lambda x: x + 1, limit=3)
    for n in range(1, 7):
        captured(laid_out(torch.ones(n, 8)))
    assert captured.captures == 3


def test_bad_arguments():
    with pytest.raises(TypeError, match="capture: func"):
        shardwise.capture(3)
