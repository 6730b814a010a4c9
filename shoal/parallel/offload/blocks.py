"""The blocks in which an optimizer passes over the parameters of a rank.

A rank's parameters lie one after another in packs: those of each stored shard, and all others. A pack is cut
into blocks of equal size, so that a large parameter lies in several. A part of a parameter begins at a
multiple of 16 elements, so that vectorised kernels treat its elements as in the whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.parallel.layout import ALIGNMENT
from shoal.parallel.offload.stored_shard import StoredShard
from shoal.parallel.owned import Owned


@dataclass(frozen=True, slots=True)
class Part:
    """The elements of a parameter in a block.

    Attributes:
        owned: The parameter.
        first: Its first element in the block, in the flattened part of this rank.
        stop: End of these elements.
        at: Place of the first one in the block.
    """

    owned: Owned
    first: int
    stop: int
    at: int

    @property
    def is_last(self) -> bool:
        """Whether the parameter ends here."""
        return self.stop == self.owned.local.numel()


@dataclass(frozen=True, slots=True)
class Pack:
    """Parameters that lie one after another.

    Attributes:
        places: The parameters, with their first elements in the pack.
        elements: Length of the pack.
        shard: The stored shard that they lie in; None if they are in memory.
    """

    places: Sequence[tuple[Owned, int]]
    elements: int
    shard: StoredShard | None = None

    def blocks(self, capacity: int) -> Iterator[tuple[int, int, tuple[Part, ...]]]:
        """Yield first element, number of elements and parts of each block of up to `capacity` elements."""
        for first in range(0, self.elements, capacity):
            stop = min(first + capacity, self.elements)
            parts = []
            for owned, offset in self.places:
                begin, end = max(first, offset), min(stop, offset + owned.local.numel())
                if begin < end:
                    parts.append(Part(owned, begin - offset, end - offset, begin - first))
            if parts:
                yield first, stop - first, tuple(parts)


def packs_of(owned: Sequence[Owned]) -> list[Pack]:
    """Return the packs of a rank's parameters, in their order; those of no elements are left out."""
    stored: dict[int, tuple[StoredShard, list[tuple[Owned, int]]]] = {}
    places: list[tuple[Owned, int]] = []
    end = 0
    for each in owned:
        if not each.local.numel():
            continue
        if each.stored is not None:
            shard = each.stored.shard
            stored.setdefault(id(shard), (shard, []))[1].append((each, each.stored.offset))
            continue
        places.append((each, end))
        end += -(-each.local.numel() // ALIGNMENT) * ALIGNMENT
    packs = [Pack(held, shard.elements, shard) for shard, held in stored.values()]
    return [*packs, Pack(places, end)] if places else packs
