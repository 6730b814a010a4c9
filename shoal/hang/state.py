"""What each rank was doing when a collective did not complete.

Nouns: Call (one collective or message, as one rank called it), GroupCalls (the last calls of a rank in one
group), RankState (calls, process and place of a rank). States come from ledgers of living ranks
(`inquest.py`) or from the flight recorder of torch (`flight_recorder.py`); `verdict.py` judges both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Self


class Cause(StrEnum):
    """Why a collective does not complete."""

    DEAD = "dead"
    LEFT = "left"
    STOPPED = "stopped"
    LOOP = "loop"
    SLEEP = "sleep"
    LOCK = "lock"
    NATIVE = "native code"
    FILE = "file"
    OUTSIDE = "outside"
    WAITS = "waits"
    SKIPPED = "skipped"
    ORDER = "order"
    SIZES = "sizes"
    DTYPES = "dtypes"
    CIRCLE = "circle"
    ABSENT = "absent"
    TRANSPORT = "transport"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective or message, as one rank called it.

    Attributes:
        number: Its number in the group, from 1; messages are counted apart.
        name: Its name, such as "all_reduce", "send" or "receive".
        dtype: Type of the elements; empty if none is known.
        bytes: Bytes of the tensor or of one part; -1 if unknown, 0 for a barrier.
        root: Rank in the group of the root, or of the other end of a message; -1 if there is none.
        finished: Whether it has completed on this rank.
    """

    number: int
    name: str
    dtype: str = ""
    bytes: int = -1
    root: int = -1
    finished: bool = False

    @property
    def is_message(self) -> bool:
        """Whether it is a message between two ranks."""
        return self.name in ("send", "receive")

    def __str__(self) -> str:
        parts = [part for part in (self.dtype, f"{self.bytes} bytes" if self.bytes > 0 else "") if part]
        if self.root >= 0 and not self.is_message:
            parts.append(f"root {self.root}")
        return f"{self.name}({', '.join(parts)})" if parts else self.name


@dataclass(frozen=True, kw_only=True)
class GroupCalls:
    """The last calls of a rank in one group.

    Attributes:
        ranks: Global ranks of the group.
        calls: Its calls, from old to new.
    """

    ranks: Sequence[int]
    calls: Sequence[Call]

    @cached_property
    def begun(self) -> int:
        """Number of the last collective that the rank has begun; 0 if it began none."""
        return max(self._by_number, default=0)

    def find(self, number: int) -> Call | None:
        """Return the collective with this number; None if it is not among the last calls."""
        return self._by_number.get(number)

    @cached_property
    def _by_number(self) -> dict[int, Call]:
        return {call.number: call for call in self.calls if not call.is_message}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the main thread of a rank was, outside of collectives.

    Attributes:
        cause: What kind of place it is.
        text: What it does there, as the rest of a sentence that begins with "it".
    """

    cause: Cause
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The calls, the process and the place of one rank.

    Attributes:
        rank: The global rank.
        host: Name of its host; empty if unknown.
        pid: Id of its process; 0 if unknown.
        place: Where it was; None if that is unknown.
        groups: Its calls by the key of the group, which is equal on all ranks of the group.
    """

    rank: int
    host: str = ""
    pid: int = 0
    place: Place | None = None
    groups: Mapping[str, GroupCalls] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the state as an object for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the state of such an object.

        Raises:
            ValueError: The object is not a state.
        """
        try:
            place = data["place"]
            return cls(
                rank=int(data["rank"]),
                host=str(data["host"]),
                pid=int(data["pid"]),
                place=None if place is None else Place(cause=Cause(place["cause"]), text=str(place["text"])),
                groups={
                    str(key): GroupCalls(
                        ranks=[int(rank) for rank in group["ranks"]],
                        calls=[_call(each) for each in group["calls"]],
                    )
                    for key, group in data["groups"].items()
                },
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the state of a rank: {error!r}") from error


def _call(data: Mapping[str, Any]) -> Call:
    return Call(
        number=int(data["number"]),
        name=str(data["name"]),
        dtype=str(data["dtype"]),
        bytes=int(data["bytes"]),
        root=int(data["root"]),
        finished=bool(data["finished"]),
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0-2, 5".

    >>> ranks_text([3]), ranks_text([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    told = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return f"rank{'s' if len(ranks) != 1 else ''} {told}"
