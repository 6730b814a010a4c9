"""A device whose work is done as late as its streams and events allow, so that a missing wait shows.

Its memory is that of the host. Its streams have the interface of those of `torch.cuda`. Nothing that is put
into a stream runs before somebody waits for it, and then only what must have run before.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator

import torch

from shoal.collectives.device_memory import CudaMemory
from shoal.collectives.host_buffers import DeviceCopies


class Event:
    def __init__(self, blocking: bool = False) -> None:
        self._stream: Stream | None = None
        self._position = 0

    def record(self, stream: Stream) -> None:
        self._stream, self._position = stream, len(stream.work)

    def query(self) -> bool:
        """Whether it has passed; each question lets one piece of work run."""
        if self._stream is not None and self._stream.done < self._position:
            self._stream.run_to(self._stream.done + 1)
        return self._stream is None or self._stream.done >= self._position

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.run_to(self._position)


class Stream:
    """Work in its order.

    Args:
        lock: The lock of the device.
        is_prompt: Whether all work runs at once, as if the host waited for each piece.
    """

    def __init__(self, lock: threading.RLock, *, is_prompt: bool) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0
        self._lock = lock
        self._is_prompt = is_prompt

    def put(self, work: Callable[[], object]) -> None:
        with self._lock:
            self.work.append(work)
            if self._is_prompt:
                self.run_to(len(self.work))

    def run_to(self, position: int) -> None:
        with self._lock:
            while self.done < position:
                work, self.work[self.done] = self.work[self.done], _nothing
                self.done += 1
                work()

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def record_event(self) -> Event:
        event = Event()
        with self._lock:
            event.record(self)
        return event


class LateDevice:
    """The device, in place of the module `torch.cuda`.

    Args:
        seed: Seed of the order in which streams run when the device is synchronised.
        is_prompt: Whether the caller's own stream runs at once, for programs that compute on the host.
    """

    Event = Event

    def __init__(self, seed: int = 0, *, is_prompt: bool = False) -> None:
        self._lock = threading.RLock()
        self._choose = random.Random(seed)
        self._streams = [Stream(self._lock, is_prompt=is_prompt)]
        self._current = threading.local()

    def Stream(self, device: object = None) -> Stream:  # noqa: N802
        self._streams.append(Stream(self._lock, is_prompt=False))
        return self._streams[-1]

    def current_stream(self, device: object = None) -> Stream:
        return getattr(self._current, "stream", self._streams[0])

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[Stream]:
        before, self._current.stream = self.current_stream(), stream
        yield stream
        self._current.stream = before

    def launch(self, kernel: Callable[[], object]) -> None:
        """Put a kernel into the current stream."""
        self.current_stream().put(kernel)

    def synchronize(self) -> None:
        """Run what is left, stream by stream."""
        for stream in self._choose.sample(self._streams, len(self._streams)):
            stream.run_to(len(stream.work))

    def copies(self, device: torch.device) -> DeviceCopies:
        return DeviceCopies(device, self, self._copy, self.launch)

    def _copy(self, to: torch.Tensor, from_: torch.Tensor) -> None:
        to, from_ = to.detach(), from_.detach()  # a device does not know who holds its operands
        self.launch(lambda: to.copy_(from_))


class LateMemory(CudaMemory):
    """Memory that processes share, of one device, or of devices that are each a process's own.

    Args:
        kind: "shared" or "apart".
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def identity(self, device: torch.device) -> str:
        return "late" if self._kind == "shared" else f"late {os.getpid()}"

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8).share_memory_()


def _nothing() -> None:
    pass
