"""The only package that touches private names of torch, each with the feature that needs it.

A name that a torch release has dropped does not stop the import: what stands in its place raises when it is used, and
names the feature that is lost. `tests/test_torch_private.py` fails for each such name, and for a private name that is
used anywhere else. Two kinds are not listed here: `torch.utils._pytree`, which torch's own documentation shows, and
attributes that every tensor and module has had since torch 1.0 (`_version`, `_base`, `_parameters`, `_buffers`).
"""
