"""The learning rate and the momentum with which workers merge what they changed."""

from __future__ import annotations

from typing import NamedTuple

from shoal.plan import Exchange

_USUAL = 0.7, 0.9  # rate and momentum (Douillard et al., arXiv:2311.08105)
_SPARSE = 1.0, 0.5  # what a merge leaves out comes with later ones, as momentum does
_WARMUP = 20  # rounds


class Outer(NamedTuple):
    """Settings of the outer optimizer.

    In the first steps of a training gradients turn quickly, and what momentum remembers of them does harm. So
    it grows from 0 with the steps.

    Attributes:
        rate: Learning rate of the outer gradient.
        momentum: Nesterov momentum of the outer gradient.
        warmup: Rounds of the training in which the momentum grows; with 0 it is whole at once.
    """

    rate: float
    momentum: float
    warmup: int = _WARMUP

    def momentum_after(self, steps: float, every: int) -> float:
        """Return the momentum of a merge.

        Args:
            steps: Steps of the training before it.
            every: Steps of a round.
        """
        growing = self.warmup * every
        return self.momentum * min(1.0, steps / growing) if growing else self.momentum


def outer_settings(
    exchange: Exchange, rate: float | None = None, momentum: float | None = None, warmup: int | None = None
) -> Outer:
    """Return the settings of the outer optimizer.

    Args:
        exchange: How workers merge.
        rate, momentum, warmup: What is asked for; None for 0.7, 0.9 and 20, or with compression that leaves
            elements out for 1, 0.5 and 20.
    """
    usual = _SPARSE if exchange.leaves_out else _USUAL
    return Outer(
        usual[0] if rate is None else rate,
        usual[1] if momentum is None else momentum,
        _WARMUP if warmup is None else warmup,
    )
