"""What torch functions do on sharded tensors. Importing the package registers them; others go over a mesh layout."""

from shardwise.sharded.ops import autograd, compare, copies, embedding, init, over_mesh  # noqa: F401
