"""Faults put into programs of real processes end right; `make faults` tries many more."""

import pytest

from shardwise.testing.faults.kinds import Kind, kinds
from shardwise.testing.faults.run import inject, table

SOME = (
    "a rank raises in forward", "a rank is killed in backward", "a rank has no memory in an async move",
    "a rank exits in a ZeRO step", "a rank raises in a checkpoint save", "ranks differ: another shape",
    "ranks differ: another size of a reduction", "checked ranks differ: a random op left out",
    "a rank forks off a process that communicates", "groups made anew after a fault",
    "a rank is killed in a save of ours", "a rank raises in init_from_local_shards", "a rank quits in a reshard",
    "ranks differ: another argument of an op", "ranks differ: another dtype of a new tensor",
    "ranks differ: another order of the ranks", "ranks differ: gathered on another rank",
)  # fmt: skip


@pytest.mark.timeout(600)
def test_some_end_right():
    wanted = [kind for kind in kinds() if kind.name in SOME]
    assert len(wanted) == len(SOME)
    found = inject(wanted, len(wanted), seed=3, jobs=3, timeout=60)  # of no kind here does a rank wait for that
    assert not [(trial.kind.name, trial.wrong) for trial in found if trial.wrong]
    assert table(found).row_count == len(SOME)


def test_there_are_many_kinds():
    names = [kind.name for kind in kinds()]
    assert len(names) == len(set(names)) >= 50


def _says_nothing(scene):
    scene.join()
    if not scene.faulty:
        raise RuntimeError("something")


def test_an_error_that_names_nobody_is_not_right():
    (trial,) = inject([Kind("silent", _says_nothing, (2,))], 1, timeout=60)
    assert "does not name rank" in trial.wrong
