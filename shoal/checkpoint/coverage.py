"""Checks that pieces of a tensor hold each of its elements exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from shoal.checkpoint.region import Region, runs
from shoal.errors import CheckpointError

__all__ = ["check_coverage"]

_Span = tuple[int, int]
_Range = tuple[int, int]
_Block = tuple[_Range, ...]
"""First index, and one past the last index, along each dim."""


def check_coverage(name: str, shape: Sequence[int], pieces: Iterable[tuple[Region, int, int]]) -> None:
    """Check that the pieces of a tensor hold each of its elements exactly once.

    Intervals of the same region are joined first. Regions are compared only if a tensor has several. So the
    check is small, however many shards there are.

    Args:
        name: Name of the tensor.
        shape: Shape of the tensor.
        pieces: Regions, with the interval [start, stop) of each, flattened.

    Raises:
        CheckpointError: They do not; the message names the tensor and the first fault.
    """
    whole = Region.whole(shape)
    intervals: dict[Region, list[_Span]] = {}
    for region, start, stop in pieces:
        if not (region.is_inside(shape) and 0 <= start <= stop <= region.elements):
            raise CheckpointError(f"elements [{start}, {stop}) of block {region} are not in tensor {name!r}")
        intervals.setdefault(region, []).append((start, stop))
    if not intervals.keys() - {whole}:
        _check_joined(name, math.prod(shape), _join(name, intervals.get(whole, []), ""))
        return
    blocks = [
        tuple(zip(run.block.offset, run.block.end, strict=True))
        for region, spans in intervals.items()
        for start, stop in _join(name, spans, f"block {region} of ")
        for run in runs(region, start, stop)
    ]
    fault = _first_fault(shape, blocks)
    if fault is not None:
        block, count = fault
        place = ",".join(f"{first}:{last}" for first, last in block)
        how_many = "no piece" if count == 0 else "two pieces" if count == 2 else f"{count} pieces"
        raise CheckpointError(f"block [{place}] of tensor {name!r} is in {how_many}")


def _join(name: str, spans: Iterable[_Span], where: str) -> list[_Span]:
    """Join adjacent intervals."""
    joined: list[_Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        reached = joined[-1][1] if joined else 0
        if start < reached:
            raise CheckpointError(
                f"elements [{start}, {min(stop, reached)}) of {where}tensor {name!r} are in two pieces"
            )
        if joined and start == reached:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _check_joined(name: str, elements: int, spans: Sequence[_Span]) -> None:
    reached = 0
    for start, stop in (*spans, (elements, elements)):
        if start != reached:
            raise CheckpointError(f"elements [{reached}, {start}) of tensor {name!r} are in no piece")
        reached = stop


def _first_fault(shape: Sequence[int], blocks: Sequence[_Block]) -> tuple[_Block, int] | None:
    """Return the first part of a tensor that is not in exactly one block, and the number of its blocks.

    The tensor is cut into slabs where a block begins or ends along the first dim. Each slab is a tensor with
    one dim less, and belongs to the blocks that extend across it.
    """
    if not shape:
        return None if len(blocks) == 1 else ((), len(blocks))
    cuts = sorted({0, shape[0], *(edge for block in blocks for edge in block[0])})
    waiting = sorted(blocks, key=lambda block: block[0], reverse=True)
    across: list[_Block] = []
    for first, last in pairwise(cuts):
        across = [block for block in across if block[0][1] > first]
        while waiting and waiting[-1][0][0] == first:
            across.append(waiting.pop())
        fault = _first_fault(shape[1:], [block[1:] for block in across])
        if fault is not None:
            return ((first, last), *fault[0]), fault[1]
    return None
