"""The small model whose loss is followed, and its training for some seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import shoal
from shoal.data import DataConfig, TokenSamples, prepare
from shoal.models import Transformer, TransformerConfig
from shoal.spec.run import Decision
from shoal.train import Callbacks, OptimizerConfig

__all__ = ["HELD_OUT", "MODEL", "SEQUENCES", "Point", "Timed", "held_out", "small_trainer", "train_for"]

SEQUENCES = 8  # of a worker in a step
MODEL = TransformerConfig(
    vocab_size=256, layers=2, hidden=64, heads=4, kv_heads=4, ffn=176, seq=64, tie_embeddings=True
)
"""116 thousand parameters, so that 1,200 steps of four workers take a minute on two cores."""

HELD_OUT = 512  # samples
_RATE = 4e-3  # of 3e-3, 4e-3 and 6e-3 the best for dense steps
_WARMUP = 50  # steps
_EVERY = 50  # steps between two points of a course
_MOST = 50  # steps in a second, at most: how many steps a training that the clock ends is told to make


class Point(NamedTuple):
    """Where a training is: its seconds and its steps until then, and the held-out loss in nats a byte."""

    seconds: float
    steps: int
    loss: float


class Timed(NamedTuple):
    """A training for some seconds.

    Attributes:
        course: The loss at the beginning, from time to time, and at the end.
        decisions: What exchange=auto decided, a line each.
        followed: The exchange that it followed last; "" with a fixed one.
    """

    course: Sequence[Point]
    decisions: Sequence[str] = ()
    followed: str = ""


def small_trainer(
    plan: str,
    workers: int,
    steps: int,
    seed: int,
    *,
    decided: Callable[[Decision], object] | None = None,
    **optimizer: Any,
) -> shoal.Trainer:
    """Return a Trainer of the small model in the default group.

    Args:
        plan: The text of the Plan.
        workers: Number of workers.
        steps: Steps of the training.
        seed: Seed of the first weights and of the order of samples.
        decided: Told of the decisions of exchange=auto.
        optimizer: Settings of the optimizer beside its learning rate and warm-up.
    """
    model = Transformer(MODEL)
    model.initialize(seed)
    return shoal.Trainer(
        model,
        prepare(DataConfig()).samples("train", MODEL.seq),
        plan,
        batch=workers * SEQUENCES,
        steps=steps,
        optimizer=OptimizerConfig(learning_rate=_RATE, warmup=_WARMUP, **optimizer),
        seed=seed,
        callbacks=Callbacks(on_decision=decided),
    )


def held_out() -> TokenSamples:
    """Return the samples that the loss is measured on."""
    return prepare(DataConfig()).samples("validation", MODEL.seq)


def train_for(exchange: str, workers: int, seconds: float, seed: int) -> Timed:
    """Train with a constant learning rate for some seconds of steps; all ranks call it together.

    Args:
        exchange: The Plan's text without `dp`.
        workers: Number of workers.
        seconds: Seconds after which the slowest worker ends the training, after a merge if workers merge.
        seed: Seed of the first weights and of the order of samples.
    """
    decisions: list[Decision] = []
    constant = {"schedule": "constant-then-decay", "decay": 0.0}
    plan = f"dp={workers},{exchange}"
    steps = round(_MOST * seconds)
    trainer = small_trainer(plan, workers, steps, seed, decided=decisions.append, **constant)
    samples = held_out()
    course = [Point(0.0, 0, trainer.validate(samples, HELD_OUT))]
    taken, is_over = 0.0, False
    while not is_over:
        began = time.perf_counter()
        result = trainer.step(stop=taken >= seconds)
        taken += time.perf_counter() - began
        is_over = result.stop or trainer.step_count == steps
        if is_over or trainer.step_count % _EVERY == 0:
            course.append(Point(taken, trainer.step_count, trainer.validate(samples, HELD_OUT)))
    trainer.close()
    followed = decisions[-1].exchange if decisions else ""
    return Timed(course, [str(each) for each in decisions], followed)
