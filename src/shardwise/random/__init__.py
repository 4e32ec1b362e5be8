"""One stream of random numbers for every layout and device: see docs/random.md."""

from shardwise.random.generator import Generator, fork, get_state, manual_seed, set_state, use

__all__ = ["Generator", "fork", "get_state", "manual_seed", "set_state", "use"]
