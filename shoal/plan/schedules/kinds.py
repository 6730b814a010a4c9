"""What each schedule asks of ranks, stages and micro-batches, and what of it no number of these changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import PlanError, nearest
from shoal.plan.schedules.schedule import looped, v_shaped

__all__ = ["FOUND", "has_halves", "least_virtual", "placement_of", "require_numbers"]

FOUND = "search"
"""The name of schedules that were found by search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """What a schedule can be made for.

    Attributes:
        least_virtual: The fewest stages on a rank.
        most_virtual: The most; None if there is no limit.
        v_of: With how many stages on a rank these go down the ranks and up again; None if they never do.
        microbatches_per_rank: By how many times the ranks the micro-batches must at least be; 0: any number.
        in_rounds: Whether they must be a multiple of the ranks.
        has_halves: Whether a backward may be in two halves, I and W.
    """

    least_virtual: int = 1
    most_virtual: int | None = 1
    v_of: int | None = None
    microbatches_per_rank: int = 0
    in_rounds: bool = False
    has_halves: bool = False


_KINDS: Mapping[str, _Kind] = {
    "gpipe": _Kind(),
    "1f1b": _Kind(),
    "interleaved": _Kind(least_virtual=2, most_virtual=None, in_rounds=True),
    "looped-bfs": _Kind(most_virtual=None),
    "zb-h1": _Kind(has_halves=True),
    "zb-v": _Kind(least_virtual=2, most_virtual=2, v_of=2, has_halves=True),
    "dualpipe-v": _Kind(least_virtual=2, most_virtual=2, v_of=2, microbatches_per_rank=2, has_halves=True),
    FOUND: _Kind(most_virtual=None, v_of=2, has_halves=True),
}


def least_virtual(name: str) -> int:
    """The fewest stages on a rank that the schedule is made for.

    Raises:
        PlanError: There is no schedule of that name.
    """
    return _find(name).least_virtual


def has_halves(name: str) -> bool:
    """Whether a backward of the schedule may be in two halves, I and W.

    Raises:
        PlanError: There is no schedule of that name.
    """
    return _find(name).has_halves


def placement_of(name: str, ranks: int, virtual: int) -> tuple[int, ...]:
    """By stage, the rank that holds it, whatever the micro-batches: a model is cut once.

    What is found by search has two stages a rank in a V, and any other number of them looped.

    Raises:
        PlanError: There is no schedule of that name.
    """
    return v_shaped(ranks) if _find(name).v_of == virtual else looped(ranks, virtual)


def require_numbers(name: str, ranks: int, virtual: int, microbatches: int) -> None:
    """Checks that a schedule can be made for these numbers; makes none.

    Raises:
        PlanError: There is no schedule of that name, or it cannot be made for these.
    """
    kind = _find(name)
    for what, number in (("ranks", ranks), ("virtual stages", virtual), ("micro-batches", microbatches)):
        if number < 1:
            raise PlanError(
                f"a schedule of {number} {what} was asked for",
                possible="1 or more",
                change=f"give more {what}",
            )
    _require_virtual(name, kind, virtual)
    _require_microbatches(name, kind, ranks, microbatches)


def _find(name: str) -> _Kind:
    if name not in _KINDS:
        raise PlanError(
            f"there is no schedule {name!r}{nearest(name, _KINDS)}",
            possible=f"one of {', '.join(_KINDS)}",
            change="choose one of these",
        )
    return _KINDS[name]


def _require_virtual(name: str, kind: _Kind, virtual: int) -> None:
    least, most = kind.least_virtual, kind.most_virtual
    if virtual >= least and (most is None or virtual <= most):
        return
    stages = "stages" if virtual > 1 else "stage"
    given = f"the schedule {name} was asked for with {virtual} virtual {stages} on a rank"
    if most is None:
        raise PlanError(
            given,
            possible=f"{least} or more; with one it would be 1f1b",
            change=f"give {least} virtual stages, or choose 1f1b",
        )
    fitting = [
        other
        for other, each in _KINDS.items()
        if virtual >= each.least_virtual and (each.most_virtual is None or virtual <= each.most_virtual)
    ]
    raise PlanError(
        given,
        possible=f"exactly {least}",
        change=f"give {least}, or choose a schedule for {virtual}: {', '.join(fitting)}",
    )


def _require_microbatches(name: str, kind: _Kind, ranks: int, microbatches: int) -> None:
    least = kind.microbatches_per_rank * ranks
    if microbatches < least:
        raise PlanError(
            f"the schedule {name} was asked for with {microbatches} micro-batches on {ranks} ranks",
            possible=f"{least} micro-batches or more: {kind.microbatches_per_rank} for each rank",
            change=f"give {least} micro-batches, or choose another schedule",
        )
    if kind.in_rounds and microbatches % ranks:
        lower, upper = microbatches // ranks * ranks, -(-microbatches // ranks) * ranks
        raise PlanError(
            f"the schedule {name} was asked for with {microbatches} micro-batches on {ranks} ranks",
            possible=f"a multiple of {ranks}",
            change="give "
            + (f"{lower} or {upper}" if lower else f"{upper}")
            + ", or choose another schedule",
        )
