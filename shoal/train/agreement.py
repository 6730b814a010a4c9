"""What ranks tell each other of signals: whether one of them, or all, are asked to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

import torch

from shoal.checkpoint import Coordinator
from shoal.launch import StopSignal
from shoal.parallel import Axis

_BETWEEN = 1.0  # seconds between two questions
_REACHES = 1.0  # seconds in which a signal to all processes of a run reaches each of them
_LOOK = 0.02  # seconds between two looks


@final
class StopTogether:
    """Lets ranks leave equally many rounds of work after the same one, once a rank is asked to stop.

    They ask each other before the first round, and then about once a second: the answer of a GPU is waited
    for. The number of rounds between two questions follows from times that all ranks know.

    Args:
        ranks: The ranks.
        device: Device on which they tell each other.
        is_asked: Returns whether this rank is asked to stop; None on all ranks if none ever is.
    """

    def __init__(self, ranks: Axis, device: torch.device, is_asked: Callable[[], bool] | None) -> None:
        self._ranks = ranks
        self._device = device
        self._is_asked = is_asked
        self._round = self._next = self._last = 0
        self._asked = time.perf_counter()

    def is_over(self) -> bool:
        """Return whether to leave, the same on all ranks; all call it before each round."""
        number, self._round = self._round, self._round + 1
        if self._is_asked is None or number < self._next:
            return False
        seconds = time.perf_counter() - self._asked
        told = torch.tensor([self._is_asked(), seconds], dtype=torch.float64, device=self._device)
        self._ranks.all_reduce(told, "stop").wait()
        stops, seconds = told.tolist()
        each = seconds / self._ranks.size / max(1, number - self._last)
        rounds = int(_BETWEEN / max(each, 1e-9)) if number else 1
        self._last, self._next = number, number + max(1, rounds)
        self._asked = time.perf_counter()
        return bool(stops)


def are_all_asked(stop: StopSignal, ranks: Coordinator) -> bool:
    """Return whether all ranks are asked to stop, and not some of them to leave; the same on all.

    If some are, wait a moment for the others: a signal to all does not reach all at the same time.
    """
    until = time.monotonic() + _REACHES
    while True:
        told = ranks.all_gather_object((stop.received is not None, time.monotonic() >= until))
        asked = [is_asked for is_asked, _ in told]
        if all(asked) or not any(asked) or any(is_late for _, is_late in told):
            return all(asked)
        time.sleep(_LOOK)
