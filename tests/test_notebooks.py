"""The notebooks run from top to bottom, and show pictures."""

import json
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]))
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=280).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    pictures = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("<svg" in picture for picture in pictures)
    assert sum(len(json.dumps(output)) for output in outputs) < 200_000


def test_outputs_are_not_kept():
    for path in NOTEBOOKS:
        assert all(not cell.get("outputs") for cell in json.loads(path.read_text())["cells"]), path
