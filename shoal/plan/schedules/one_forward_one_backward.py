"""Schedules that alternate one forward and one backward: 1F1B and its interleaved form.

Narayanan et al., arXiv:2104.04473. 1F1B has GPipe's bubble, and needs less memory. Interleaving divides the
bubble by the stages of a rank; it multiplies the transfers by that number, and holds somewhat more
activations.
"""

from __future__ import annotations

from shoal.plan.schedules.action import Action, Work
from shoal.plan.schedules.kind import Held, Kind


def _plain_row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """Return forwards until the first gradient can arrive, then one forward and one backward in turn."""
    first = min(ranks - 1 - rank, microbatches)
    return _alternate(
        first,
        [Action(Work.FORWARD, rank, microbatch) for microbatch in range(microbatches)],
        [Action(Work.BACKWARD, rank, microbatch) for microbatch in range(microbatches)],
    )


def _interleaved_row(rank: int, ranks: int, virtual: int, microbatches: int) -> tuple[Action, ...]:
    """Return a row like 1F1B's; micro-batches go through a rank's stages in rounds of as many as ranks."""
    first = min((virtual - 1) * ranks + 2 * (ranks - 1 - rank), microbatches * virtual)
    forwards, backwards = [], []
    for start in range(0, microbatches, ranks):
        for turn in range(virtual):
            for microbatch in range(start, start + ranks):
                forwards.append(Action(Work.FORWARD, turn * ranks + rank, microbatch))
                backwards.append(Action(Work.BACKWARD, (virtual - 1 - turn) * ranks + rank, microbatch))
    return _alternate(first, forwards, backwards)


def _alternate(first: int, forwards: list[Action], backwards: list[Action]) -> tuple[Action, ...]:
    """Return the first forwards, then forward and backward in turn, then the remaining backwards."""
    row = forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        row += [forward, backward]
    return (*row, *backwards[len(forwards) - first :])


def _held(rank: int, ranks: int, virtual: int, microbatches: int, limit: int | None) -> tuple[Held, ...]:
    """Return how many forwards before the first backward, and the one that it follows, are of each stage."""
    first = ranks - 1 - rank if virtual == 1 else (virtual - 1) * ranks + 2 * (ranks - 1 - rank)
    rounds, rest = divmod(min(first + 1, microbatches * virtual), ranks * virtual)
    whole = tuple(float(rounds * ranks + min(max(rest - turn * ranks, 0), ranks)) for turn in range(virtual))
    return (Held(whole, (0.0,) * virtual),)


ONE_FORWARD_ONE_BACKWARD = Kind(name="1f1b", row=_plain_row, held=_held)
INTERLEAVED = Kind(
    name="interleaved", row=_interleaved_row, held=_held, least_virtual=2, most_virtual=None, in_rounds=True
)
