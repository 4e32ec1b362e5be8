"""Which names a piece of Python uses, read off its code."""

from shardwise.captures.names import names_in


def test_imports_of_long_functions():
    """Of more than 256 constants, instructions have arguments of several bytes: the dots of an import stand before."""
    many = "\n".join(f"    y = {n + 1000}" for n in range(300))
    space = {}
    exec(f"def f():\n{many}\n    import json\n    from math import sin\n    from . import a\n    from ..up import b", space)
    found = names_in(space["f"].__code__)
    assert found.imports == {"json", "math", ".", "..up"}
    assert {"sin", "a", "b"} <= found.attributes
