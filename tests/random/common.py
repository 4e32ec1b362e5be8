"""What tests of random numbers share."""

import functools

import shardwise


def as_torch_draws(test):
    """The test under use("torch"): plain torch's own numbers, to be compared with a plain program."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        with shardwise.random.use("torch"):
            return test(*args, **kwargs)

    return run
