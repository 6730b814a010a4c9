"""One piece of advice."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_GAIN = 0.03
"""Share of a step from which on a gain is worth advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change that would make a run's step faster.

    Attributes:
        name: "shares", "split", "bucket", "plan", "data" or "launch".
        change: What to change, in a sentence.
        settings: The change as settings of `shoal train --set`; empty if it is none of these.
        before: Seconds of a step, measured.
        after: Seconds of a step, predicted; the least that is possible if `is_bound`.
        is_bound: Whether the gain may be smaller.
        reason: What the prediction rests on, in a sentence.
    """

    name: str
    change: str
    settings: tuple[str, ...]
    before: float
    after: float
    is_bound: bool = False
    reason: str

    @property
    def gain(self) -> float:
        """Return the share of the step's seconds that is saved."""
        return 1 - self.after / self.before
