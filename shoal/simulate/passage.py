"""A Passage: what a rank does from the start of a forward or backward to its end, piece by piece.

Pieces of compute are seconds. Between them stand communications that compute waits for (`Exposed`), places at
which a communication is begun that travels beside compute (`Start`), and places at which the next piece needs
what came (`Wait`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal.timeline import Purpose

__all__ = ["Collective", "Exposed", "Passage", "Piece", "Start", "Wait"]


@dataclass(frozen=True, slots=True)
class Collective:
    """A communication of the rank with others that are as far in their program as it is.

    Attributes:
        name: As a recorded span's, such as "all_reduce:bucket 3".
        seconds: From start to end where nothing is before it.
        bytes: Of the tensor.
        group: Global ranks that take part.
        purpose: What it is for.
        late: Of the seconds, those before all of the group are there.
    """

    name: str
    seconds: float
    bytes: int
    group: tuple[int, ...]
    purpose: Purpose
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class Exposed:
    """A communication within a block that compute waits for, or the part of it that compute does not hide."""

    collective: Collective


@dataclass(frozen=True, slots=True)
class Start:
    """Puts a communication behind those that the rank has begun before.

    Attributes:
        key: What a `Wait` names it by; all that were begun under it are waited for.
        collective: What is begun.
        load: How much it loads the device while it travels: `shoal.cost.collectives.network.collective_load`.
    """

    key: object
    collective: Collective
    load: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Stops compute until what was begun under a key has ended.

    Attributes:
        key: See `Start`; nothing is waited for if nothing was begun under it.
    """

    key: object


Piece = float | Exposed | Start | Wait


@dataclass(frozen=True, slots=True)
class Passage:
    """A forward, a backward or a half of one, of a stage for one micro-batch.

    Attributes:
        pieces: In order.
        seconds: What it takes if nothing travels beside it.
        is_plain: Whether it neither begins nor awaits anything that travels beside compute.
    """

    pieces: tuple[Piece, ...]
    seconds: float
    is_plain: bool

    @property
    def exposed(self) -> Iterator[Collective]:
        """What its compute waits for within blocks."""
        return (piece.collective for piece in self.pieces if isinstance(piece, Exposed))

    def exposed_moments(self) -> Iterator[tuple[float, float]]:
        """From when to when its compute waits for these, in seconds from its start."""
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
        """That of some pieces; compute that follows compute becomes one piece."""
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
