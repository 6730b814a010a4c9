"""A resumed run's message about its learning rate, if another course of it was asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shoal.run import Run
from shoal.train.config import OptimizerConfig, TrainConfig, load_config
from shoal.train.learning_rate import learning_rate, scaled_peak

_COURSE = ("learning_rate", "schedule", "warmup", "decay", "final", "scaling", "reference_batch")
_JUMP = 1.1  # a larger ratio of two rates is a jump


def rate_change_of(run: Run, described: Mapping[str, Any], now: TrainConfig, made: int) -> str:
    """Describe how the learning rate of a resumed run goes on; empty if its course is unchanged.

    Args:
        run: The run.
        described: Its description before it went on.
        now: The configuration that it goes on with.
        made: Number of steps made.
    """
    rates = {values["step"]: values.get("learning_rate") for values in run.metrics()}
    return describe_rate_change(load_config(base=described["config"]), now, made, rates.get(made))


def describe_rate_change(before: TrainConfig, now: TrainConfig, made: int, last: float | None = None) -> str:
    """Describe how the learning rate goes on, and how it could; empty if its course is unchanged.

    Args:
        before: The configuration that the run had.
        now: The configuration that it goes on with.
        made: Number of steps made.
        last: Learning rate of the last step made, if it was recorded.
    """
    if made >= now.steps:
        return ""
    changes = _changes(before, now)
    if ":" in now.optimizer.schedule or (last is None and ":" in before.optimizer.schedule):
        # The user's function is not asked: it may count its calls.
        return f"the learning rate has another course, since {' and '.join(changes)}" if changes else ""
    if last is None:
        last = _rate(before, made - 1)
    if not changes and math.isclose(last, _rate(now, made - 1), rel_tol=1e-6):
        return ""
    following = _rate(now, made)
    text = (
        f"the learning rate was {last:.3g} at step {made}, the last step made, and is {following:.3g} at "
        f"step {made + 1}"
    )
    if changes:
        text += f", since {' and '.join(changes)}"
    if max(following, last) <= _JUMP * min(following, last):
        return text
    offer = _settings_to_go_on_from(last, now, made)
    if offer is not None:
        settings, end = offer
        text += f"\n  to go on from {last:.3g} instead, and end at {end:.3g}: {settings}"
    return f"warning: {text}" if following > last else text


def _rate(config: TrainConfig, step: int) -> float:
    return learning_rate(config.optimizer, step=step, steps=config.steps, batch=config.batch)


def _changes(before: TrainConfig, now: TrainConfig) -> list[str]:
    """Return the changed settings that determine the learning rate, in words."""
    pairs = {
        f"optimizer.{name}": (getattr(before.optimizer, name), getattr(now.optimizer, name))
        for name in _COURSE
    }
    pairs["steps"] = (before.steps, now.steps)
    if now.optimizer.scaling != "none":
        pairs["batch"] = (before.batch, now.batch)
    return [f"{name} went from {old} to {new}" for name, (old, new) in pairs.items() if old != new]


def _settings_to_go_on_from(rate: float, config: TrainConfig, made: int) -> tuple[str, float] | None:
    """Return settings with `rate` as the next rate and a fall at the end, and the last rate; None if none.

    The rate stays constant up to a linear decay. By this a run can be extended again and again
    (Hägele et al., arXiv:2405.18392).
    """
    factor = scaled_peak(config.optimizer, config.batch) / config.optimizer.learning_rate
    left = config.steps - 1 - made
    decay = min(config.optimizer.decay, math.floor(1000 * left / config.steps) / 1000)
    course = {
        "learning_rate": float(f"{rate / factor:.6g}"),
        "schedule": "constant-then-decay",
        "decay": decay,
    }
    changed = OptimizerConfig.model_validate(config.optimizer.model_dump() | course)
    offered = config.model_copy(update={"optimizer": changed})
    if not math.isclose(_rate(offered, made), rate, rel_tol=0.01):
        return None
    settings = [
        f"--set optimizer.{name}={value}"
        for name, value in course.items()
        if value != getattr(config.optimizer, name)
    ]
    return " ".join(settings), _rate(offered, config.steps - 1)
