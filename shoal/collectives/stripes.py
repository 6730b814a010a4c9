"""Several tensors in one buffer, each cut into equal parts, one for each rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence


class Stripes:
    """Positions of the tensors in a buffer, in the form of the native core.

    Args:
        stripes: For each tensor, the byte where it begins and the bytes of one rank's part. Rank i's part
            begins i parts after that byte. The tensors are in the order of their positions, and none overlaps
            the next. All ranks give the same.
    """

    def __init__(self, stripes: Sequence[tuple[int, int]]) -> None:
        self.positions = tuple(stripes)
        numbers = [number for stripe in self.positions for number in stripe]
        self._numbers = (ctypes.c_uint64 * len(numbers))(*numbers)
        self.address = ctypes.addressof(self._numbers)
        self.count = len(self.positions)

    @property
    def part_bytes(self) -> int:
        """Bytes of one rank's parts of all tensors."""
        return sum(part for _, part in self.positions)
