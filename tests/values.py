"""Random tensors and layouts, and a comparison with plain torch, for tests that are no single call (`check_rule`)."""

import torch

from shardwise import DTensor
from shardwise.testing.spread import random_placements


def seeded(*shapes, seed=0, dtype=torch.float64):
    """Random tensors of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def layouts_of(x, mesh_shape, generator, partial=True):
    """Random placements for one tensor."""
    return random_placements(x, mesh_shape, generator, ("sum",) if partial and x.dtype.is_floating_point else ())


def compare(got, want, where, tolerance):
    """`got`, distributed or not, has the shape, dtype and values of the plain `want`."""
    if not isinstance(want, torch.Tensor):
        assert got == want, f"{got} != {want}: {where}"
        return
    if isinstance(got, DTensor):
        assert tuple(got.shape) == tuple(want.shape), f"shape {tuple(got.shape)} != {tuple(want.shape)}: {where}"
        assert got.dtype == want.dtype, f"{got.dtype} != {want.dtype}: {where}"
        got = got.detach().full_tensor()
    torch.testing.assert_close(
        got, want.detach(), rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{m}\n  with {where}"
    )
