"""Defects of torch itself. A program that differs because of one is not ours to mend: it counts by itself.

An entry says little on purpose. Of an op that gives something wrong, it says how to write the same by its definition:
the program is run on plain torch once more with that, and what we gave must then be right. Of an op that raises where
it should not, it says torch's words, and of one that gives no second derivative, that it gives None.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shardwise.testing.fuzz.program import Program


@dataclass(frozen=True)
class Defect:
    """What is wrong with torch, and in which versions this was seen."""

    reason: str
    first: str
    last: str
    op: str = ""  # a pattern of what a statement calls
    instead: str = ""  # the same by its definition
    says: str = ""  # a pattern of the error that torch raises
    gives: str = ""  # a pattern of how what torch gives differs

    @property
    def is_here(self) -> bool:
        return self.first <= torch.torch_version.TorchVersion(torch.__version__.partition("+")[0]) <= self.last

    def mended(self, program: Program) -> Program:
        """The program without the op."""
        return program.with_lines([re.sub(self.op, self.instead, line) for line in program.lines])


DEFECTS = (
    Defect(
        "the gradient of trace of a matrix with more rows than columns goes on along the diagonal's stride",
        "2.11.0",
        "2.11.99",
        op=r"torch\.trace\((\w+)\)|call\('trace', '[\w-]+', \d+, (\w+)\)",
        instead=r"torch.diagonal(\1\2).sum()",
    ),
    Defect(
        "median along a dim that is expanded reads memory that nobody has written",
        "2.11.0",
        "2.13.99",
        op=r"torch\.(median|nanmedian)\((\w+)",
        instead=r"torch.\1(\2.clone(memory_format=torch.contiguous_format)",
    ),
    Defect(
        "multilabel_margin_loss of no rows is memory that nobody has written",
        "2.11.0",
        "2.13.99",
        op=r"F\.multilabel_margin_loss\((\w+),(\w+\.argsort\(1\))\)",
        instead=r"(F.multilabel_margin_loss(\1,\2) + (0 if len(\1) else \1.sum() / 0))",
    ),
    Defect(
        "multi_margin_loss of no rows is memory that nobody has written",
        "2.11.0",
        "2.13.99",
        op=r"F\.multi_margin_loss\((\w+),(\w+\.argmax\(1\))\)",
        instead=r"(F.multi_margin_loss(\1,\2) + (0 if len(\1) else \1.sum() / 0))",
    ),
    Defect(
        "the gradient of linear_cross_entropy in chunks is computed with out=, so it has no derivative",
        "2.13.0",
        "2.13.99",
        op=r"linear_cross_entropy \[chunked",
        says=r"functions with out=... arguments don't support automatic differentiation",
        gives=r"a tensor instead of None|Tensor-likes are not close",
    ),
    Defect(
        "which of equal elements topk takes is open, and so is their order after a sort that is not stable",
        "2.11.0",
        "2.14.99",
        op=r"\btopk\b|\bargsort\((?!.*stable)",
        gives=r"Tensor-likes are not equal",
    ),
    Defect(
        "lstsq of a matrix without full rank reads memory that nobody has written: it may take the rank for 0",
        "2.11.0",
        "2.14.99",
        op=r"\blstsq\b",
        gives=r"Tensor-likes are not close",
    ),
    Defect(
        "a second backward pass through sgn adds to zeros that have no memory",
        "2.11.0",
        "2.14.99",
        op=r"\bsgn\b",
        says=r"ZeroTensors are immutable",
    ),
    Defect(
        "acosh_, asinh_ and atanh_ have no derivatives, although acosh, asinh and atanh have",
        "2.11.0",
        "2.14.99",
        op=r"call\('a(cos|sin|tan)h', 'in-place'|\ba(cos|sin|tan)h_\(",
        says=r"the derivative for 'inplace version of a(cos|sin|tan)h' is not implemented",
    ),
    Defect(
        "the fast attention of CPUs has no second derivative, although attention by its definition has",
        "2.11.0",
        "2.14.99",
        op=r"scaled_dot_product_attention",
        says=r"derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is not implemented",
    ),
    Defect(
        "pixel_shuffle of pictures without pixels, which have channels, has a value and no gradient",
        "2.11.0",
        "2.14.99",
        op=r"pixel_(un)?shuffle",
        says=r"Function Pixel(Uns|S)huffleBackward0 returned an invalid gradient",
    ),
    Defect(
        "adaptive_avg_pool1d of nothing has a value and no gradient",
        "2.11.0",
        "2.14.99",
        op=r"adaptive_avg_pool1d",
        says=r"adaptive_avg_pool2d_backward\(\): Expected grad_output to have non-zero size",
    ),
)


def defects(program: Program) -> Iterator[Defect]:
    """The defects of this version of torch that a program may meet."""
    for defect in DEFECTS:
        if defect.is_here and any(re.search(defect.op, line) for line in program.lines):
            yield defect
