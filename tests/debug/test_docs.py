"""The examples of docs/debugging.md run and print what the page shows."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "debugging.md"


def test_examples():
    text = PAGE.read_text()
    names, printed, lines = {"__name__": "train"}, "", 0
    for block in re.findall(r"```python\n(.*?)```", text, re.S):  # as one file, train.py
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * lines + block, "train.py", "exec"), names)
        lines += block.count("\n") + 1
        printed += out.getvalue()
    shown = "".join(re.findall(r"```\n(.*?)```", re.sub(r"```python\n.*?```", "", text, flags=re.S), re.S))
    assert [line for line in printed.splitlines() if line] == [line for line in shown.splitlines() if line]
