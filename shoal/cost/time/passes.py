"""Seconds of kernels that only read and write memory.

They move their bytes at the memory's rate: `bandwidth_share` of the data sheet's, or `stream_share` where no
cache holds them. Each kernel of any kind adds `launch` seconds.
"""

from __future__ import annotations

from shoal.cluster import Device


def pass_seconds(device: Device, nbytes: float, kernels: int = 1) -> float:
    """Return the seconds that so many kernels take to move so many bytes."""
    return kernels * device.launch + nbytes / (device.bandwidth * device.bandwidth_share)


def stream_seconds(device: Device, nbytes: float, kernels: int = 1) -> float:
    """Return the seconds to read and write bytes that no cache holds."""
    share = device.stream_share or device.bandwidth_share
    return kernels * device.launch + nbytes / (device.bandwidth * share)
