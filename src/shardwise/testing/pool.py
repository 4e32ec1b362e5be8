"""Processes that try many things, one after another."""

from __future__ import annotations

import gc
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch


def pool_of(jobs: int) -> ProcessPoolExecutor:
    """Processes of one thread each, because they share the machine. Where the system can fork, they are forked off one
    that has loaded the main program, and so torch and this library: to load these takes seconds."""
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    return ProcessPoolExecutor(jobs, context, _begin)


def _begin() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what is loaded by now stays: no collection of garbage looks through it
