"""A CUDA runtime that locks pages, refuses, and keeps its error in the thread until somebody takes it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from shoal.collectives import host_buffers


class CudaRuntime:
    """The runtime, in place of `torch.cuda.cudart()` and of the library that torch calls.

    Args:
        limit: Bytes that may be locked at once.

    Attributes:
        locked: Bytes of the locked memory by address.
        threads: Names of the threads that locked some.
        at_register: Called before memory is locked.
    """

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.locked: dict[int, int] = {}
        self.threads: list[str] = []
        self.at_register: Callable[[], object] = lambda: None
        self._errors = threading.local()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(host_buffers, "_runtime", lambda: self, raising=False)
        return self

    def launch(self) -> None:
        """Launch a kernel, and check for errors as torch does: an error of any earlier call is raised."""
        if error := self.cudaGetLastError():
            raise RuntimeError(f"CUDA error: {error}")

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.at_register()
        self.threads.append(threading.current_thread().name)
        if sum(self.locked.values()) + nbytes > self.limit:
            return self._failed(304)
        if address in self.locked:
            return self._failed(712)
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0 if self.locked.pop(address, None) is not None else self._failed(713)

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"error number {error}"

    def cudaGetLastError(self) -> int:  # noqa: N802
        error, self._errors.last = getattr(self._errors, "last", 0), 0
        return error

    def _failed(self, error: int) -> int:
        self._errors.last = error
        return error
