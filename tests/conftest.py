import pytest
import torch

from tests.workers import close_pools

# Small tensors: threads cost more than they bring, and the worker processes need the cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def workers_end_with_the_session():
    yield
    close_pools()
