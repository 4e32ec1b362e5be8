"""What importing the package imports, and hooks on imports."""

import importlib
import subprocess
import sys
import textwrap

import pytest

import shardwise
from shardwise.imports import when_imported


def python(text):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_what_many_programs_never_use_comes_later():
    python("""
        import gc, sys
        import shardwise
        late = ("shardwise.parallel", "shardwise.debug", "shardwise.experimental", "rich", "torch.distributed.tensor")
        assert not [name for name in sys.modules if name.startswith(late)]
        assert gc.isenabled() and {"parallel", "register_sharding", "DTensor"} <= set(dir(shardwise))
        assert callable(shardwise.local_map) and callable(shardwise.parallel.style.ColwiseParallel)
        assert shardwise.experimental._attention.context_parallel is shardwise.context_parallel
        names = {}
        exec("from shardwise import *", names)
        assert set(shardwise.__all__) <= set(names)
    """)
    with pytest.raises(AttributeError, match="module 'shardwise' has no attribute 'nowhere'"):
        shardwise.nowhere  # noqa: B018


def test_gc_stays_off_if_it_was():
    python("""
        import gc
        gc.disable()
        import shardwise
        assert not gc.isenabled()
    """)


def test_a_module_is_shown_when_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "shown_when_imported.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    forget = when_imported("shown_when_imported", lambda module: seen.append(module.value))
    try:
        import shown_when_imported  # noqa: F401

        del sys.modules["shown_when_imported"]
        importlib.import_module("shown_when_imported")

        assert seen == [1, 1]
        when_imported("shown_when_imported", lambda module: seen.append(module))()
        assert seen[2:] == [sys.modules["shown_when_imported"]]
    finally:
        forget()
        forget()
        sys.modules.pop("shown_when_imported", None)
    import shown_when_imported  # noqa: F401

    assert len(seen) == 3
