"""The functions that torch has for the seeds of a mesh."""

from __future__ import annotations

from shardwise.mesh import DeviceMesh, SimulatedMesh, as_mesh
from shardwise.random import generator


def manual_seed(seed: int, device_mesh: DeviceMesh | SimulatedMesh) -> None:
    """Start the stream of random numbers anew, on this rank: call it alike on all ranks.

    Args:
        seed: Any int that torch takes.
        device_mesh: A mesh that this rank is in. The stream is one for all meshes.

    Raises:
        MeshError: This rank is not in the mesh.
    """
    as_mesh(device_mesh)
    generator.manual_seed(seed)


def is_rng_supported_mesh(device_mesh: DeviceMesh | SimulatedMesh) -> bool:
    """Whether random numbers are those of one device on this mesh: they are on every mesh and device."""
    as_mesh(device_mesh, outside=True)
    return True
