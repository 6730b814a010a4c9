"""Copies between a GPU and ordinary memory of the host, by way of two small page-locked buffers.

CUDA copies from and to ordinary memory at a twentieth of the link's rate, and to page-lock all of a state
takes seconds and keeps its memory. Instead a tensor goes in parts: while the device copies one buffer, the
host reads or fills the other one. So a load costs the host one pass over its bytes, as it would on a CPU.

    host      fill A | fill B          | fill A ...          host      take A | take B          | take A ...
    device           | copy A to there | copy B to there     device    copy A from there | copy B | copy A ...
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Self, final

import torch

from shoal.collectives.device_copies import DeviceCopies, Event
from shoal.collectives.page_lock import HostPages

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
