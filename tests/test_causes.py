"""What ranks say of each other when a collective failed: the causes, by what stands on the board of the ranks."""

import pytest

from shardwise.comm.peers import causes_of_failure, who_is_lost


class Board:
    """A board on which the ends of the other ranks, and the states of their processes, are written down."""

    rank, size, said = 0, 4, ""

    def __init__(self, ends, states):
        self.ends, self.states = ends, states

    def end_of(self, rank):
        return self.ends.get(rank)

    def process_of(self, rank):
        return self.states.get(rank, "runs")

    def is_dead(self, rank):
        return self.process_of(rank) == "gone"

    def get(self, rank, what):
        return ""

    def end(self, how, text):
        self.correct(text)

    def correct(self, text):
        self.said = text


LEFT, TIMED_OUT = ("left", "has come to the end of its program"), ("noticed", "failed at train.py:3: Timed out")


@pytest.mark.parametrize(
    ("ends", "states", "named"),
    [
        ({1: LEFT, 3: LEFT}, {2: "stopped"}, "the process of rank 2 is stopped"),
        ({1: LEFT, 2: LEFT, 3: LEFT}, {}, "rank 1 has come"),
        ({1: ("failed", "failed in mm"), 3: LEFT}, {2: "stopped"}, "rank 1 failed in mm"),
        ({1: TIMED_OUT, 3: TIMED_OUT}, {2: "gone"}, "rank 2 died"),
        ({1: TIMED_OUT, 2: TIMED_OUT, 3: TIMED_OUT}, {}, "rank 1 gave up"),
    ],
)
def test_the_cause_is_the_rank_that_cannot_go_on(ends, states, named):
    assert causes_of_failure(Board(ends, states))[0].startswith(named)


def test_a_rank_that_is_silent_is_named_before_what_others_noticed(monkeypatch):
    here = Board({1: TIMED_OUT, 3: TIMED_OUT}, {2: "stopped"})
    monkeypatch.setattr("shardwise.comm.peers.board", lambda: here)
    monkeypatch.setattr("shardwise.comm.peers.PATIENCE_SECONDS", 0.1)
    said = who_is_lost(RuntimeError("Timed out waiting 12000ms for recv operation to complete"), range(4))
    assert said.startswith("; rank 2 did not answer (rank 2: stopped by a signal)") and "rank 1 gave up" in said
    assert here.said == said.removeprefix("; ")
