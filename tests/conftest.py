import gc

import pytest
import torch

from shardwise.testing.seeding import seed_torch
from tests.workers import close_pools, preloaded

# Small tensors: threads cost more than they bring, and the worker processes need the cores.
torch.set_num_threads(1)


def pytest_collection_finish():
    """The tests and all that they loaded stay: no collection of garbage looks through them from now on."""
    gc.collect()
    gc.freeze()
    preloaded()  # the library's own checks fork their processes off the same one


@pytest.fixture(autouse=True)
def seeded():
    seed_torch()


@pytest.fixture(scope="session", autouse=True)
def workers_end_with_the_session():
    yield
    close_pools()
