"""Styles of tensor parallelism: how one module is parallelized. `layers` has them; `axis` is the mesh axis that a style
works on, with what brings tensors there and back."""
