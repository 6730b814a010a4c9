"""A Passage: the pieces of one forward or backward of a rank, from its start to its end.

A piece of compute is a number of seconds. Between these stand `Exposed` (a communication that compute waits
for), `Start` (begins a communication that travels beside compute) and `Wait` (the next piece needs what such
a communication brings).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal.timeline import Purpose


@dataclass(frozen=True, slots=True)
class Collective:
    """A communication with ranks that are at the same point of their programs.

    Attributes:
        name: Name as in recorded spans, such as "all_reduce:bucket 3".
        seconds: Seconds from start to end if no other communication is before it.
        bytes: Bytes of the tensor.
        group: Global ranks of the participants.
        purpose: Purpose of the communication.
        late: The part of `seconds` before all of the group have arrived.
    """

    name: str
    seconds: float
    bytes: int
    group: tuple[int, ...]
    purpose: Purpose
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class Exposed:
    """A communication within a block, or the part of one, that compute waits for."""

    collective: Collective


@dataclass(frozen=True, slots=True)
class Start:
    """Queue a communication behind those that the rank has begun before.

    Attributes:
        key: The key that a `Wait` names; a `Wait` covers all communications begun under its key.
        collective: The communication.
        load: The load on the device while it travels: `shoal.cost.collectives.network.collective_load`.
    """

    key: object
    collective: Collective
    load: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Stop compute until the communications begun under a key have ended.

    Attributes:
        key: See `Start`; if nothing was begun under it, compute does not stop.
    """

    key: object


Piece = float | Exposed | Start | Wait


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """A forward, a backward or one half of a backward of a stage for one micro-batch; equal to itself alone.

    Attributes:
        pieces: The pieces, in order.
        seconds: Duration if nothing travels beside it.
        is_plain: Whether it has no communication that travels beside compute.
    """

    pieces: tuple[Piece, ...]
    seconds: float
    is_plain: bool

    @property
    def exposed(self) -> Iterator[Collective]:
        """Yield the communications within blocks that compute waits for."""
        return (piece.collective for piece in self.pieces if isinstance(piece, Exposed))

    def exposed_moments(self) -> Iterator[tuple[float, float]]:
        """Yield start and end of these communications, in seconds from the passage's start."""
        now = begin = 0.0
        for piece in self.pieces:
            if isinstance(piece, Exposed):
                now += piece.collective.seconds
            elif isinstance(piece, float):
                if now > begin:
                    yield begin, now
                now = begin = now + piece
        if now > begin:
            yield begin, now

    def gathered(self) -> Passage:
        """Return a plain passage with all compute in one piece, and then one piece for each operation.

        A pipeline has thousands of passages with many communications each, which a Timeline shows as few.
        """
        by_name: dict[str, list[Collective]] = {}
        for each in self.exposed:
            by_name.setdefault(each.name, []).append(each)
        compute = math.fsum(piece for piece in self.pieces if isinstance(piece, float))
        together = [
            Exposed(
                Collective(
                    name,
                    math.fsum(each.seconds for each in found),
                    sum(each.bytes for each in found),
                    found[0].group,
                    found[0].purpose,
                    math.fsum(each.late for each in found),
                )
            )
            for name, found in by_name.items()
        ]
        return Passage((compute, *together), self.seconds, True)

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Passage:
        """Return the passage of these pieces; consecutive pieces of compute become one."""
        merged: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, float) and merged and isinstance(merged[-1], float):
                merged[-1] += piece
            else:
                merged.append(piece)
        seconds = math.fsum(
            piece if isinstance(piece, float) else piece.collective.seconds
            for piece in merged
            if isinstance(piece, float | Exposed)
        )
        is_plain = not any(isinstance(piece, Start | Wait) for piece in merged)
        return cls(tuple(merged), seconds, is_plain)
