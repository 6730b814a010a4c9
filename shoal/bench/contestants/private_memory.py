"""No communication: a lower bound on the time of a collective through shared memory.

A collective within a host has to read and write certain bytes. For example, in a two-shot all-reduce of S
bytes over n ranks, each rank reads S/n bytes from each of n buffers and writes the sum to n buffers. Here
every rank does just these reads and writes on its own memory, all ranks at once. No rank waits for another,
and no cache line belongs to another core. The additional time of a collective is the cost of coordination and
of the traffic between caches.

It works in blocks that fit in a core's own cache, so that a value that is written n times is read from memory
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shoal.bench.collective import Collective
from shoal.bench.contestants.contestant import Buffers, Contestant, Operation

_BLOCK_BYTES = 128 << 10

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


class PrivateMemory(Contestant):
    """Does one rank's reads and writes.

    Args:
        rank: This rank.
        ranks: Number of ranks.
    """

    communicates = False

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks

    def empty(self, elements: int, like: Tensor) -> Tensor:
        """Return a buffer in ordinary memory."""
        return torch.empty(elements, dtype=like.dtype)

    def operation(self, collective: Collective, buffers: Buffers, op: str) -> Operation:
        """Return a function that does this rank's reads and writes of the collective."""
        given, got = buffers.input, buffers.output
        match collective.name:
            case "all_reduce":
                parts = self._parts(got)
                return partial(_reduce, _blocks(parts), _blocks(parts), _COMBINE[op])
            case "reduce":
                parts = self._parts(got)
                return partial(_reduce, _blocks(parts), _blocks(parts[:1]), _COMBINE[op])
            case "reduce_scatter":
                return partial(_reduce, _blocks(self._parts(given)), _blocks([got]), _COMBINE[op])
            case "barrier":
                return _nothing
            case "broadcast" if self._rank == 0:
                return _nothing
            case "gather" if self._rank != 0:
                return _nothing
        # The other collectives write the whole output, and read the same number of bytes, each once.
        return partial(got.copy_, torch.zeros_like(got))

    def finish(self) -> None:
        """Return at once: every call has ended when it returns."""

    def version(self) -> str:
        """Return what the figures mean."""
        return "memory: the same reads and writes on private memory, all ranks at once"

    def _parts(self, whole: Tensor) -> list[Tensor]:
        """Return one part for each rank, without the elements that do not divide evenly."""
        part = whole.numel() // self._ranks
        return [whole[rank * part : (rank + 1) * part] for rank in range(self._ranks)]


def _blocks(parts: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Cut the parts into blocks; the n-th entry has the n-th block of each part."""
    elements = max(1, _BLOCK_BYTES // parts[0].element_size())
    return list(zip(*(part.split(elements) for part in parts), strict=True))


def _reduce(
    sources: Sequence[Sequence[Tensor]],
    targets: Sequence[Sequence[Tensor]],
    combine: Callable[..., Tensor],
) -> None:
    """Combine the n-th blocks of all sources, and write the result to the n-th block of every target."""
    for blocks, (result, *copies) in zip(sources, targets, strict=True):
        combine(blocks[0], blocks[-1], out=result)
        for block in blocks[1:-1]:
            combine(result, block, out=result)
        for copy in copies:
            copy.copy_(result)


def _nothing() -> None:
    """Do nothing."""
