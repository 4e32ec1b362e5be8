"""The README's quick start runs as it stands."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def test_quick_start(capsys):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    torch.manual_seed(0)
    names = {}
    exec(compile(program, "README.md", "exec"), names)
    assert names["up"].grad.placements == names["up"].placements
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tensor(") and len(lines) == 1 + len(names["log"]) > 1
    assert all("README.md:" in line for line in lines[1:])
