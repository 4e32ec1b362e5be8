"""The exception tree: one base, a RuntimeError like most that torch raises; where torch is more exact, so is a leaf."""


class ShardwiseError(RuntimeError):
    """Anything shardwise raises on purpose."""


class LayoutError(ShardwiseError, ValueError):
    """A placement, split or layout that does not fit its tensor or mesh."""


class DimError(LayoutError, IndexError):
    """A dim, an index or a row that a tensor does not have."""


class MeshError(ShardwiseError, ValueError):
    """A mesh that is missing, of the wrong shape, or that this rank is not in."""


class AxisError(MeshError, KeyError):
    """A mesh axis of a name that there is not."""

    __str__ = Exception.__str__  # a KeyError would quote the sentence


class RuleError(ShardwiseError, NotImplementedError):
    """No plan can be made for an op on these layouts."""


class MoveError(ShardwiseError):
    """A change of layout that cannot be done."""


class CommError(ShardwiseError):
    """A collective failed: a peer died, timed out, or disagreed."""


class RanksDifferError(CommError):
    """The ranks run different programs: each came to another collective (``debug.check_ranks()``)."""


class StrictError(ShardwiseError):
    """Communication that the program did not ask for, under ``strict()``."""


class AutogradError(ShardwiseError):
    """A use of autograd whose gradients would be lost or wrong."""


def check_type(value: object, kind: type | tuple[type, ...], what: str, hint: str = "") -> None:
    """Raise TypeError if `value` is not of this kind (a bool is no int), and say what it was and what to do."""
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return
    names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
    shown = repr(value)
    shown = shown if len(shown) < 100 else f"{shown[:97]}..."
    raise TypeError(f"{what}: expected {names}, got {shown} ({type(value).__name__}){'; ' + hint if hint else ''}")
