"""The exception tree: one base, a RuntimeError like most that torch raises; where torch is more exact, so is a leaf."""


class ShardwiseError(RuntimeError):
    """Anything shardwise raises on purpose."""


class LayoutError(ShardwiseError, ValueError):
    """A placement, split or layout that does not fit its tensor or mesh."""


class DimError(LayoutError, IndexError):
    """The tensor has no such dim, index or row."""


class MismatchError(LayoutError, AssertionError):
    """Arguments that do not fit each other, where torch asserts that they do."""


class MeshError(ShardwiseError, ValueError):
    """A mesh that is missing, of the wrong shape, or that this rank is not in."""


class AxisError(MeshError, KeyError):
    """The mesh has no axis of this name."""

    __str__ = Exception.__str__  # a KeyError would quote the sentence


class RuleError(ShardwiseError, NotImplementedError):
    """No plan can be made for an op on these layouts."""


class MoveError(ShardwiseError):
    """A change of layout that cannot be done."""


class CommError(ShardwiseError):
    """A collective failed: a peer died, timed out, or disagreed."""


class RanksDifferError(CommError):
    """The ranks run different programs: each came to another collective (``debug.check_ranks()``)."""


class CheckpointError(ShardwiseError):
    """A checkpoint that cannot be written or read: the files, the names in them, or what they are loaded into."""


class StrictError(ShardwiseError):
    """Communication that the program did not ask for, under ``strict()``."""


class OutlineError(ShardwiseError):
    """A program asked for a value on a mesh without values."""


class CaptureError(ShardwiseError):
    """A function cannot be captured, or is not the function that was captured before."""


class AutogradError(ShardwiseError):
    """A use of autograd whose gradients would be lost or wrong."""


def out_of_range(dim: int, ndim: int) -> str:
    """What torch says of a dim that a tensor does not have; programs look for these words."""
    least, most = -max(ndim, 1), max(ndim, 1) - 1
    return f"Dimension out of range (expected to be in range of [{least}, {most}], but got {dim})"


def dim_from_front(dim: int, ndim: int) -> int:
    """A dim counted from the front. IndexError, in torch's words, if there is no such dim."""
    try:
        return range(ndim or 1)[dim]
    except IndexError:
        raise IndexError(out_of_range(dim, ndim)) from None


def check_type(value: object, kind: type | tuple[type, ...], what: str, hint: str = "") -> None:
    """Raise TypeError if `value` is not of this kind (a bool is no int), and say what it was and what to do."""
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return
    names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
    shown = repr(value)
    shown = shown if len(shown) < 100 else f"{shown[:97]}..."
    raise TypeError(f"{what}: expected {names}, got {shown} ({type(value).__name__}){'; ' + hint if hint else ''}")
