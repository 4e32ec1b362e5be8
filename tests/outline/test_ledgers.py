"""What an outlined rank communicates is what real ranks and simulated ones do: the same entries with the same bytes.
`benchmarks/estimate.py bytes` plays every rank of every program."""

import pytest

from shardwise import outline, simulate
from tests.outline.programs import PROGRAMS, entries
from tests.workers import device_mesh, run_ranks

AXES = ("dp", "tp")
QUICK = ("attention_ring", "experts", "operators", "plain_between_modules", "inputs_resharded")  # each of their 8 ranks is played


def on_processes(rank, world_size, name):
    return entries(PROGRAMS[name], device_mesh((2, 2), AXES), steps=1)


def outlined(name, shape, rank, steps=1):
    with outline(shape, axis_names=AXES, play=rank, assume={"experts": "even"}) as mesh:
        return entries(PROGRAMS[name], mesh, steps)


def summed(ranks):
    """The entries of all ranks together, as a simulated mesh has them."""
    return [(*same[0][:-1], sum(entry[-1] for entry in same)) for same in zip(*ranks, strict=True)]


@pytest.mark.parametrize("name", QUICK)
def test_bytes_are_those_of_8_simulated_ranks(name):
    shape = (2, 4)
    mine = summed([outlined(name, shape, rank) for rank in range(8)])
    assert mine == entries(PROGRAMS[name], simulate(shape, axis_names=AXES), steps=1)
    assert mine


@pytest.mark.parametrize("name", PROGRAMS)
def test_entries_are_those_of_4_processes(name):
    rank = list(PROGRAMS).index(name) % 4
    ranks = run_ranks(on_processes, 4, name)
    assert outlined(name, (2, 2), rank) == ranks[rank]
    assert ranks[rank]
