"""Run a function with every rank a thread of this process, on torch's threaded process group."""

import threading

import pytest
import torch
import torch.distributed as dist


def run_threads(program, world_size, timeout=240):
    """The list of `program()`, by rank, each computed in a thread of its own."""
    threads = pytest.importorskip(
        "torch.testing._internal.distributed.multi_threaded_pg", reason="needs torch's test tools"
    )
    results, errors = {}, []
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threads._install_threaded_pg()
    try:
        store = dist.HashStore()

        def work(rank):
            try:
                dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
                results[rank] = program()
            except BaseException as error:
                errors.append((rank, error))
                threads.ProcessLocalGroup.exception_handle(error)

        running = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(timeout)
    finally:
        threads._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    assert not errors, errors
    return [results[rank] for rank in range(world_size)]
