"""Tests that one version of torch cannot pass: the package supports several, and what torch itself does differs."""

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def since_213(reason):
    """Skip a test, or a case, on older versions; `reason` says what those do instead."""
    return pytest.mark.skipif(TORCH < (2, 13), reason=f"torch {torch.__version__}: {reason}")
