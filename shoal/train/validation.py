"""The validations of a run: when they are due, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from shoal.data import Samples
from shoal.launch import StopSignal
from shoal.train.config import TrainConfig
from shoal.train.held_out import accuracy
from shoal.train.save_policy import is_due
from shoal.train.trainer import Trainer

__all__ = ["Validation"]


@final
class Validation:
    """Measure a run on held-out samples; all ranks call it together.

    Args:
        trainer: The Trainer.
        samples: The held-out samples.
        config: The configuration.
        log: Takes the steps made and the values.
        say: Told of the values in one line.
    """

    def __init__(
        self,
        trainer: Trainer,
        samples: Samples[Any],
        config: TrainConfig,
        log: Callable[[int, Mapping[str, float]], object],
        say: Callable[[str], object],
    ) -> None:
        self._trainer = trainer
        self._samples = samples
        self._config = config
        self._functions = {"accuracy": accuracy} if config.data.label else {}
        self._log = log
        self._say = say

    def is_due(self, before: int) -> bool:
        """Return whether to validate now, where this was asked last after step `before`."""
        step = self._trainer.step_count
        return step == self._config.steps or is_due(before, step, self._config.validation.every)

    def make(self, stop: StopSignal) -> bool:
        """Measure, and tell the values; return whether that was done, on all ranks: not if one is to stop."""
        count, step = self._config.validation.samples, self._trainer.step_count
        values = self._trainer.evaluate(
            self._samples, count, self._functions, stop=lambda: stop.received is not None
        )
        begins = f"step {step}/{self._config.steps}  validation"
        if not values:
            self._say(f"{begins} stopped by a signal, without a result")
            return False
        self._log(step, {f"validation_{name}": value for name, value in values.items()})
        self._say(f"{begins} " + ", ".join(f"{name} {value:.3f}" for name, value in values.items()))
        return True
