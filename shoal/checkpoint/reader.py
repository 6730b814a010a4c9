"""Reads parts of the tensors of a safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, final

import torch
from safetensors import safe_open

__all__ = ["ShardReader"]

_REQUEST_BYTES = 8 << 20
_LONGEST_HEADER = 100_000_000  # bytes: the limit of the format


class _Place(NamedTuple):
    """The elements of a tensor in a file.

    Attributes:
        offset: The first byte.
        stop: One past the last byte.
    """

    offset: int
    stop: int


@final
class ShardReader:
    """A safetensors file that is open for reading.

    Several threads read at once, in large requests, which is quicker than to touch a mapped file's pages.

    Args:
        path: The file.
        executor: The threads.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a safetensors file.
    """

    def __init__(self, path: Path, executor: Executor) -> None:
        self._path = path
        self._executor = executor
        self._mapping: Any = None
        with ExitStack() as opened:
            self._file = opened.enter_context(path.open("rb", buffering=0))
            self._places = self._read_header()
            self._open = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def read(self, key: str, first: int, target: torch.Tensor) -> list[Future[None]]:
        """Begin to read consecutive elements of a tensor; they are there when all that is returned is done.

        Args:
            key: Name of the tensor in the file.
            first: The first element to read.
            target: The tensor to fill, contiguous, on the CPU, of the dtype in the file.

        Raises:
            ValueError: The file has no such elements.
        """
        place = self._places.get(key)
        start = 0 if place is None else place.offset + first * target.element_size()
        if place is None or start + target.nbytes > place.stop:
            raise ValueError(f"it has no elements [{first}, {first + target.numel()}) of {key!r}")
        flat = target.as_strided((target.numel(),), (1,)).view(torch.uint8).numpy().data
        return [
            self._executor.submit(self._fill, start + begin, flat[begin : begin + _REQUEST_BYTES])
            for begin in range(0, len(flat), _REQUEST_BYTES)
        ]

    def mapped(self, key: str) -> torch.Tensor:
        """Return a whole tensor, mapped from the file: the pages that are touched are read.

        Raises:
            safetensors.SafetensorError: The file has no such tensor.
        """
        if self._mapping is None:
            self._mapping = self._open.enter_context(safe_open(self._path, framework="pt"))
        tensor: torch.Tensor = self._mapping.get_tensor(key)
        return tensor

    def _fill(self, offset: int, target: memoryview) -> None:
        while target:
            read = os.preadv(self._file.fileno(), [target], offset)
            if read == 0:
                raise ValueError("it ends too early")
            target, offset = target[read:], offset + read

    def _read_header(self) -> Mapping[str, _Place]:
        length = int.from_bytes(self._file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError("its header is too long")
        text = self._file.read(length)
        begin = 8 + length
        return dict(_places(json.loads(text), begin))


def _places(header: Any, begin: int) -> Iterator[tuple[str, _Place]]:
    try:
        for key, entry in header.items():
            if key != "__metadata__":
                start, stop = entry["data_offsets"]
                yield key, _Place(begin + int(start), begin + int(stop))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"its header is not one of safetensors: {error!r}") from error
