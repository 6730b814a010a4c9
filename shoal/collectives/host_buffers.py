"""Memory of the host that a device copies from and to: page-locked, shared with other ranks, and reused.

Page-locked memory of the host, of exactly the size that was asked for.

CUDA copies from and to page-locked memory at the rate of the link and beside the host; from other memory it
takes up to twenty times as long. torch's own (`pin_memory=True`) is rounded up to a power of two, which can
double the state of a large model. So whatever is large or stays is memory of the system, registered with CUDA
by `lock_pages`, the only place that does so. torch's own is for small tensors that come and go in each step.

Who frees: the pages are unlocked when their owner ends, before the system takes them back. Whoever drops the
last tensor of such memory has waited for the copies that use it.

Copies between a GPU and ordinary memory of the host, by way of two small page-locked buffers.

CUDA copies from and to ordinary memory at a twentieth of the link's rate, and to page-lock all of a state
takes seconds and keeps its memory. Instead a tensor goes in parts: while the device copies one buffer, the
host reads or fills the other one. So a load costs the host one pass over its bytes, as it would on a CPU.

    host      fill A | fill B          | fill A ...          host      take A | take B          | take A ...
    device           | copy A to there | copy B to there     device    copy A from there | copy B | copy A ...
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, final

import torch

from shoal.collectives.sharded_buffers import empty
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


class Event(Protocol):
    """A place in the work of a stream."""

    def query(self) -> bool:
        """Return whether the stream is past it."""

    def synchronize(self) -> None:
        """Return when the stream is past it."""


class DeviceCopies:
    """The copies of one device.

    Reads run on a stream of their own, beside the caller's computation. Writes run on the caller's stream, as
    the caller uses the result next. Whoever reads keeps both tensors until the event that `read` returns: the
    allocator does not know of the other stream.

    Args:
        device: The device.
        streams: Its streams and events, with the interface of `torch.cuda`.
        copy: Function that puts a copy from its second to its first argument into the current stream.
        launch: Function that puts other work into the current stream.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Any = torch.cuda,
        copy: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
        launch: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        self.device = device
        self._streams = streams
        self._copy = _copy if copy is None else copy
        self._launch = _launch if launch is None else launch
        self._reads = streams.Stream(device=device)

    def mark(self) -> Event:
        """Return the present place in the caller's stream."""
        event: Event = self._streams.current_stream(self.device).record_event()
        return event

    def follow(self, event: Event) -> None:
        """Let the caller's stream wait for an event."""
        self._streams.current_stream(self.device).wait_event(event)

    def read(self, host: torch.Tensor, tensor: torch.Tensor, after: Event) -> Event:
        """Begin to copy from the device once `after` has passed; return the event of its end.

        Args:
            host: Contiguous memory of the host, with as many elements as `tensor`.
            tensor: A contiguous tensor of the device.
            after: The last use of `tensor` before.
        """
        self._reads.wait_event(after)
        with self._streams.stream(self._reads):
            self._copy(host, tensor.detach().view(-1))
        return self._end_of_reads()

    def compute(self, kernel: Callable[[], object], after: Event) -> None:
        """Run work on the stream of reads once `after` has passed, and return when it is done."""
        self._reads.wait_event(after)
        with self._streams.stream(self._reads):
            self._launch(partial(_undifferentiated, kernel))
        self._end_of_reads().synchronize()

    def launch(self, kernel: Callable[[], object]) -> None:
        """Put other work into the caller's stream."""
        self._launch(kernel)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory, which another stream allocated, until the caller's stream is past here."""
        if not tensor.is_cpu:
            tensor.record_stream(self._streams.current_stream(self.device))

    def _end_of_reads(self) -> Event:
        # A thread waits for it: it must leave its core to the ranks meanwhile.
        done = self._streams.Event(blocking=True)
        done.record(self._reads)
        end: Event = done
        return end

    def write(self, tensor: torch.Tensor, host: torch.Tensor, after: Event) -> Event:
        """Put a copy to the device into the caller's stream, once `after` has passed; return its event.

        Arguments are those of `read`.
        """
        self.follow(after)
        self._copy(tensor.data.view(-1), host)  # not counted as a change, as with other backends
        self.keep(tensor)  # the caller may wait on another stream than it allocated the tensor on
        return self.mark()


def _copy(to: torch.Tensor, from_: torch.Tensor) -> None:
    to.copy_(from_, non_blocking=True)


def _launch(kernel: Callable[[], object]) -> None:
    kernel()


def _undifferentiated(kernel: Callable[[], object]) -> None:
    with torch.inference_mode():  # in which tensors of either mode may be written
        kernel()


_SMALLEST = 1 << 16  # bytes; whole pages, which no other buffer shares
_MOST_IN_FLIGHT = 2
"""Free buffers of one size that copies to the device may still read, before a caller waits for the oldest."""


@dataclass(eq=False, slots=True)
class HostBuffer:
    """One buffer.

    Attributes:
        memory: Its bytes.
        reader: Event after which the device has copied its content; None if it copies nothing.
    """

    memory: torch.Tensor
    reader: Event | None = None


class HostBuffers:
    """Buffers of about the sizes that were asked for so far.

    Sizes are rounded up by at most an eighth: near ones share buffers, and locked pages are all in memory.

    Args:
        locks_pages: Whether pages are locked for CUDA, whose copies are slow and block the caller without.
    """

    def __init__(self, *, locks_pages: bool) -> None:
        self._locks_pages = locks_pages
        self._taking = threading.Lock()
        self._free: defaultdict[int, list[HostBuffer]] = defaultdict(list)

    def take(self, elements: int, dtype: torch.dtype) -> tuple[torch.Tensor, HostBuffer]:
        """Return memory `[elements]`, and its buffer, which is free again when nobody holds the memory."""
        nbytes = elements * dtype.itemsize
        size = _rounded(nbytes)
        with self._taking:
            buffer = self._unused(self._free[size]) or HostBuffer(self._new(size))
        lent = buffer.memory[:nbytes].view(dtype)
        weakref.finalize(lent, self._free[size].append, buffer).atexit = False
        return lent, buffer

    def _unused(self, free: list[HostBuffer]) -> HostBuffer | None:
        idle = [each for each in free if each.reader is None or each.reader.query()]
        if not idle and len(free) < _MOST_IN_FLIGHT:
            return None
        buffer = (idle or free)[0]
        free.remove(buffer)
        if buffer.reader is not None:
            buffer.reader.synchronize()
            buffer.reader = None
        return buffer

    def _new(self, size: int) -> torch.Tensor:
        memory = empty(size, dtype=torch.uint8)
        if self._locks_pages and (reason := lock_pages(memory, memory)):
            warnings.warn(reason, stacklevel=2)
        return memory


def _rounded(nbytes: int) -> int:
    """Return the size of the buffer for so many bytes: one of eight between two powers of two."""
    grain = max(_SMALLEST, 1 << max(0, (nbytes - 1).bit_length() - 4))
    return max(1, -(-nbytes // grain)) * grain


_BYTES = 16 << 20


@final
class BounceBuffers:
    """Two buffers; use them in `with`, which waits at its end for the copies to the device.

    Copies to a device are in the order of the caller's stream.

    Args:
        nbytes: Bytes of each buffer.
        is_on_device: Whether a tensor is on a device.
        copies_of: Returns the copies of a device.
        locks_pages: Whether the buffers are page-locked.
    """

    def __init__(
        self,
        nbytes: int = _BYTES,
        is_on_device: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cuda,
        copies_of: Callable[[torch.device], DeviceCopies] = DeviceCopies,
        *,
        locks_pages: bool = True,
    ) -> None:
        self._nbytes = nbytes
        self.is_on_device = is_on_device
        self._copies_of = copies_of
        self._locks_pages = locks_pages
        self._copies: dict[torch.device, DeviceCopies] = {}
        self._free: deque[tuple[torch.Tensor, Event | None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for _, reader in self._free:
            if reader is not None:
                reader.synchronize()
        self._free.clear()

    @torch.no_grad()
    def fill(
        self, target: torch.Tensor, dtype: torch.dtype, read: Callable[[int, torch.Tensor], object]
    ) -> None:
        """Fill a tensor of a device with values that the host reads.

        Args:
            target: The tensor, of any strides; values are cast to its dtype.
            dtype: The dtype of the values.
            read: Fills memory `[n]` of that dtype with the values from an index of the flattened tensor on.
        """
        copies, first = self._copies_for(target), 0
        for part in _parts(target.detach(), self._nbytes // dtype.itemsize):
            memory = self._take()
            host = memory[: part.numel() * dtype.itemsize].view(dtype)
            read(first, host)
            first += part.numel()
            if part.dtype == dtype and part.is_contiguous():
                reader = copies.write(part, host, copies.mark())
            else:
                arrived = torch.empty(part.shape, dtype=dtype, device=part.device)
                copies.write(arrived, host, copies.mark())
                copies.launch(partial(part.copy_, arrived))
                reader = copies.mark()
            self._free.append((memory, reader))

    @torch.no_grad()
    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor of the host to one of the same shape; directly, if that is on no device."""
        if not self.is_on_device(target):
            target.copy_(source)
            return
        parts = _parts(source.detach(), self._nbytes // source.dtype.itemsize)

        def read(_: int, host: torch.Tensor) -> None:
            part = next(parts)
            host.view(part.shape).copy_(part)

        self.fill(target, source.dtype, read)

    @torch.no_grad()
    def get(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor of any device in ordinary memory of the host, with its strides."""
        source = source.detach()
        if not self.is_on_device(source):
            return source.to("cpu", copy=True)
        target = torch.empty_like(source, device="cpu")
        into = _parts(target, self._nbytes // source.dtype.itemsize)
        for host, part in zip(self.parts(source), into, strict=True):
            part.copy_(host.view(part.shape))
        return target

    def parts(self, source: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the elements of a device's tensor in parts, flat, in memory of the host.

        A part is valid until the next one is asked for.
        """
        copies = self._copies_for(source)
        coming: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Event]] = deque()
        try:
            for part in _parts(source.detach(), self._nbytes // source.dtype.itemsize):
                if len(coming) == 2:
                    yield from self._arrived(coming)
                memory = self._take()
                host = memory[: part.nbytes].view(part.dtype)
                flat = part.contiguous()
                coming.append((memory, host, flat, copies.read(host, flat, copies.mark())))
            while coming:
                yield from self._arrived(coming)
        finally:
            for *_, event in coming:  # the caller has ended early
                event.synchronize()

    def _arrived(
        self, coming: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Event]]
    ) -> Iterator[torch.Tensor]:
        """Yield the part that was begun first, and then free its buffer."""
        memory, host, _, event = coming.popleft()  # the part on the device is kept until it was read
        event.synchronize()
        yield host
        self._free.append((memory, None))

    def _take(self) -> torch.Tensor:
        """Return the buffer that was used longest ago, once the device has read it."""
        if not self._free:
            self._free.extend((self._new(), None) for _ in range(2))
        memory, reader = self._free.popleft()
        if reader is not None:
            reader.synchronize()
        return memory

    def _new(self) -> torch.Tensor:
        pages = HostPages(self._nbytes)
        if self._locks_pages and (reason := pages.lock()):
            warnings.warn(reason, stacklevel=2)
        return pages.tensor

    def _copies_for(self, tensor: torch.Tensor) -> DeviceCopies:
        if tensor.device not in self._copies:
            self._copies[tensor.device] = self._copies_of(tensor.device)
        return self._copies[tensor.device]


def _parts(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Yield views of at most so many elements, which together are the tensor, in its order."""
    if tensor.numel() <= most:
        if tensor.numel():
            yield tensor
        return
    row = tensor[0].numel()
    if row > most:
        for each in tensor:
            yield from _parts(each, most)
    else:
        yield from tensor.split(most // row)
