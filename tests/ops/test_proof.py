"""Every operator of PyTorch's database, a few samples and layouts of each. `make prove` tries them all."""

import json

import pytest
import torch.distributed as dist

from shardwise.testing.prove import _records, main
from shardwise.testing.spread import combinations
from shardwise.testing.subjects import subjects
from shardwise.testing.trial import RIGHT, attempt, reference
from tests.workers import device_mesh, run_ranks

MOST_ON_THE_FALLBACK = 60


@pytest.mark.timeout(900)
def test_every_operator_is_right(tmp_path, capsys):
    status = main(["--quick", "--out", str(tmp_path), "--docs", str(tmp_path / "operators.md")])
    result = json.loads((tmp_path / "proof.json").read_text())
    failures = [
        failure
        for record in result["operators"]
        for failure in (record["name"], *record["failures"])
        if record["failures"]
    ]
    assert status == 0, "\n".join(failures)
    assert sum(record["trials"] > 0 for record in result["operators"]) > 600
    gathered = [record["name"] for record in result["operators"] if record["fallbacks"]]
    assert len(gathered) <= MOST_ON_THE_FALLBACK, gathered
    assert "| softmax |" in (tmp_path / "operators.md").read_text()


def test_a_proof_goes_on_where_it_stopped(tmp_path, capsys):
    assert main(["--quick", "--jobs", "1", "--out", str(tmp_path), "--only", "neg"]) == 0
    records = tmp_path / "quick.jsonl"
    line = (tmp_path / "only.jsonl").read_text()
    records.write_text(line + line.replace('"neg"', '"abs"')[:40])  # the second was cut off half-way
    assert list(_records(records)) == ["neg"]


def prove_on_processes(rank, world_size, meshes):
    """One sample and layout of every eighth operator and module, on the meshes in turn; all ranks must say the same."""
    failures = []
    for number, (name, subject) in enumerate(list(subjects().items())[::8]):
        mesh_shape = meshes[number % len(meshes)]
        for sample in subject.samples("function", 1):
            expected = reference(sample)
            for i, layouts in enumerate(combinations(sample.tensors, mesh_shape, 1, name) if expected else ()):
                outcome = attempt(expected, device_mesh(mesh_shape), layouts, i)
                verdicts = [None] * world_size
                dist.all_gather_object(verdicts, outcome.verdict)
                if set(verdicts) != {RIGHT}:
                    failures.append(f"{name} {layouts}: {verdicts} {outcome.message}")
    return failures


@pytest.mark.timeout(900)
def test_every_eighth_operator_on_processes():
    found = run_ranks(prove_on_processes, 4, ((4,), (2, 2)), timeout=800)
    assert [failure for failures in found for failure in failures] == []
