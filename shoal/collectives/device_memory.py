"""Memory of a device that several processes have mapped."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Protocol

import torch
import torch.multiprocessing  # teaches ForkingPickler how tensors are shared


class DeviceMemory(Protocol):
    """Makes memory of a device that other processes can map."""

    def identity(self, device: torch.device) -> str:
        """Return a text that is equal in two processes only if they can share memory of this device."""

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return new memory, which no work of the device uses: uint8 `[nbytes]`."""

    def export(self, memory: torch.Tensor) -> bytes:
        """Return what one other process needs to map the memory."""

    def open(self, exported: bytes) -> torch.Tensor:
        """Return the memory that another process exported: uint8 `[nbytes]`."""


class CudaMemory:
    """Memory of CUDA devices, which travels as a handle of CUDA's.

    Each export is for one process: torch counts the processes that have not let go of it, and keeps the
    memory until then.
    """

    def identity(self, device: torch.device) -> str:
        """Return the device's UUID and its number, by which torch opens a handle in the other process."""
        return f"{torch.cuda.get_device_properties(device).uuid} {device.index}"

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return new memory: uint8 `[nbytes]`."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        # The allocator may give memory that work of this stream still uses, and other streams do not wait.
        torch.cuda.current_stream(device).synchronize()
        return memory

    def export(self, memory: torch.Tensor) -> bytes:
        """Return the handle of the memory, for one other process."""
        return bytes(ForkingPickler.dumps(memory))

    def open(self, exported: bytes) -> torch.Tensor:
        """Return the memory that a rank of this group exported."""
        memory: torch.Tensor = pickle.loads(exported)
        return memory
