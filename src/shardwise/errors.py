"""The exception tree: one base, and each leaf is also the built-in a torch user would catch."""


class ShardwiseError(Exception):
    """Anything shardwise raises on purpose."""


class LayoutError(ShardwiseError, ValueError):
    """A placement, split or layout that does not fit its tensor or mesh."""


class MeshError(ShardwiseError, ValueError):
    """A mesh that is missing, of the wrong shape, or that this rank is not in."""


class RuleError(ShardwiseError, NotImplementedError):
    """No plan can be made for an op on these layouts."""


class MoveError(ShardwiseError, RuntimeError):
    """A change of layout that cannot be done."""


class CommError(ShardwiseError, RuntimeError):
    """A collective failed: a peer died, timed out, or disagreed."""


class StrictError(ShardwiseError, RuntimeError):
    """Communication that the program did not ask for, under ``strict()``."""


class AutogradError(ShardwiseError, RuntimeError):
    """A use of autograd whose gradients would be lost or wrong."""
