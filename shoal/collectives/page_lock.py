"""Page-locked memory of the host, of exactly the size that was asked for.

CUDA copies from and to page-locked memory at the rate of the link and beside the host; from other memory it
takes up to twenty times as long. torch's own (`pin_memory=True`) is rounded up to a power of two, which can
double the state of a large model. So whatever is large or stays is memory of the system, registered with CUDA
by `lock_pages`, the only place that does so. torch's own is for small tensors that come and go in each step.

Who frees: the pages are unlocked when their owner ends, before the system takes them back. Whoever drops the
last tensor of such memory has waited for the copies that use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from pathlib import Path
from typing import Any, final

import torch

from shoal.units import format_bytes


@final
class HostPages:
    """Pages of the host that nothing else is in, large ones where the system has them.

    Args:
        nbytes: Their size.

    Attributes:
        tensor: Their bytes, 0 at first: uint8 `[nbytes]`. Its views keep the pages.

    Raises:
        MemoryError: The system has not so much memory.
    """

    def __init__(self, nbytes: int) -> None:
        try:
            pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{nbytes} bytes: {error.strerror}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        # A mapping tells of its end after it is unmapped; what ctypes makes of it tells before.
        self._owner = (ctypes.c_byte * max(nbytes, 1)).from_buffer(pages)
        self.tensor = torch.frombuffer(self._owner, dtype=torch.uint8)[:nbytes]

    def lock(self) -> str:
        """Page-lock them; return why CUDA refuses, or ""."""
        return lock_pages(self.tensor, self._owner)


def lock_pages(memory: torch.Tensor, owner: object) -> str:
    """Page-lock memory of the host for all GPUs; return why CUDA refuses, or "" if it is locked.

    Args:
        memory: Contiguous memory, in pages that nothing else is in.
        owner: An object that ends when the memory does, but before the system takes it back.
    """
    runtime = torch.cuda.cudart()
    address = memory.data_ptr()
    failure = runtime.cudaHostRegister(address, memory.nbytes, 0)
    if int(failure):
        _clear_error()
        return (
            f"CUDA cannot lock {format_bytes(memory.nbytes)} of memory (error {int(failure)}, "
            f"{runtime.cudaGetErrorString(failure)}), so copies to and from the GPU are slow; the limit may "
            "be that of `ulimit -l`"
        )
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    weakref.finalize(owner, _unlock, address, device).atexit = False
    return ""


def _unlock(address: int, device: int | None) -> None:
    # Any thread may run this, also one that has no device yet: CUDA would make a context on the first GPU.
    with contextlib.nullcontext() if device is None else torch.cuda.device(device):
        if int(torch.cuda.cudart().cudaHostUnregister(address)):
            _clear_error()


def _clear_error() -> None:
    """Take this thread's last error from CUDA; the check after the next launch of a kernel would raise it."""
    runtime = _runtime()
    if runtime is not None:
        runtime.cudaGetLastError()
        return
    # torch's check after a launch takes the error, and raises it. A fill may be no launch: to add always is.
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").add_(1)


@functools.cache
def _runtime() -> Any:
    """Return the CUDA runtime that torch calls; None if it cannot be found, as where torch contains it.

    torch offers no cudaGetLastError. Each copy of the runtime has errors of its own, so it has to be this
    one: a name is looked up in torch's library, and then in the libraries that this was linked with.
    """
    path = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        library.cudaGetLastError.restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return library
