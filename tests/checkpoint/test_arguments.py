"""Arguments of `save`, `load` and `Manager`: bad values raise and are named; processes must give the same."""

import pytest
import torch

from shardwise import checkpoint
from shardwise.checkpoint import Manager
from shardwise.errors import CheckpointError
from tests.workers import run_ranks


@pytest.mark.parametrize(
    ("argument", "value", "kind"),
    [
        *(("strict", value, TypeError) for value in ("no", 0, None, 1.0)),
        *(("random", value, TypeError) for value in ("yes", 1, None)),
        *(("verify", value, ValueError) for value in ("Fast", True, None, ["fast"])),
        *(("memory", value, kind) for value, kind in (("1", TypeError), (0, ValueError), (True, TypeError))),
        ("map", {"a": "b"}, TypeError),
    ],
)
def test_bad_values_are_named(tmp_path, argument, value, kind):
    checkpoint.save(tmp_path / "x", {"a": torch.ones(3)})
    into, manager = {"a": torch.zeros(3)}, Manager(tmp_path / "run", sigterm=False)
    manager.save(1, into)
    for load in (
        (checkpoint.load, checkpoint.plan_load) if argument in ("strict", "memory", "map") else (checkpoint.load,)
    ):
        with pytest.raises(kind, match=f"{argument}.*") as error:
            load(tmp_path / "x", into, **{argument: value})
        assert repr(value) in str(error.value)
    if argument != "map":
        with pytest.raises(kind, match=argument):
            manager.restore(into, **{argument: value})
    assert into["a"].sum() == 0


@pytest.mark.parametrize(
    ("argument", "value"), [("async_", 1), ("sigterm", "no"), ("keep", 0), ("every", 0), ("keep", True)]
)
def test_bad_values_of_managers(tmp_path, argument, value):
    with pytest.raises((TypeError, ValueError), match=f"Manager: {argument}.*{value}"):
        Manager(tmp_path, **{argument: value})


def differ(rank, size, folder, argument, values):
    into = {"a": torch.zeros(3)}
    checkpoint.save(f"{folder}/x", {"a": torch.ones(3)})
    path = f"{folder}/{values[rank]}" if argument == "path" else f"{folder}/x"
    given = {} if argument == "path" else {argument: values[rank]}
    try:
        checkpoint.load(path, into, **given)
    except CheckpointError as error:
        return str(error), into["a"].sum().item()
    return "nothing was raised", into["a"].sum().item()


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("strict", (True, False)),
        ("verify", ("fast", "full")),
        ("random", (False, True)),
        ("memory", (1 << 26, 1 << 25)),
        ("path", ("x", "y")),
    ],
)
def test_processes_must_give_the_same(tmp_path, argument, values):
    for said, loaded in run_ranks(differ, 2, str(tmp_path), argument, values, timeout=60):
        assert "the arguments differ" in said and argument in said
        assert loaded == 0


def bad_metric(rank, size, folder):
    manager = Manager(folder, best="min", sigterm=False)
    try:
        manager.save(1, {"a": torch.ones(2)}, metric=torch.ones(2) if rank else 3.0)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing was raised"


def test_a_bad_metric_of_one_process_is_raised_by_all(tmp_path):
    found = run_ranks(bad_metric, 2, str(tmp_path), timeout=60)
    assert [kind for kind, _ in found] == ["TypeError"] * 2
    assert all("metric" in said for _, said in found)
