"""Meshes of processes, under the module name that programs import them from."""

from shardwise.mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
