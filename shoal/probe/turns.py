"""Time operations while all ranks do the same, since cores and the memory's bandwidth are shared.

A machine's drift should affect all operations alike: in every round each operation has its turn, every other
round in reverse order. A turn has as many operations as fill some milliseconds on the slowest rank, after one
that is not counted. The ranks begin it together and do equally many. If ranks share cores, a rank that may
work first is soon done: there a turn ends with the last rank's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import repeat
from statistics import median
from typing import TypeVar

from shoal.probe.place import Place

COLD = 128 << 20
"""Bytes that lie between two uses of a tensor: several times the caches of a core."""

Operation = Callable[[], object]

Key = TypeVar("Key", bound=Hashable)

_MOST = 2000  # operations in a turn


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of measuring.

    Attributes:
        rounds: Turns of each operation.
        turn_seconds: Least seconds of a turn.
        sizes: Bytes of the collectives' buffers.
    """

    rounds: int
    turn_seconds: float
    sizes: tuple[int, ...]


THOROUGH = Effort(5, 0.02, tuple(1 << power for power in range(10, 27, 2)))
"""Collectives of 1 KiB to 64 MiB, each size four times the one before."""

QUICK = Effort(3, 0.005, (4 << 10, 64 << 10, 1 << 20, 8 << 20))


def time_in_turns(operations: Mapping[Key, Operation], place: Place, effort: Effort) -> dict[Key, float]:
    """Return the seconds of each operation on this rank, the median over rounds.

    Args:
        operations: Operations by key; equal keys in equal order on all ranks.
        place: The ranks.
        effort: Number and length of the turns.
    """
    counts = {key: _count(operation, place, effort) for key, operation in operations.items()}
    seconds: dict[Key, list[float]] = {key: [] for key in operations}
    for index in range(effort.rounds):
        for key in reversed(list(operations)) if index % 2 else operations:
            seconds[key].append(_turn(operations[key], counts[key], place))
    return {key: median(turns) for key, turns in seconds.items()}


def _count(operation: Operation, place: Place, effort: Effort) -> int:
    """Return the number of operations in a turn."""
    once = place.ranks.largest(_turn(operation, 1, place))
    return min(max(1, round(effort.turn_seconds / once)), _MOST)


def _turn(operation: Operation, count: int, place: Place) -> float:
    operation()
    place.finish()
    place.ranks.start_together()
    start = time.perf_counter()
    for _ in repeat(None, count):
        operation()
    place.finish()
    seconds = time.perf_counter() - start
    return (place.ranks.largest(seconds) if place.is_crowded else seconds) / count
