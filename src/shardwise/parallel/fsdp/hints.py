"""Methods of FSDP2 about torch's own buffers and streams: accepted, since they change no value."""

from __future__ import annotations


class CommunicationHints:
    """What a program may say about buffers, groups and streams that are not here: results are the same without."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted: gradients are always summed."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted: the process group allocates nothing here."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Accepted: no symmetric memory is used."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Accepted: gradients are reduced in the group of the mesh."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Accepted: one reduction is under way at a time."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accepted: parameters are gathered for the backward all the same."""

    def set_post_optim_event(self, event: object) -> None:
        """Accepted: gathering waits for all that was queued before it."""
