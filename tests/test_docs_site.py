"""The documentation: every block of Python runs, what it prints is what the page shows, pictures are drawn, and the
reference has every public name."""

import contextlib
import importlib.util
import inspect
import io
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import shardwise
from shardwise import cli
from shardwise.testing.report import _row
from tests.workers import run_ranks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n+^```\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
# Pages with blocks that need other files, or a package that the project does without: those are parsed only.
PARSED = {"checkpoint.md", "estimate.md", "migrating.md"}
ON_PROCESSES = {"sharded.md"}
SHOWN = {"tutorial.md", "concepts.md", "simulation.md", "moves.md"}  # what stands below a block is what it prints
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def load_hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


@pytest.fixture
def stream_as_before():
    """A page may choose the stream of random numbers for good; the tests after it have theirs."""
    with shardwise.random.use("philox"):
        yield


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search((DOCS / page).read_text())])
def test_blocks_run(page, tmp_path, monkeypatch, stream_as_before):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block, shown in BLOCK.findall((DOCS / page).read_text()):
        code = compile(block, page, "exec")
        if page in PARSED | ON_PROCESSES:
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, names)
        if page in SHOWN and shown:
            assert [line.rstrip() for line in out.getvalue().splitlines()] == shown.splitlines()


def run_page(rank, world_size, page):
    names = {"__name__": "page"}
    for block, _ in BLOCK.findall((DOCS / page).read_text()):
        exec(compile(block, page, "exec"), names)
    return True


@pytest.mark.parametrize("page", sorted(ON_PROCESSES))
def test_blocks_run_on_processes(page):
    assert run_ranks(run_page, 4, page) == [True] * 4


SCRIPT = re.compile(r"^```\n(# train.py\n.*?)^```$", re.DOTALL | re.MULTILINE)


def run_script(rank, world_size, text, folder):
    """What a script of a page prints; the process group is there already."""
    before, out = os.getcwd(), io.StringIO()
    os.chdir(folder)
    try:
        made = [mock.patch.object(dist, name) for name in ("init_process_group", "destroy_process_group")]
        with made[0], made[1], contextlib.redirect_stdout(out):
            exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
    return out.getvalue().splitlines()


def test_the_tutorials_script_trains_and_goes_on(tmp_path, capsys):
    (script,) = SCRIPT.findall((DOCS / "tutorial.md").read_text())
    first = run_ranks(run_script, 4, script, str(tmp_path))[0]
    second = run_ranks(run_script, 4, script, str(tmp_path))[0]
    steps, losses = zip(*(line.split() for line in first + second))
    assert list(map(int, steps)) == list(range(1, 41)) and float(losses[39]) < float(losses[20]) < float(losses[0])
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert cli.main(["blame", str(tmp_path / "run")]) == 0


def test_pictures_are_drawn():
    hooks = load_hooks()
    for page in PAGES:
        text = (DOCS / page).read_text()
        if "<!-- picture:" in text:
            drawn = hooks.with_pictures(text)
            assert drawn.count("<svg") >= text.count("<!-- picture:") and "<!-- picture:" not in drawn


def test_every_page_is_in_the_menu_and_links_lead_somewhere():
    menu = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert f" {page}" in menu, page
        text = re.sub(r"```.*?```", "", (DOCS / page).read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
            if not link.startswith("http"):
                assert ((DOCS / page).parent / link).exists(), (page, link)


def test_every_public_name_is_in_the_reference_and_documented():
    hooks = load_hooks()
    page = hooks.api()
    for package, names in hooks.public_names().items():
        for name in names:
            thing = getattr(__import__(package, fromlist=["*"]), name)
            assert f"::: {hooks._place(package, name)}\n" in page
            assert (inspect.getdoc(thing) or "").strip(), f"{package}.{name} has no docstring"
    assert "::: shardwise.tensor.DTensor" in page and shardwise.DTensor.__doc__


def test_names_of_operators_are_no_emphasis():
    record = {"name": "__rand__", "right": True, "shapes": "", "trials": 1, "splits": {}, "fallbacks": []}
    assert _row(record).startswith(r"| \_\_rand__ |")
    assert not re.search(r"^\| _", (DOCS / "operators.md").read_text(), re.MULTILINE)
