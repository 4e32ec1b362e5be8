"""The layers of docs/architecture.md: a module imports, and reaches into, only what stands below it."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh

import shardwise

ROOT = Path(shardwise.__file__).parent
PAGE = ROOT.parents[1] / "docs" / "architecture.md"

# Names that lower layers use of objects which are not ours, and that an upper layer happens to define too.
NOT_OURS = {
    "_replace",
    "param_groups",  # of torch's optimizers
    "tags",  # of torch's operators
    "propagate",  # of Python's loggers
    "__get__",
    "save_for_backward",
    "saved_tensors",
    "fqn",
    "check",
    "local",
    "default",
    "has",
    "enable",
    "disable",
    "time",
    "argv",
    "write",
    "store",
}
# What programs of ops may call on the tensors they work with: they are written as a user would write them.
OF_TENSORS = {"redistribute", "full_tensor"}


def layers():
    """Unit (a package, or a module at the top) -> its row in the page; the first row is the top."""
    block = re.search(r"```layers\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    rows = [line.split("  ")[0].replace(",", " ").split() for line in block.splitlines() if line.strip()]
    return {unit: i for i, row in enumerate(rows) for unit in row}


ROW = layers()


def module_of(path):
    return ".".join(("shardwise", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


@functools.cache
def modules():
    return {module_of(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def unit_of(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "shardwise"


def skipped(tree):
    """The nodes under `if TYPE_CHECKING`, which no running program imports."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    return {id(inner) for block in blocks for statement in block.body for inner in ast.walk(statement)}


def imports(module, tree):
    """Modules of ours that a module imports, with the lines."""
    never = skipped(tree)
    for node in ast.walk(tree):
        if id(node) in never:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shardwise":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in modules() else node.module), node.lineno
        elif isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names if a.name.split(".")[0] == "shardwise")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("later", "import_module"):
            path = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            if path.startswith("shardwise."):
                yield path, node.lineno


def test_every_unit_has_a_row():
    found = {unit_of(module) for module in modules()} - {"__main__"}
    assert found == set(ROW), "the `layers` block of docs/architecture.md and the folders differ"


def test_no_import_goes_up():
    up = []
    for module, tree in modules().items():
        here = unit_of(module)
        for other, line in imports(module, tree):
            there = unit_of(other)
            if here not in (there, "__main__") and ROW[there] <= ROW[here]:
                up.append(f"{module}:{line} imports {other}")
    assert not up


def test_no_module_cycle():
    """Not even inside of a package."""
    below = {module: {m for m, _ in imports(module, tree) if m != module} for module, tree in modules().items()}
    below["shardwise"] = set()  # submodules may ask the package itself for nothing, but are imported by it
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for other in sorted(below.get(module, ())):
            if not module.startswith(other + "."):  # a package is imported with its first module
                visit(other)
        path.pop()
        done.add(module)

    for module in below:
        visit(module)


def test_no_import_hides_in_a_function():
    """What is slow to import, or need not be there, is `imports.later`."""
    hidden = []
    for module, tree in modules().items():
        functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for node in (inner for function in functions for inner in ast.walk(function)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                hidden.append(f"{module}:{node.lineno} {ast.unparse(node)}")
    assert not hidden


@functools.cache
def attributes():
    """Where our classes and functions define each name, and where each name is asked of an object."""
    defined, used = defaultdict(set), defaultdict(set)
    for module, tree in modules().items():
        unit = unit_of(module)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                defined[node.name].add(unit)
            elif isinstance(node, ast.ClassDef):
                for item in node.body:
                    targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
                    for target in targets:
                        if isinstance(target, ast.Name):
                            defined[target.id].add(unit)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                defined[node.attr].add(unit)
            elif isinstance(node, ast.Attribute):
                used[node.attr].add((unit, f"{module}:{node.lineno}"))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and node.args[1:]:
                used[getattr(node.args[1], "value", None)].add((unit, f"{module}:{node.lineno}"))
    return defined, used


def test_no_duck_typed_reach_goes_up():
    """No attribute is read that only classes above define (`hasattr(step, "dst")` in a backend)."""
    places = (
        torch.Tensor,
        torch,
        torch.nn.Module,
        torch.nn.functional,
        dist,
        DeviceMesh,
        Node,
        FunctionCtx,
        list,
        dict,
        str,
    )
    not_ours = NOT_OURS.union(*map(dir, places))
    defined, used = attributes()
    reaches = [
        f"{where} reads .{name}, which only {sorted(defined[name])} define"
        for name, uses in used.items()
        if name not in not_ours and name not in OF_TENSORS and defined.get(name)
        for unit, where in uses
        if unit in ROW and all(ROW.get(owner, -1) < ROW[unit] for owner in defined[name])
    ]
    assert not reaches


@pytest.mark.parametrize("name", sorted(OF_TENSORS | NOT_OURS))
def test_exceptions_are_still_needed(name):
    defined, used = attributes()
    assert any(
        unit in ROW and all(ROW.get(owner, -1) < ROW[unit] for owner in defined.get(name, ()))
        for unit, _ in used.get(name, ())
    )


def test_the_page_names_every_file_of_its_rooms():
    """A newcomer finds each file in the list of its room, and no file that is gone."""
    listed = PAGE.read_text().partition("## The rooms, file by file")[2]
    wrong = []
    for part in listed.split("\n### ")[1:]:
        title, _, text = part.partition("\n")
        folders = re.findall(r"(\w+)/", title)
        named = set(re.findall(r"`(\w+\.py)`", text)) - {"__init__.py"}
        there = {path.name for folder in folders for path in (ROOT / folder).glob("*.py")} - {"__init__.py"}
        below = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
        wrong += [f"{title}: {name} is not listed" for name in sorted(there - named)]
        wrong += [f"{title}: {name} is not there" for name in sorted(named - below)]
    assert not wrong


def test_the_table_names_every_unit():
    table = PAGE.read_text().partition("## Where is what?")[2].partition("\n## ")[0]
    missing = {unit for unit in ROW if f"`{unit}/`" not in table and f"`{unit}.py`" not in table} - {"shardwise"}
    assert not missing
