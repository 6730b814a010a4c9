"""A law of scaling, fitted to the speed of runs on different numbers of ranks.

Gunther's universal scalability law: N ranks train

    X(N) = rate N / (1 + contention (N - 1) + coherence N (N - 1))   tokens/s

Contention is the share that does not run in parallel; with it alone the law is Amdahl's. Coherence is what
each pair of ranks costs; with it, more ranks are slower from a certain number on. The law is linear in its
coefficients after division: N / X(N) = a + b (N - 1) + c N (N - 1), with rate = 1/a, contention = b/a and
coherence = c/a. The fit minimises the squares of relative errors, with no coefficient below zero. It takes as
many coefficients as there are numbers of ranks, three at most, in this order.

Source: Gunther, Guerrilla Capacity Planning, 2007, chapter 4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, slots=True)
class ScalingLaw:
    """The universal scalability law with its coefficients.

    Attributes:
        rate: Tokens/s of one rank.
        contention: Share of a rank's work that the ranks do not do in parallel.
        coherence: Cost of each pair of ranks, as a share of a rank's work.
    """

    rate: float
    contention: float
    coherence: float

    @classmethod
    def fit(cls, ranks: Sequence[int], tokens_per_second: Sequence[float]) -> Self | None:
        """Return the law of measured speeds; None for fewer than two numbers of ranks."""
        coefficients = min(len(set(ranks)), 3)
        if coefficients < 2:
            return None
        n = np.array(ranks, dtype=float)
        terms = np.stack([np.ones_like(n), n - 1, n * (n - 1)], axis=1)
        # Divided by the measured values, so that each row's error is relative.
        scaled = terms * (np.array(tokens_per_second) / n)[:, None]
        least, best = math.inf, np.zeros(3)
        for others in _subsets(range(1, coefficients)):
            chosen = [0, *others]
            found, *_ = np.linalg.lstsq(scaled[:, chosen], np.ones_like(n), rcond=None)
            error = float(np.sum((scaled[:, chosen] @ found - 1) ** 2))
            if (found >= 0).all() and found[0] > 0 and error < least:
                least, best = error, np.zeros(3)
                best[chosen] = found
        a, b, c = map(float, best)
        return cls(1 / a, b / a, c / a)

    def tokens_per_second(self, ranks: int) -> float:
        """Return the speed of a number of ranks."""
        pairs = ranks * (ranks - 1)
        return self.rate * ranks / (1 + self.contention * (ranks - 1) + self.coherence * pairs)

    @property
    def most(self) -> float:
        """Return the number of ranks with the highest speed; infinite if more are always quicker."""
        if self.coherence == 0:
            return math.inf
        return math.sqrt(max(1 - self.contention, 0.0) / self.coherence)


def _subsets(items: Sequence[int]) -> list[tuple[int, ...]]:
    return [chosen for size in range(len(items) + 1) for chosen in itertools.combinations(items, size)]
