"""The operator rules, one file a family. Importing this package registers them all."""

from shardwise.rules import pointwise  # noqa: F401
