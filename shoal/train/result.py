"""The result of one optimizer step, the way of its numbers to the host, and who is told of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from shoal.run import Decision


@final
class ToHost:
    """Numbers on their way from a device to the host, which need not wait for them until it reads them.

    Args:
        values: The numbers, scalars on one device.
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        held = torch.stack([value.detach().double() for value in values])
        self._arrived: torch.cuda.Event | None = None
        if held.is_cuda:
            # A few bytes a step, which torch's allocator keeps until the copy is made, and uses again.
            pinned = torch.empty(held.shape, dtype=held.dtype, pin_memory=True)
            held = pinned.copy_(held, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        self._held = held

    def read(self) -> list[float]:
        """Return the numbers; wait for them if they have not arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[float] = self._held.tolist()
        return numbers


@final
class StepResult:
    """The result of one optimizer step.

    On a GPU the device may still compute the step. Reading `loss`, `gradient_norm`, `stop` or `skipped` then
    waits for it; a later step's result, or the Trainer's `on_step`, gives the values without a wait.

    Args:
        loss: Mean over the batch, before the step.
        gradient_norm: Norm of the whole gradient, before clipping.
        stop: Number of ranks that asked to stop.

    Attributes:
        step: Number of the step, from 1.
        learning_rate: Learning rate of the step.
        tokens: Elements of the inputs, over all ranks.
        seconds: Wall time of the call that made the step.
    """

    def __init__(
        self,
        step: int,
        loss: torch.Tensor,
        gradient_norm: torch.Tensor,
        stop: torch.Tensor,
        *,
        learning_rate: float,
        tokens: int,
        seconds: float = 0.0,
    ) -> None:
        self.step = step
        self.learning_rate = learning_rate
        self.tokens = tokens
        self.seconds = seconds
        self._coming: ToHost | None = ToHost((loss, gradient_norm, stop))
        self._values: list[float] = []
        self._reason: str | None = None

    @property
    def loss(self) -> float:
        """Mean loss over the batch, before the step."""
        return self._read()[0]

    @property
    def gradient_norm(self) -> float:
        """Norm of the whole gradient, before clipping."""
        return self._read()[1]

    @property
    def stop(self) -> bool:
        """Whether a rank asked to stop."""
        return self._read()[2] > 0

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient were finite, so that the step was made."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)

    @property
    def skipped(self) -> str:
        """Why the step was left out, so that weights stay unchanged; empty if it was made."""
        if self._reason is None and not self.is_finite:  # the ranks have not looked for the reason yet
            return f"a loss of {self.loss} and a gradient of norm {self.gradient_norm}"
        return self._reason or ""

    def explain(self, reason: str) -> None:
        """Note why the step was left out; empty if it was made."""
        self._reason = reason

    def values(self) -> dict[str, float]:
        """Return the values that a run's metrics keep."""
        return {
            "loss": self.loss,
            "gradient_norm": self.gradient_norm,
            "learning_rate": self.learning_rate,
            "tokens": self.tokens,
            "step_seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "skipped": int(bool(self.skipped)),
        }

    def _read(self) -> list[float]:
        if self._coming is not None:
            self._values, self._coming = self._coming.read(), None
        return self._values


@dataclass(frozen=True, kw_only=True, slots=True)
class Callbacks:
    """The user's functions that a Trainer calls on every rank.

    Attributes:
        on_step: Called with each step's result.
        on_validation: Called with the steps made and the values of each validation.
        on_save: Called with the path of each checkpoint.
        on_decision: Called with each decision about the exchange.
    """

    on_step: Callable[[StepResult], object] = lambda result: None
    on_validation: Callable[[int, Mapping[str, float]], object] = lambda step, values: None
    on_save: Callable[[Path], object] = lambda path: None
    on_decision: Callable[[Decision], object] = lambda decision: None
