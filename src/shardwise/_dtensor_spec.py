"""What `DTensor._spec` is, under the names that programs import it by."""

from shardwise.spec import Spec as DTensorSpec
from shardwise.spec import TensorMeta

__all__ = ["DTensorSpec", "TensorMeta"]
