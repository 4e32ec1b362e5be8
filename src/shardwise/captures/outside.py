"""Functions of Python's library, and of torch, that ask for something which no argument shows: files, clocks, devices.

A captured call would keep the first answer. A function that names one of them runs eagerly, with this as the reason.
"""

from __future__ import annotations

import threading
import time
import types
from concurrent.futures import Executor
from multiprocessing.pool import Pool

_CLOCKS = frozenset(
    name for name in dir(time) if name.startswith(("time", "perf_counter", "monotonic", "process_time"))
)
_READS = frozenset(
    {"read_text", "read_bytes", "open", "exists", "is_file", "is_dir", "iterdir", "glob", "rglob", "stat"}
)
_ASKING: dict[str, frozenset[str]] = {  # by the module that has them, or in which their class is
    "time": _CLOCKS | {"localtime", "gmtime", "ctime", "strftime"},
    "datetime": frozenset({"now", "today", "utcnow"}),
    "os": frozenset({"urandom", "getcwd", "listdir", "scandir", "stat", "getloadavg", "times", "popen", "system"}),
    "posix": frozenset({"urandom", "getcwd", "listdir", "scandir", "stat", "getloadavg", "times", "system"}),
    "genericpath": frozenset({"exists", "isfile", "isdir", "getsize", "getmtime"}),
    "posixpath": frozenset({"exists", "isfile", "isdir", "getsize", "getmtime"}),
    "ntpath": frozenset({"exists", "isfile", "isdir", "getsize", "getmtime"}),
    "pathlib": _READS,
    "io": frozenset({"open"}),
    "_io": frozenset({"open"}),
    "builtins": frozenset({"open", "input"}),
    "uuid": frozenset({"uuid1", "uuid4"}),
    "secrets": frozenset(
        {"randbelow", "randbits", "choice", "token_bytes", "token_hex", "token_urlsafe", "SystemRandom"}
    ),
    "random": frozenset({"SystemRandom", "getstate"}),
    "numpy.random": frozenset({"get_state"}),
    "importlib": frozenset({"import_module"}),
    "sys": frozenset(
        {"modules", "_getframe", "_current_frames", "gettrace", "getprofile"}
        | {"getrecursionlimit", "getswitchinterval", "stdin"}
    ),
    "inspect": frozenset({"currentframe", "stack", "trace", "getinnerframes", "getouterframes"}),
    "threading": frozenset({"get_ident", "active_count", "current_thread"}),
    "gc": frozenset({"get_count", "get_objects", "get_stats", "isenabled"}),
    "shelve": frozenset({"open"}),
    "socket": frozenset({"socket", "gethostname"}),
    "subprocess": frozenset({"run", "check_output", "Popen", "call"}),
    "tempfile": frozenset({"mkdtemp", "mkstemp", "NamedTemporaryFile", "TemporaryDirectory"}),
    "torch": frozenset({"get_rng_state"}),
}
_WORKERS = (threading.Thread, Executor, Pool)
COUNTS = frozenset({"_version"})  # attributes of tensors that say how often they were written


def asked_by(item: object, names: frozenset[str] | set[str]) -> str:
    """What code that names an object, and these attributes, asks of the world outside; empty if nothing.

    Args:
        item: A module, a class, an object, or a function that was imported by name.
        names: The attributes that the code names.
    """
    if isinstance(item, types.ModuleType):
        owner, found = item.__name__, _ASKING.get(item.__name__, frozenset()) & names
    elif isinstance(item, (types.FunctionType, types.BuiltinFunctionType)):
        owner = item.__module__ or ""
        found = _ASKING.get(owner, frozenset()) & {item.__name__}
    else:
        cls = item if isinstance(item, type) else type(item)
        owner = cls.__module__.partition(".")[0]
        found = (
            _ASKING.get(owner, frozenset()) & names & set(dir(cls)) if owner in ("datetime", "pathlib") else frozenset()
        )
    return f"{owner}.{min(found)}" if found else ""


def works_elsewhere(item: object, names: frozenset[str] | set[str]) -> bool:
    """Whether code that names an object, and these attributes, may have other threads work for it, whose ops nobody
    sees."""
    inside = [vars(item).get(name) for name in names] if isinstance(item, types.ModuleType) else [item]
    return any(isinstance(x, _WORKERS) or (isinstance(x, type) and issubclass(x, _WORKERS)) for x in inside)
