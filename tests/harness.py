"""Check a function on distributed tensors against the same function on plain ones, over many layouts.

The same check runs on a simulated mesh and, in a worker, on a real one.
"""

import random

import torch
from torch.utils._pytree import tree_flatten

from shardwise import DTensor, Replicate, Shard
from shardwise.mesh import as_mesh
from shardwise.testing.spread import placements_for, random_placements, spread_out


def layouts_of(x, mesh_shape, generator, partial=True):
    """Random placements for one tensor."""
    return random_placements(x, mesh_shape, generator, _reductions(x, partial))


def _reductions(x, partial):
    return ("sum",) if partial and x.dtype.is_floating_point else ()


def combinations(tensors, mesh_shape, limit, seed, partial=True):
    """Layouts of several tensors: all single-axis ones of one tensor, else a deterministic sample."""
    generator = random.Random(seed)
    if len(tensors) == 1 and len(mesh_shape) == 1:
        every = [[[p]] for p in placements_for(tensors[0], mesh_shape[0], generator, _reductions(tensors[0], partial))]
        if len(every) <= limit:
            return every
    same = [[Shard(d)] * 1 for d in range(max((t.dim() for t in tensors), default=0))]
    found = []
    for place in same if len(mesh_shape) == 1 else []:
        if all(t.dim() > place[0].dim for t in tensors):
            found.append([place for _ in tensors])
    while len(found) < limit:
        found.append([layouts_of(t, mesh_shape, generator, partial) for t in tensors])
    return found[:limit]


def plain(tree):
    """The tensors of a result as plain ones."""
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in tree_flatten(tree)[0]]


def check(function, tensors, mesh, limit=8, seed=0, grad=True, tolerance=1e-10, partial=True, exact_type=True):
    """function(*tensors) agrees with plain torch on every layout tried, values and gradients."""
    tensors = list(tensors)
    differentiable = [t.dtype.is_floating_point or t.dtype.is_complex for t in tensors]
    leaves = [t.clone().requires_grad_(grad and d) for t, d in zip(tensors, differentiable, strict=True)]
    want = function(*leaves)
    wanted = tree_flatten(want)[0]
    roots = [w for w in wanted if isinstance(w, torch.Tensor) and w.requires_grad]
    generator = torch.Generator().manual_seed(seed + 1)
    seeds = [torch.randn(w.shape, generator=generator, dtype=w.dtype).to(w.device) for w in roots]
    if roots:
        torch.autograd.backward(roots, seeds)
    shape = as_mesh(mesh).shape
    for i, layouts in enumerate(combinations(tensors, shape, limit, seed, partial)):
        where = f"layouts {layouts} on mesh {shape}"
        mine = [
            spread_out(t, mesh, p, seed=seed + i, requires_grad=grad and d)
            for t, p, d in zip(tensors, layouts, differentiable, strict=True)
        ]
        try:
            got = tree_flatten(function(*mine))[0]
            assert len(got) == len(wanted), where
            for g, w in zip(got, wanted, strict=True):
                compare(g, w, where, tolerance, exact_type)
            mine_roots = [
                g for g, w in zip(got, wanted, strict=True) if isinstance(w, torch.Tensor) and w.requires_grad
            ]
            if roots:
                starts = [spread_out(s, mesh, [Replicate()] * len(shape)) for s in seeds]
                torch.autograd.backward(mine_roots, starts)
                for n, (m, leaf) in enumerate(zip(mine, leaves, strict=True)):
                    if leaf.grad is not None:
                        assert m.grad is not None, f"no gradient for operand {n}: {where}"
                        compare(m.grad, leaf.grad, f"gradient of operand {n}, {where}", tolerance, exact_type)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n  with {where}") from error


def compare(got, want, where, tolerance, exact_type=True):
    if not isinstance(want, torch.Tensor):
        assert got == want, f"{got} != {want}: {where}"
        return
    if isinstance(got, DTensor):
        assert tuple(got.shape) == tuple(want.shape), f"shape {tuple(got.shape)} != {tuple(want.shape)}: {where}"
        if exact_type:
            assert got.dtype == want.dtype, f"{got.dtype} != {want.dtype}: {where}"
        got = got.detach().full_tensor()
    torch.testing.assert_close(
        got, want.detach(), rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{m}\n  with {where}"
    )


def seeded(*shapes, seed=0, dtype=torch.float64):
    """Random tensors of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
