"""Why a collective does not complete: who did not come to it, and what that rank does instead.

The rules, in this order:

1. Ranks that made different calls under one number of a group are the cause, if one of these calls did not
   complete: another type, another size, or another collective. Of these the first number counts, and the
   ranks that differ from the majority.
2. A rank that is dead, that left, or that is stopped is the cause.
3. Ranks that made different calls, although all of these completed, are the cause.
4. Each rank with an unfinished call waits for those of the group that have not begun it, or for the other end
   of a message. A rank that others wait for, and that waits for nobody, is the cause; a rank whose place is
   outside of collectives waits for nobody. If all of them wait, they wait in a circle.
5. If everyone came to every call, the transport is the cause.

What each rank was doing when a collective did not complete.

Nouns: Call (one collective or message, as one rank called it), GroupCalls (the last calls of a rank in one
group), RankState (calls, process and place of a rank). States come from ledgers of living ranks
(`post_mortem.py`) or from the flight recorder of torch (`flight_recorder.py`); `verdict.py` judges both.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self


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


_GONE = (Cause.DEAD, Cause.LEFT, Cause.STOPPED)
_UNEVEN = ("all_to_all", "barrier")
"""Collectives whose bytes may differ between ranks, or mean nothing."""
_AHEAD = 16  # calls that are searched for one that another rank made earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """Why a collective does not complete.

    Attributes:
        cause: The kind of cause.
        ranks: The ranks that are the cause; empty if no rank is.
        text: The cause in one sentence.
        lines: For each rank, the last call that it finished, and the call that it waits in.
    """

    cause: Cause
    ranks: tuple[int, ...]
    text: str
    lines: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """Write the verdict to a file, whole or not at all."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        temporary.rename(path)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the verdict in a file; None if there is none."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                cause=Cause(data["cause"]),
                ranks=tuple(map(int, data["ranks"])),
                text=str(data["text"]),
                lines=tuple(map(str, data["lines"])),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def __str__(self) -> str:
        return "\n".join([self.text, *(f"  {line}" for line in self.lines)])


class _Wait(NamedTuple):
    """A rank's unfinished call, and the ranks that it waits for."""

    rank: int
    call: Call
    group: str
    missing: tuple[int, ...]


def judge(states: Sequence[RankState]) -> HangVerdict:
    """Return why the ranks do not go on.

    Args:
        states: The states of the ranks, as many as could be found out.
    """
    by_rank = {state.rank: state for state in states}
    waits = _waits(by_rank)
    cause, ranks, text = (
        _different(by_rank, unfinished=True)
        or _gone(by_rank, waits)
        or _different(by_rank, unfinished=False)
        or _missing(by_rank, waits)
        or _nobody(by_rank)
    )
    return HangVerdict(
        cause=cause, ranks=ranks, text=text, lines=tuple(_line(by_rank[rank]) for rank in sorted(by_rank))
    )


_Found = tuple[Cause, tuple[int, ...], str]
_Signature = tuple[str, str, int, int]


def _waits(states: Mapping[int, RankState]) -> list[_Wait]:
    waits = []
    for state in states.values():
        for key, group in state.groups.items():
            for call in group.calls:
                if call.finished:
                    continue
                missing = _missing_ranks(states, key, group, call)
                if missing:
                    waits.append(_Wait(state.rank, call, key, missing))
    return waits


def _missing_ranks(
    states: Mapping[int, RankState], key: str, group: GroupCalls, call: Call
) -> tuple[int, ...]:
    if call.is_message:
        return (group.ranks[call.root],) if 0 <= call.root < len(group.ranks) else ()
    return tuple(
        rank
        for rank in group.ranks
        if rank not in states
        or key not in states[rank].groups
        or states[rank].groups[key].begun < call.number
    )


def _gone(states: Mapping[int, RankState], waits: Sequence[_Wait]) -> _Found | None:
    for cause in _GONE:
        ranks = tuple(
            rank for rank, state in states.items() if state.place is not None and state.place.cause is cause
        )
        waiting = [wait for wait in waits if set(wait.missing) & set(ranks)]
        # A rank that died within a call had begun it, and is not missing.
        if ranks and (waiting or cause is not Cause.LEFT):
            place = states[ranks[0]].place
            assert place is not None
            came = f"; {_did_not_come(waiting[0], ranks)}" if waiting else ""
            each = ": each" if len(ranks) > 1 else ""
            return cause, ranks, f"{ranks_text(ranks)}{each} {place.text}{came}"
    return None


def _different(states: Mapping[int, RankState], *, unfinished: bool) -> _Found | None:
    """Return the first difference between calls under one number.

    Args:
        states: The states by rank.
        unfinished: Whether only groups count in which a call that differs did not complete.
    """
    found: list[tuple[int, str]] = []
    for key in sorted({key for state in states.values() for key in state.groups}):
        groups = [state.groups[key] for state in states.values() if key in state.groups]
        numbers = sorted({call.number for group in groups for call in group.calls})
        sets = {number: _calls(states, key, number).values() for number in numbers}
        differing = {
            number: calls for number, calls in sets.items() if len({_signature(call) for call in calls}) > 1
        }
        is_open = any(not call.finished for calls in differing.values() for call in calls)
        if differing and (is_open or not unfinished):
            found.append((min(differing), key))
    return _difference(states, min(found)[1], min(found)[0]) if found else None


def _difference(states: Mapping[int, RankState], key: str, number: int) -> _Found:
    calls = _calls(states, key, number)
    usual, _ = Counter(_signature(call) for call in calls.values()).most_common(1)[0]
    others = tuple(rank for rank, call in calls.items() if _signature(call) == usual)
    odd = tuple(rank for rank in calls if rank not in others)
    theirs, own = calls[others[0]], calls[odd[0]]
    text = (
        f"{ranks_text(odd)} called {own} where {ranks_text(others)} called {theirs}, "
        f"as collective {number} of {_group_text(states, key)}"
    )
    if own.name == theirs.name and own.root == theirs.root:
        if own.dtype != theirs.dtype:
            return Cause.DTYPES, odd, f"{text}: the types differ"
        return Cause.SIZES, odd, f"{text}: the sizes differ"
    made, reference = (_signatures_from(states[rank].groups[key], number) for rank in (odd[0], others[0]))
    if _matches(made, reference[1:]) or _follows(states[others[0]].groups[key], usual, made[0]):
        return Cause.SKIPPED, odd, f"{text}: {_they(odd)} skipped it, or made the calls in another order"
    if len(reference) > 1 and _matches(made[1:], reference):
        return Cause.ORDER, odd, f"{text}: {_they(odd)} made this call in addition"
    return Cause.ORDER, odd, f"{text}: the order differs, or {_they(odd)} skipped a call"


def _signatures_from(group: GroupCalls, number: int) -> list[_Signature]:
    """Return the signatures of a rank's collectives from a number on."""
    calls = (group.find(each) for each in range(number, number + _AHEAD))
    return [_signature(call) for call in itertools.takewhile(lambda call: call is not None, calls) if call]


def _matches(one: Sequence[_Signature], other: Sequence[_Signature]) -> bool:
    """Return whether two sequences are equal as far as both go, and both go anywhere."""
    return bool(one and other) and all(pair[0] == pair[1] for pair in zip(one, other, strict=False))


def _follows(group: GroupCalls, call: _Signature, next_call: _Signature) -> bool:
    """Return whether the calls of a rank end with one that was followed by another one before."""
    made = [_signature(each) for each in group.calls if not each.is_message]
    return made[-1] == call and (call, next_call) in itertools.pairwise(made)


def _missing(states: Mapping[int, RankState], waits: Sequence[_Wait]) -> _Found | None:
    waiting = {wait.rank for wait in waits if _is_waiting(states[wait.rank])}
    stuck = {rank for rank, state in states.items() if _waits_though_all_came(states, state)}
    # A receive may have been begun long before anybody needs it: whom collectives wait for counts first.
    collectives = [wait for wait in waits if not wait.call.is_message]
    waited_for = {rank for wait in waits for rank in wait.missing}
    free = {rank for wait in collectives for rank in wait.missing} - waiting or waited_for - waiting
    if waited_for <= stuck:  # the transfer before is what all wait for
        return None
    free -= stuck
    if not free:
        ranks = tuple(sorted(waited_for))
        told = "; ".join(
            f"rank {wait.rank} waits in {wait.call} for {ranks_text(wait.missing)}" for wait in waits[:4]
        )
        return Cause.CIRCLE, ranks, f"{ranks_text(ranks)} wait for each other: {told}"
    wait = next(wait for wait in (*collectives, *waits) if free.intersection(wait.missing))
    ranks = tuple(rank for rank in wait.missing if rank in free)
    came = _did_not_come(wait, ranks)
    state = states.get(ranks[0])
    if state is None:
        return Cause.ABSENT, ranks, f"{came}, and left no record here: its process or host may be gone"
    if state.place is None:
        return Cause.OUTSIDE, ranks, f"{came}: it is outside of collectives"
    return state.place.cause, ranks, f"{came}: it {state.place.text}"


def _waits_though_all_came(states: Mapping[int, RankState], state: RankState) -> bool:
    """Return whether a rank is known to wait, and for a collective to which every rank has come."""
    if state.place is None or state.place.cause is not Cause.WAITS:
        return False
    return any(
        not call.finished and not call.is_message and not _missing_ranks(states, key, group, call)
        for key, group in state.groups.items()
        for call in group.calls
    )


def _is_waiting(state: RankState) -> bool:
    """Return whether a rank with an unfinished call waits for it, as far as its place is known."""
    return state.place is None or state.place.cause is Cause.WAITS


def _nobody(states: Mapping[int, RankState]) -> _Found:
    # Collectives of a group complete in order: ranks wait in the first that has not, and later ones queue.
    first = Counter(
        (key, call.number, call.is_message, str(call))
        for state in states.values()
        for key, group in state.groups.items()
        for call in [next((each for each in group.calls if not each.finished), None)]
        if call is not None
    )
    if not first:
        return Cause.NONE, (), "no rank waits in a collective"
    (key, number, is_message, call), _ = first.most_common(1)[0]
    waiting = [rank for rank, state in states.items() if _is_open(state, key, number, is_message=is_message)]
    return (
        Cause.TRANSPORT,
        (),
        f"{call} of {ranks_text(sorted(waiting))} did not complete, though every rank came to it: "
        "if the link is slow, `timeout` is shorter than the transfer; else look at the network, the GPUs and "
        "the kernel's log",
    )


def _is_open(state: RankState, key: str, number: int, *, is_message: bool) -> bool:
    calls = state.groups[key].calls if key in state.groups else ()
    return any((call.number, call.is_message, call.finished) == (number, is_message, False) for call in calls)


def _did_not_come(wait: _Wait, ranks: Sequence[int]) -> str:
    if wait.call.is_message:
        act = "send to" if wait.call.name == "receive" else "receive from"
        return f"{ranks_text(ranks)} did not {act} rank {wait.rank}"
    return f"{ranks_text(ranks)} did not come to {wait.call}, collective {wait.call.number} of its group"


def _calls(states: Mapping[int, RankState], key: str, number: int) -> dict[int, Call]:
    found = {
        rank: state.groups[key].find(number) for rank, state in sorted(states.items()) if key in state.groups
    }
    return {rank: call for rank, call in found.items() if call is not None}


def _signature(call: Call) -> _Signature:
    is_even = call.name not in _UNEVEN
    return call.name, call.dtype, call.bytes if is_even else -1, call.root


def _group_text(states: Mapping[int, RankState], key: str) -> str:
    group = next(state.groups[key] for state in states.values() if key in state.groups)
    return f"the group of {ranks_text(group.ranks)}"


def _line(state: RankState) -> str:
    calls = [call for group in state.groups.values() for call in group.calls]
    finished = [call for call in calls if call.finished]
    open_calls = [call for call in calls if not call.finished]
    told = [f"rank {state.rank}" + (f" ({state.host}, process {state.pid})" if state.pid else "")]
    told.append(f"last finished {finished[-1]} {finished[-1].number}" if finished else "finished no call")
    if open_calls:
        told.append(f"waits in {open_calls[0]} {open_calls[0].number}")
    elif state.place is not None:
        told.append(state.place.text)
    return ", ".join(told)


def _they(ranks: Sequence[int]) -> str:
    return "they" if len(ranks) > 1 else "it"
