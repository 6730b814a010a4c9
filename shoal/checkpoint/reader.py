"""Reads parts of the tensors of a safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, final

import torch
from safetensors import safe_open

__all__ = ["ShardReader"]

_LONGEST_HEADER = 100_000_000  # bytes: the limit of the format


class _Place(NamedTuple):
    """The bytes [start, stop) of a tensor in a file."""

    start: int
    stop: int


@final
class ShardReader:
    """A safetensors file that is open for reading.

    What is consecutive in the file is read in one request, which is quicker than to touch a mapped file's
    pages. Several threads were slower: the system reads ahead for one.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
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

    def start(self, key: str) -> int:
        """Return the first byte of a tensor in the file.

        Raises:
            ValueError: The file has no such tensor.
        """
        if key not in self._places:
            raise ValueError(f"it has no tensor {key!r}")
        return self._places[key].start

    def read(self, key: str, first: int, target: torch.Tensor) -> None:
        """Read consecutive elements of a tensor.

        Args:
            key: Name of the tensor in the file.
            first: The first element to read.
            target: The tensor to fill, contiguous, on the CPU, of the dtype in the file.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file has no such elements.
        """
        offset = self.start(key) + first * target.element_size()
        if offset + target.nbytes > self._places[key].stop:
            raise ValueError(f"it has no elements [{first}, {first + target.numel()}) of {key!r}")
        left = target.as_strided((target.numel(),), (1,)).view(torch.uint8).numpy().data
        while left:
            count = os.preadv(self._file.fileno(), [left], offset)
            if count == 0:
                raise ValueError("it ends too early")
            left, offset = left[count:], offset + count

    def mapped(self, key: str) -> torch.Tensor:
        """Return a whole tensor, mapped from the file: the pages that are touched are read.

        Raises:
            safetensors.SafetensorError: The file has no such tensor.
        """
        if self._mapping is None:
            self._mapping = self._open.enter_context(safe_open(self._path, framework="pt"))
        tensor: torch.Tensor = self._mapping.get_tensor(key)
        return tensor

    def _read_header(self) -> Mapping[str, _Place]:
        length = int.from_bytes(self._file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError("its header is too long")
        return dict(_places(json.loads(self._file.read(length)), 8 + length))


def _places(header: Any, begin: int) -> Iterator[tuple[str, _Place]]:
    try:
        for key, entry in header.items():
            if key != "__metadata__":
                start, stop = entry["data_offsets"]
                yield key, _Place(begin + int(start), begin + int(stop))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"its header is not one of safetensors: {error!r}") from error
