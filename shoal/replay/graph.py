"""What ranks did, as a graph: work in order on each rank, and collectives that join ranks.

A rank's program is a list of events: `Work` takes its seconds; `Arrive` starts a collective on this rank,
which goes on meanwhile; `Await` stops the rank until the collective has ended. A collective begins when the
last of its ranks has arrived and the collective before it has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a rank.

    Attributes:
        kind: Its kind, one of `shoal.timeline.Kind`.
        name: The name of its span.
        step: The index of the step that it belongs to.
        seconds: How long it takes.
    """

    kind: str
    name: str
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Arrive:
    """The rank starts a collective: `collective` is its number."""

    collective: int


@dataclass(frozen=True, slots=True)
class Await:
    """The rank waits until a collective has ended: `collective` is its number."""

    collective: int


Event = Work | Arrive | Await


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective.

    Attributes:
        name: The name of its spans.
        purpose: One of `shoal.timeline.Purpose`, or "".
        step: The index of the step in which it starts.
        bytes: The bytes of its tensor.
        group: The ranks that take part.
        seconds: For each rank, the seconds from when all have arrived until it ends there.
        after: The number of the collective that it has to wait for, if any: ranks of a group do them one
            after another.
    """

    name: str
    purpose: str
    step: int
    bytes: int
    group: tuple[int, ...]
    seconds: Mapping[int, float]
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """The programs of all ranks.

    Attributes:
        programs: The events of each rank, in order.
        starts: When each rank begins its program, in seconds.
        collectives: The collectives, by number.
        steps: The indices of the steps in the programs, ascending.
    """

    programs: Mapping[int, Sequence[Event]]
    starts: Mapping[int, float]
    collectives: Sequence[Collective]
    steps: tuple[int, ...]
