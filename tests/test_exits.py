"""A process that ends with moves under way ends well."""

import subprocess
import sys

import pytest


@pytest.mark.timeout(300)
def test_exits_with_moves_under_way():
    said = subprocess.run([sys.executable, "-m", "tests.exits", "1"], capture_output=True, text=True, timeout=280)
    assert said.stdout == "24 pairs, 0 processes ended badly\n", said.stdout + said.stderr
