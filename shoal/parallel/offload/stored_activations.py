"""Activations in a file, from a block's forward to its backward.

Autograd saves tensors for backward; hooks put those of blocks into a file and bring them back (torch's
`saved_tensors_hooks`). A tensor's whole storage moves, once for each block and state of its values, so that a
restored tensor has the strides that it had: kernels then give the same bits. Tensors stay in memory that are
small, are views of something larger, or belong to parameters and buffers.

Writes run behind the forward: at most as many bytes as one block saves are still to be written. When the
backward of a block begins, stored or not, the reads begin of what the stored block before it saved. With
recompute=full a block's input is all that it saves.

Buffers for moves to and from files, whose memory is used again.

New memory costs more processor time than a move: the system finds and clears each page at its first touch. So
the pool keeps the memory of a buffer, and gives it to the next one of equal size, once no tensor sees it any
more; tensors may be views, and may end in any thread. `clear` gives all memory back that is not in use.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shoal.parallel.offload.storage import Segment, Storage, aligned_buffer
from shoal.spec.plan import GRANULE, Plan, block_choices


@final
class BufferPool:
    """Memory of buffers, by size."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer as `aligned_buffer` does, of bytes, for at least so many."""
        kept = self._free.get(nbytes)
        memory = kept.pop() if kept else aligned_buffer(nbytes, torch.uint8)
        seen = memory.numpy()[:]  # what tensors refer to; `memory` itself has no other user
        weakref.finalize(seen, self._give_back, nbytes, memory).atexit = False
        return torch.from_numpy(seen)

    def clear(self) -> None:
        """Forget the memory that no tensor uses."""
        self._free.clear()

    def _give_back(self, nbytes: int, memory: torch.Tensor) -> None:
        self._free.setdefault(nbytes, []).append(memory)


_LEAST = 1 << 16
"""Bytes of the smallest storage that moves."""

_CHUNK = 1 << 26
"""Bytes of the file that are reserved at once."""


def store_activations(
    storage: Storage, model: nn.Module, plan: Plan, stages: Sequence[Sequence[nn.Module]], every: int
) -> None:
    """Make blocks keep what they save for backward in a file; wraps their forward, within their hooks.

    Args:
        storage: The rank's storage.
        model: The model.
        plan: The Plan, which says which blocks of a stage do so.
        stages: The blocks of each of this rank's stages.
        every: Number of the model's blocks.
    """
    space = _Space(storage)
    buffers = [buffer for buffer in model.buffers() if not buffer.is_meta]
    for blocks in stages:
        stored = block_choices(plan, len(blocks), every).stored
        for place, block in enumerate(blocks):
            if place in stored:
                block.forward = _storing(block, block.forward, space, buffers)
            else:
                block.forward = _reading_ahead(block.forward, space)


def _reading_ahead(forward: Callable[..., Any], space: _Space) -> Callable[..., Any]:
    """Return a block's forward, whose backward begins to read what the stored block before it saved."""

    def kept(*inputs: Any, **named: Any) -> Any:
        output = forward(*inputs, **named)
        first = output[0] if isinstance(output, tuple | list) else output
        if isinstance(first, torch.Tensor) and first.requires_grad:
            reference = space.last

            def begin(gradient: torch.Tensor) -> None:
                before = None if reference is None else reference()
                if before is not None:
                    before.read()

            first.register_hook(begin)
        return output

    return kept


def _storing(
    block: nn.Module, forward: Callable[..., Any], space: _Space, buffers: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    def stored(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        own = {each.untyped_storage().data_ptr() for each in (*block.parameters(), *buffers)}
        saved = _Saved(space, own)
        with saved_tensors_hooks(saved.pack, _unpack):
            output = forward(*inputs, **named)
        saved.end()
        space.most = max(space.most, saved.nbytes)
        return output

    return stored


@dataclass(slots=True)
class _Place:
    """A range of the file, and the last write to it."""

    segment: Segment
    first: int
    written: Future[None] | None = None


@final
class _Space:
    """The file of a rank's activations; ranges that are free again are used for equal sizes.

    Attributes:
        storage: The rank's storage.
        last: The last forward of a stored block.
        most: The most bytes that a block saved; as many may be still to be written.
        buffers: Memory of what is being written and read.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.last: weakref.ref[_Saved] | None = None
        self.most = 0
        self.buffers = BufferPool()
        self._handles = 0
        self._writing: deque[tuple[Future[None], int]] = deque()
        self._free: dict[int, list[_Place]] = {}
        self._segment: Segment | None = None
        self._used = 0

    def take(self, nbytes: int) -> _Place:
        """Return a range of at least so many bytes, to which nothing is written any more."""
        self._handles += 1
        size = -(-nbytes // GRANULE) * GRANULE
        if free := self._free.get(size):
            place = free.pop()
            if place.written is not None:
                self.storage.wait(place.written, "write:activations")
            return place
        if self._segment is None or self._used + size > self._segment.elements:
            added = self.storage.add("activations", "the activations", max(size, _CHUNK), torch.uint8)
            assert isinstance(added, Segment)
            self._segment, self._used = added, 0
        first, self._used = self._used, self._used + size
        return _Place(self._segment, first)

    def write(self, place: _Place, values: torch.Tensor) -> Future[None]:
        """Begin to write values, once what is still to be written leaves room for them."""
        left = sum(nbytes for _, nbytes in self._writing) + values.nbytes
        while self._writing and (left > self.most or self._writing[0][0].done()):
            written, nbytes = self._writing.popleft()
            self.storage.wait(written, "write:activations")
            left -= nbytes
        self._writing.append((self.storage.start(place.segment.write, place.first, values), values.nbytes))
        return self._writing[-1][0]

    def give_back(self, place: _Place, nbytes: int) -> None:
        """Free a range; the last one that is in use ends the backwards, and their buffers."""
        self._handles -= 1
        if not self._handles:
            self.buffers.clear()
        self._free.setdefault(-(-nbytes // GRANULE) * GRANULE, []).append(place)


@final
class _Saved:
    """What one forward of one block saves.

    Args:
        space: The file.
        own: Addresses of storages that stay in memory.

    Attributes:
        nbytes: Bytes that it put into the file.
    """

    def __init__(self, space: _Space, own: set[int]) -> None:
        self._space = space
        self._own = own
        self.nbytes = 0
        self._before = space.last
        self._known: dict[tuple[int, int], _Handle] = {}
        self._alive: list[torch.Tensor] = []  # until the end: another tensor could get the memory of one
        self._handles: list[weakref.ref[_Handle]] = []
        space.last = weakref.ref(self)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps in place of a tensor."""
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if nbytes < _LEAST or address in self._own or nbytes > 2 * tensor.numel() * tensor.itemsize:
            return tensor.detach()
        handle = self._known.get((address, tensor._version))
        if handle is None:
            handle = self._known[address, tensor._version] = _Handle(self, self._space, storage)
            self.nbytes += nbytes
            self._alive.append(tensor)
            self._handles.append(weakref.ref(handle))
        return handle, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def end(self) -> None:
        """Forget the tensors: the forward is over."""
        self._known.clear()
        self._alive.clear()

    def read(self) -> None:
        """Begin to read all that is still needed."""
        for reference in self._handles:
            handle = reference()
            if handle is not None:
                handle.start_read()

    def read_before(self) -> None:
        """Begin to read what the block before saved."""
        before = None if self._before is None else self._before()
        if before is not None:
            before.read()


@final
class _Handle:
    """A storage in the file; its range is free again once autograd drops it."""

    def __init__(self, saved: _Saved, space: _Space, values: torch.UntypedStorage) -> None:
        self._saved = saved
        self._space = space
        self._nbytes = values.nbytes()
        self._place = space.take(self._nbytes)
        self._buffer: torch.Tensor | None = None
        self._reading: Future[None] | None = None
        staged = space.buffers.take(self._nbytes)
        staged[: self._nbytes].copy_(torch.empty(0, dtype=torch.uint8).set_(values))
        self._place.written = space.write(self._place, staged)

    def start_read(self) -> None:
        """Begin to read the storage, unless that was begun."""
        if self._buffer is None:
            self._buffer = self._space.buffers.take(self._nbytes)
            self._reading = self._space.storage.start(_read_written, self._place, self._buffer)

    def load(self) -> torch.Tensor:
        """Return the bytes of the storage."""
        self._saved.read()
        self._saved.read_before()
        assert self._buffer is not None
        assert self._reading is not None
        self._space.storage.wait(self._reading, "read:activations")
        return self._buffer[: self._nbytes]

    def __del__(self) -> None:
        """Free the range."""
        if hasattr(self, "_place"):
            self._space.give_back(self._place, self._nbytes)


def _read_written(place: _Place, into: torch.Tensor) -> None:
    """Read a range of the file, once its last write has ended."""
    assert place.written is not None
    place.written.result()
    place.segment.read(place.first, into)


def _unpack(packed: Any) -> torch.Tensor:
    """Return a saved tensor."""
    if isinstance(packed, torch.Tensor):
        return packed
    handle, dtype, shape, stride, offset = packed
    values = handle.load().view(dtype)
    tensor: torch.Tensor = values.as_strided(shape, stride, values.storage_offset() + offset)
    return tensor
