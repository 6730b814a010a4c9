"""The result of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepResult"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step.

    Attributes:
        step: Number of the step, from 1.
        loss: Mean over the batch, before the step.
        gradient_norm: Norm of the whole gradient, before clipping.
        learning_rate: Learning rate of the step.
        tokens: Elements of the inputs, over all ranks.
        seconds: Wall time.
        stop: Whether a rank asked to stop.
        skipped: Why the step was left out, so that weights stay unchanged; empty if it was made.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    stop: bool
    skipped: str = ""

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
