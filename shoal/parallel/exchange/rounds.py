"""When the fragments of a model are merged: rounds of steps, in each of which every fragment is merged once.

A round of H steps merges the first of n fragments after H / n of its steps, and the last after H. H is the
Plan's `every`; with `stretch` it grows, as the learning rate falls, with the square of the highest learning
rate over the present one (Gu et al., "A Quadratic Synchronization Rule", arXiv:2310.14423).
"""

from __future__ import annotations

from typing import final

from shoal.plan import Exchange


@final
class Rounds:
    """The steps of a training with local updates.

    Args:
        exchange: The Plan's exchange.

    Attributes:
        step: Steps made.
        delay: Steps that a merge may take.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._first = 0  # steps made when the round began
        self._length = exchange.every
        self._rate = self._peak = 0.0
        self.step = 0
        self.delay = exchange.delay

    @property
    def is_dense(self) -> bool:
        """Whether the next step is one of the first, in which workers average gradients."""
        return self.step < self._exchange.dense

    @property
    def is_at_end(self) -> bool:
        """Whether all steps of the round were made."""
        return self.step >= self._first + self._length

    def advance(self) -> int | None:
        """Count a step; return the number of the fragment to merge after it, or None."""
        was_dense = self.is_dense
        self.step += 1
        if was_dense:
            self.begin()
            return None
        number = self._exchange.fragments
        ends = [(fragment + 1) * self._length // number for fragment in range(number)]
        made = self.step - self._first
        return ends.index(made) if made in ends else None

    @property
    def rates(self) -> tuple[float, float]:
        """The learning rate of the last step, and the highest of all: what the next round depends on."""
        return self._rate, self._peak

    def note(self, rate: float) -> None:
        """Take note of the learning rate of a step."""
        self._rate, self._peak = rate, max(self._peak, rate)

    def begin(self) -> None:
        """Begin a round, the longer the lower the learning rate of the last step is."""
        self._first = self.step
        share = self._rate / self._peak if self._peak > 0 else 1.0
        grown = self._exchange.every / max(share, 1e-6) ** 2
        self._length = int(min(grown, self._exchange.every * self._exchange.stretch))

    @property
    def span(self) -> tuple[int, int]:
        """The steps made when the round began, and its number of steps."""
        return self._first, self._length

    def set_step(
        self, steps: int, rates: tuple[float, float] = (0.0, 0.0), span: tuple[int, int] | None = None
    ) -> None:
        """Go on after this many steps, with what `rates` and `span` were then; None begins a round."""
        self.step = steps
        self._rate, self._peak = rates
        self.begin()
        if span is not None:
            self._first, self._length = span
