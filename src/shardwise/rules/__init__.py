"""The operator rules, one file a family. Importing this package registers them all."""

from shardwise.rules import (  # noqa: F401
    attention,
    convert,
    create,
    embedding,
    index,
    join,
    lists,
    loss,
    matmul,
    norm,
    pointwise,
    random,
    reduce,
    slicing,
    view,
    whole,
)
