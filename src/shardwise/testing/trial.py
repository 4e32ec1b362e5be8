"""One trial: a call on distributed tensors next to the same call on plain ones, values and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from shardwise.argument_types import MeshArgument
from shardwise.comm.record import Entry
from shardwise.debug.ledger import Ledger
from shardwise.errors import ShardwiseError
from shardwise.layout import Layout, Partial, Replicate
from shardwise.mesh import as_mesh
from shardwise.move import plan_move
from shardwise.random import use
from shardwise.strategy.program import leaves_empty
from shardwise.tensor import DTensor
from shardwise.testing.seeding import seed_torch
from shardwise.testing.spread import Combination, is_float, spread_out, stored_alike

RIGHT, REFUSED, WRONG, RAISED = "right", "refused", "wrong", "raised"

TOLERANCE = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}
MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass
class Sample:
    """A call to be tried: `call(tensors)` makes it with these tensors in place of the sample's own."""

    call: Callable[[list[Any]], Any]
    tensors: list[torch.Tensor]
    grad: bool = True
    values: bool = True  # False where torch promises shapes and dtypes only (empty_like)
    holes: bool = False  # local tensors with gaps in their memory
    strides: bool = True  # False where torch leaves open how the results lie in memory
    takes_any_sizes: bool = True  # False where torch would crash on tensors whose sizes do not fit each other
    tolerance: float | None = None  # the largest difference that is none; by default what the dtypes allow

    def __post_init__(self) -> None:
        # a call is as exact as the least exact of its operands
        self.least_exact = max((TOLERANCE.get(t.dtype, 0.0) for t in self.tensors), default=0.0)
        self.differentiable = [self.grad and is_float(t.dtype) for t in self.tensors]

    def laid_out(self, mesh: MeshArgument, layouts: Combination, seed: int = 0) -> list[DTensor]:
        """The sample's tensors as distributed leaves, one of `layouts` each."""
        each = zip(self.tensors, layouts, self.differentiable, strict=True)
        return [
            spread_out(tensor, mesh, places, seed=seed + i, requires_grad=differentiable, holes=self.holes)
            for i, (tensor, places, differentiable) in enumerate(each)
        ]


@dataclass
class Reference:
    """What plain torch gives for a sample."""

    sample: Sample
    outputs: list[Any]
    seeds: list[torch.Tensor]
    grads: list[torch.Tensor | None]

    @property
    def roots(self) -> list[int]:
        return [i for i, o in enumerate(self.outputs) if _needs_grad(o)]


@dataclass
class Outcome:
    """How one trial ended and what it cost: the bytes that all ranks received in forward, and those that it would take
    to finish the sums that its results leave pending."""

    verdict: str
    message: str = ""
    bytes: int = 0
    pending: int = 0
    entries: list[Entry] = field(default_factory=list)
    placements: list[Any] = field(default_factory=list)  # of the outputs

    @property
    def fallbacks(self) -> set[str]:
        """The ops whose operands were gathered, with the reasons."""
        return {f"{e.op}: {e.reason}" for e in self.entries if e.reason}


def _needs_grad(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def reference(sample: Sample, seed: int = 0) -> Reference | None:
    """What plain torch gives for a sample, without gradients where torch has none; None where torch itself raises."""
    for grad in (True, False) if any(sample.differentiable) else (False,):
        leaves = [
            stored_alike(t).requires_grad_(grad and d)
            for t, d in zip(sample.tensors, sample.differentiable, strict=True)
        ]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seed_torch()
                outputs = tree_flatten(sample.call(leaves))[0]
                generator = torch.Generator().manual_seed(seed + 1)
                roots = [o for o in outputs if _needs_grad(o)]
                seeds = [torch.randn(o.shape, generator=generator, dtype=o.dtype).to(o.device) for o in roots]
                wanted = [leaf for leaf in leaves if leaf.requires_grad]
                found = iter(torch.autograd.grad(roots, wanted, seeds, allow_unused=True) if roots and wanted else ())
        except Exception:
            continue
        if not grad:
            sample.differentiable = [False] * len(leaves)
        grads = [next(found, None) if leaf.requires_grad else None for leaf in leaves]
        return Reference(sample, outputs, seeds, grads)
    return None


@contextmanager
def laid_out(sample: Sample, mesh: MeshArgument, layouts: Combination, seed: int) -> Iterator[list[DTensor]]:
    """The tensors of a sample on a mesh; inside, torch is seeded and warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = sample.laid_out(mesh, layouts, seed)
        seed_torch()
        yield tensors


def attempt(expected: Reference, mesh: MeshArgument, layouts: Combination, seed: int = 0) -> Outcome:
    """The same call with the tensors laid out."""
    sample = expected.sample
    whole = [Replicate()] * len(as_mesh(mesh).shape)
    log = Ledger()
    try:
        with laid_out(sample, mesh, layouts, seed) as mine:
            with log, use("torch"):  # the same random numbers as plain torch
                got = tree_flatten(sample.call(mine))[0]
            factors = any(Partial("product") in places for places in layouts)  # which are leaves, not the product
            message = _difference(got, expected.outputs, sample, facts=("requires_grad", "is_leaf")[: 2 - factors])
            if not message and expected.roots:
                starts = [spread_out(s, mesh, whole) for s in expected.seeds]
                asked = [
                    d and Partial("product") not in places  # whose factors have gradients, and not the product
                    for d, places in zip(sample.differentiable, layouts, strict=True)
                ]
                wanted = [m for m, yes in zip(mine, asked, strict=True) if yes]
                roots = [got[i] for i in expected.roots]
                # ranks that hold nothing must record what the others do: they communicate in second derivatives too
                twice = any(leaves_empty(m._layout) for m in wanted)
                options: dict[str, bool] = {"allow_unused": True, "create_graph": twice}
                found = iter(torch.autograd.grad(roots, wanted, starts, **options) if wanted else ())
                grads = [next(found) if yes else None for yes in asked]
                message = _gradient_difference(grads, expected.grads, layouts, sample)
    except ShardwiseError as error:
        return Outcome(REFUSED, f"{type(error).__name__}: {error}")
    except Exception as error:
        return Outcome(RAISED, f"{type(error).__name__}: {error}")
    results = [g for g in got if isinstance(g, DTensor)]
    pending, placements = sum(map(_pending_bytes, results)), [r.placements for r in results]
    return Outcome(WRONG if message else RIGHT, message, log.total_bytes, pending, log.entries, placements)


def _pending_bytes(x: DTensor) -> int:
    """The bytes that it takes to finish the sums that a result leaves pending."""
    settled = [Replicate() if p.is_partial() else p for p in x._layout.placements]
    return move_bytes(x._layout, x._layout.replace(placements=settled))


def move_bytes(src: Layout, dst: Layout) -> int:
    """The bytes that all ranks receive in a move."""
    plan = plan_move(src, dst)
    return sum(plan.bytes_in(rank) for rank in src.mesh.ranks)


def _difference(got: Sequence[Any], want: Sequence[Any], sample: Sample, facts: Sequence[str]) -> str:
    if len(got) != len(want):
        return f"{len(got)} results instead of {len(want)}"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        found = different(g, w, sample.values, sample.least_exact, sample.tolerance)
        found = found or _another_history(g, w, facts)
        found = found or (_memory_difference(g, w) if sample.strides else "")
        if found:
            return f"result {i}: {found}"
    return ""


def _another_history(got: object, want: object, facts: Sequence[str]) -> str:
    """How what autograd knows of a result differs from what it knows of plain torch's."""
    if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
        for name in facts:
            if getattr(got, name) != getattr(want, name):
                return f"{name} is {getattr(got, name)} instead of {getattr(want, name)}"
    return ""


def _held_otherwise(tensor: DTensor) -> str:
    """How what the ranks hold differs from what the tensor says of it."""
    layout, comm = tensor._layout, tensor._layout.mesh.comm
    for coords in comm.coords_here():
        part = comm.at(tensor._local, coords)
        says = layout.local_shape_at(coords), layout.dtype, tensor.requires_grad
        if (tuple(part.shape), part.dtype, part.requires_grad) != says:
            return f"the rank at {coords} holds {part.dtype} {tuple(part.shape)} (requires_grad {part.requires_grad})"
    return ""


def differ_in_recording(tensor: DTensor) -> bool:
    """Whether autograd records what some ranks do with it, and not what others do."""
    comm = tensor._layout.mesh.comm
    return len({comm.at(tensor._local, coords).requires_grad for coords in comm.coords_here()}) > 1


def _memory_difference(got: torch.Tensor, want: object) -> str:
    """How the reported memory of `got` differs from that of what plain torch gives; empty if it does not."""
    if not isinstance(want, torch.Tensor) or want.layout is not torch.strided:
        return ""
    if got.stride() != want.stride():
        return f"strides {got.stride()} instead of {want.stride()}"
    for name in (torch.contiguous_format, MEMORY_FORMATS.get(want.dim(), torch.contiguous_format)):
        if got.is_contiguous(memory_format=name) != want.is_contiguous(memory_format=name):
            return f"is_contiguous({name}) is {got.is_contiguous(memory_format=name)}"
    return ""


def _gradient_difference(got: Sequence[Any], want: Sequence[Any], layouts: Combination, sample: Sample) -> str:
    for i, (g, w, places) in enumerate(zip(got, want, layouts, strict=True)):
        if w is None or (g is None and not w.any()):  # no gradient and a gradient of zeros say the same
            continue
        if Partial("product") in places:  # each factor has its own gradient, which is no part of the product's
            continue
        if g is None:
            return f"gradient of operand {i}: there is none"
        found = different(g.detach(), w, True, sample.least_exact, sample.tolerance)
        found = found or ("requires_grad differs between the ranks" if differ_in_recording(g) else "")
        if found:
            return f"gradient of operand {i}: {found}"
    return ""


def different(
    got: object, want: object, values: bool = True, least_exact: float = 0.0, tolerance: float | None = None
) -> str:
    """How `got` differs from what plain torch gives; empty if it does not. Without `values`, shapes and dtypes count.

    A result is not more exact than the tolerance of its operands' dtypes, `least_exact`; `tolerance` overrules both.
    """
    if not isinstance(want, torch.Tensor):
        same = got == want or (got != got and want != want)
        return "" if same else f"{got!r} instead of {want!r}"
    if not isinstance(got, torch.Tensor):
        return f"{type(got).__name__} instead of a tensor"
    if tuple(got.shape) != tuple(want.shape):
        return f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"dtype {got.dtype} instead of {want.dtype}"
    held = _held_otherwise(got) if isinstance(got, DTensor) else ""
    if held or not values:
        return held
    if want.is_sparse:  # a gradient torch made sparse
        want = want.to_dense()
    full = DTensor.full_tensor(got.detach()) if isinstance(got, DTensor) else got.detach()  # type: ignore[arg-type]
    if want.dtype in TOLERANCE and full.device == want.device and torch.equal(full, want):
        return ""
    if tolerance is None:
        tolerance = max(TOLERANCE[want.dtype], least_exact) if want.dtype in TOLERANCE else 0.0
    scale = 1.0
    if want.dtype in (torch.bfloat16, torch.float16) and want.numel():  # errors of sums grow with the largest value
        scale = max(1.0, want.detach().float().nan_to_num(0, 0, 0).abs().max().item())
    try:
        torch.testing.assert_close(full, want.detach(), rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""
