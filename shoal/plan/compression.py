"""What ranks send in place of a vector of fp32 elements: a Plan's `compress`, and its bytes.

    none          every element, 4 bytes each
    int8          8 bits an element, and a scale in fp32 for each block of 1,024: the largest magnitude is 127
    int4          4 bits an element, and a scale for each block: the largest magnitude is 7
    fp8           e4m3, and a scale for each block: the largest magnitude is 448
    sign          1 bit an element, and for each block the mean magnitude (Seide et al., Interspeech 2014)
    topk:64       of each chunk of 4,096 elements the 64th part that is largest in magnitude: a 12-bit index
                  and an fp32 value each (chunks: Wang et al., DeMo, arXiv:2411.19870)
    topk:64:2bit  the same elements; of each value the sign, and which of the chunk's two magnitudes it is
    random:64     the 64th part of the elements, chosen anew in every exchange, alike on all ranks
    threshold:3   the elements whose magnitude is above 3 times the root mean square of their chunk
    powersgd:2    of each matrix the product of two factors of rank 2 (Vogels et al., arXiv:1905.13727)

int8, int4 and fp8 round up or down at random, so that the mean of what is sent is the element itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from shoal.errors import PlanError, nearest

BLOCK = 1024
"""Elements that share a scale."""

CHUNK = 4096
"""Elements among which sparse kinds choose; a position in a chunk takes 12 bits."""

_QUANTISED: Mapping[str, int] = {"int8": 8, "int4": 4, "fp8": 8, "sign": 1}
"""Kinds that send all elements in fewer bits, with the bits."""

_NUMBERED: Mapping[str, tuple[int, int, str]] = {
    "topk": (2, CHUNK, "topk:N sends the Nth part of the elements"),
    "random": (2, CHUNK, "random:N sends the Nth part of the elements"),
    "threshold": (1, 64, "threshold:N sends elements above N times the root mean square"),
    "powersgd": (1, 64, "powersgd:N sends factors of rank N"),
}
"""Kinds with a number: its least and its greatest value, and what it says."""

_KINDS = ("none", *_QUANTISED, *_NUMBERED)


@dataclass(frozen=True, slots=True)
class Compression:
    """A way to send a vector in fewer bytes.

    Attributes:
        kind: The name before the first colon of the text.
        number: The number after it; 0 for kinds without one.
        bits: Bits of each value that topk sends: 32, or 2.
    """

    kind: str = "none"
    number: int = 0
    bits: int = 32

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, such as `int8` or `topk:64:2bit`.

        Raises:
            PlanError: There is no such kind, or its number is out of range.
        """
        kind, *rest = text.split(":")
        if kind not in _KINDS:
            raise PlanError(
                f"compress={text} does not exist{nearest(kind, _KINDS)}",
                possible=", ".join(
                    (*_QUANTISED, "topk:64", "topk:64:2bit", "random:64", "threshold:3", "powersgd:2")
                ),
                change="write compress=int8, or leave it out",
            )
        if kind not in _NUMBERED:
            if rest:
                raise PlanError(
                    f"compress={text} was given, and {kind} takes no number",
                    possible=f"compress={kind}",
                    change=f"write compress={kind}",
                )
            return cls(kind)
        least, most, meaning = _NUMBERED[kind]
        bits = 2 if kind == "topk" and rest[1:] == ["2bit"] else 32
        numbers = rest[:1] if bits == 2 else rest
        if len(numbers) != 1 or not numbers[0].isdecimal() or not least <= int(numbers[0]) <= most:
            raise PlanError(
                f"compress={text} cannot be read",
                possible=f"{meaning}, with N from {least} to {most}"
                + (", and topk:N:2bit" if kind == "topk" else ""),
                change=f"write, for example, compress={kind}:{max(least, min(64, most))}",
            )
        return cls(kind, int(numbers[0]), bits)

    def __str__(self) -> str:
        text = self.kind if self.kind not in _NUMBERED else f"{self.kind}:{self.number}"
        return f"{text}:2bit" if self.bits == 2 else text

    @property
    def is_quantised(self) -> bool:
        """Whether all elements are sent, each in fewer bits."""
        return self.kind in _QUANTISED

    @property
    def is_sparse(self) -> bool:
        """Whether each rank sends elements of its own choice, with their positions."""
        return self.kind in ("topk", "threshold")

    @property
    def has_fixed_size(self) -> bool:
        """Whether the bytes depend on the number of elements alone."""
        return self.kind not in ("threshold", "powersgd")

    def kept(self, elements: int) -> int:
        """Return how many of `elements` in one chunk topk sends, or of all elements random sends."""
        return -(-elements // self.number)

    def payload(self, elements: int) -> int:
        """Return the bytes in which a vector is sent; the kind has a fixed size.

        topk sends, for each chunk, the kept positions, packed in 12 bits each, then its values: fp32 each, or
        their 2 bits packed, and two magnitudes in bf16.
        """
        if self.is_quantised:
            blocks = -(-elements // BLOCK)
            return 4 * blocks + -(-elements * _QUANTISED[self.kind] // 8)
        if self.kind == "random":
            return 4 * self.kept(elements)
        if self.kind == "topk":
            whole, rest = divmod(elements, CHUNK)
            return whole * self._of_chunk(CHUNK) + (self._of_chunk(rest) if rest else 0)
        assert self.kind == "none", f"{self.kind} has no fixed size"
        return 4 * elements

    def _of_chunk(self, elements: int) -> int:
        kept = self.kept(elements)
        positions = -(-kept * 12 // 8)
        return positions + (-(-kept * 2 // 8) + 4 if self.bits == 2 else 4 * kept)
