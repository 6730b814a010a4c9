"""Messages between the stages of a pipeline: where they go, and which were noted but never sent.

Profilers may note messages of the first and the last stage that have no other end, and some at the ends of a
step. A message was not sent if

- it is received after the last forward (or backward) of the step has begun, or was sent before the first has
  ended: nothing there takes or gives it;
- its other end would be before the first stage or after the last. With several virtual stages a rank the
  last stage sends to the first one, and the k-th message tells its virtual stage by the k-th forward (or
  backward) beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.foreign.operation import Operation

_CLOCK = 5e-5  # seconds by which times of one rank may be wrong

Ends = list[tuple[str, bool]]
"""For each way that a message goes: forward or backward, and whether this rank sends. One or two ways."""


def ends_of(kind: str) -> Ends:
    """Return what a kind of operation sends and receives; nothing if it is no message.

    Args:
        kind: Such as "forward-send" or "backward-send-forward-recv".
    """
    words = kind.split("-")
    pairs = list(zip(words[::2], words[1::2], strict=False))
    is_message = len(words) in (2, 4) and all(
        passes in ("forward", "backward") and way in ("send", "recv") for passes, way in pairs
    )
    return [(passes, way == "send") for passes, way in pairs] if is_message else []


def ahead(passes: str, *, is_sent: bool) -> int:
    """Return 1 if the other end is the next stage, or -1 if it is the one before."""
    return 1 if (passes == "forward") == is_sent else -1


def unsent(rows: Sequence[Operation], stages: int) -> set[int]:
    """Return the positions of the messages that were not sent.

    Args:
        rows: The operations, by start.
        stages: Number of stages.
    """
    last = max(row.chunk for row in rows)
    works: dict[tuple[int, int, str], list[Operation]] = {}
    messages: dict[tuple[int, int, str, bool], list[int]] = {}
    for position, row in enumerate(rows):
        for passes, is_sent in ends_of(row.kind):
            messages.setdefault((row.rank, row.step, passes, is_sent), []).append(position)
        if row.kind.startswith(("forward", "backward")) and not ends_of(row.kind):
            works.setdefault((row.rank, row.step, row.kind.partition("-")[0]), []).append(row)
    sent: set[int] = set()
    for (rank, step, passes, is_sent), positions in messages.items():
        beside = works.get((rank, step, passes), [])
        if beside:
            begun, ended = beside[-1].start + _CLOCK, min(row.stop for row in beside) - _CLOCK
            positions = [
                position
                for position in positions
                if (rows[position].stop >= ended if is_sent else rows[position].start <= begun)
            ]
        # The first to be received may not be noted, since nobody sends it.
        first = not is_sent and len(positions) == len(beside) - 1
        for number, position in enumerate(positions, start=int(first)):
            place = rows[position].stage
            if last >= stages:  # virtual stages
                place = beside[number].chunk if number < len(beside) else rows[position].chunk
            if 0 <= place + ahead(passes, is_sent=is_sent) <= max(last, stages - 1):
                sent.add(position)
    return {position for positions in messages.values() for position in positions} - sent
