"""Which optimizers treat every element of a parameter by itself. Only those may be stepped on what a rank holds."""

from __future__ import annotations

import torch

ELEMENTWISE: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
)

WHOLE: dict[str, str] = {
    "Adafactor": "takes means over whole rows and columns",
    "LBFGS": "takes dot products over all parameters",
    "Muon": "orthogonalizes whole matrices",
    "SparseAdam": "updates the rows of a sparse gradient",
}

# State that is one number for a whole parameter: it stays a plain tensor, as torch makes it.
NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is one of torch's own optimizers that are known to be elementwise. (A subclass may do anything.)"""
    return type(optimizer) in ELEMENTWISE
