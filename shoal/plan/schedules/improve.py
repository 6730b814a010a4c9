"""Make a schedule shorter by small changes on its critical path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.plan.schedules.precedence import Precedence


def improve(
    precedence: Precedence,
    durations: Sequence[float],
    rows: list[list[int]],
    wholes: frozenset[int],
    limit: int,
    attempts: int,
) -> tuple[list[list[int]], float]:
    """Try changes on the critical path, and keep each that shortens the makespan.

    The critical path leads back from the last stop. It goes from each action to the one whose end it started
    after: the previous action on its rank, or the one that it waited for. Only a change on it can shorten the
    whole. The changes are: swap two neighbours, or move a W behind later work of its rank.

    Args:
        precedence: Precedence of the actions.
        durations: Time of each action.
        rows: By rank, the numbers of its actions.
        wholes: The numbers of I that are whole backwards.
        limit: Number of activations that a rank may hold.
        attempts: Number of changes to try.

    Returns:
        The rows and their makespan.
    """
    starts, stops, _ = precedence.play(rows, durations)
    makespan = max(stops)
    shorter = True
    while shorter and attempts > 0:
        shorter = False
        for rank, row in _changes(precedence, rows, starts, stops):
            if attempts == 0:
                break
            if peak(precedence, row, wholes) > limit:
                continue
            attempts -= 1
            changed = [*rows[:rank], row, *rows[rank + 1 :]]
            new_starts, new_stops, positions = precedence.play(changed, durations)
            if any(position < len(each) for position, each in zip(positions, changed, strict=True)):
                continue
            if (new_makespan := max(new_stops)) < makespan:
                rows, starts, stops, makespan = changed, new_starts, new_stops, new_makespan
                shorter = True
                break
    return rows, makespan


def peak(precedence: Precedence, row: Sequence[int], wholes: frozenset[int]) -> int:
    """Return the most activations that a rank holds at once, each until its B or W."""
    size = precedence.size
    held = most = 0
    for number in row:
        if number < size:
            held += 1
            most = max(most, held)
        elif number >= 2 * size or number in wholes:
            held -= 1
    return most


def _changes(
    precedence: Precedence, rows: list[list[int]], starts: Sequence[float], stops: Sequence[float]
) -> Iterator[tuple[int, list[int]]]:
    """Yield ranks with a changed row each, from the end of the critical path to its start."""
    places = {number: (rank, place) for rank, row in enumerate(rows) for place, number in enumerate(row)}
    number = max((row[-1] for row in rows), key=lambda each: stops[each])
    while True:
        rank, place = places[number]
        row = rows[rank]
        before = precedence.awaited[number]
        if place and stops[row[place - 1]] == starts[number]:
            previous = row[place - 1]
            if previous != before:
                yield rank, [*row[: place - 1], number, previous, *row[place + 1 :]]
            if previous >= 2 * precedence.size:
                for later in (place + 2, place + 4, place + 8, len(row)):
                    if place < later <= len(row):
                        yield rank, [*row[: place - 1], *row[place:later], previous, *row[later:]]
            number = previous
        elif before >= 0:
            number = before
        else:
            return
