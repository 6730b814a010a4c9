"""The facts that a model of the machines tells a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from shoal.simulate import Prediction


class Told(TypedDict):
    """Arguments of `verdict` that no timeline has; None where there is no model."""

    memory_share: float | None
    predicted: Mapping[str, float] | None


def told_by(prediction: Prediction | None) -> Told:
    """Return what a prediction of the run tells: what bounds compute, and how long transfers should take."""
    if prediction is None:
        return Told(memory_share=None, predicted=None)
    return Told(memory_share=prediction.memory_share, predicted=prediction.transfer_seconds)
