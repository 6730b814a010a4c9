"""One optimizer step of a rank, from the batch to the changed weights."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import final

from shoal.parallel import Parallel, Replicas
from shoal.parallel.optimizer.norm import GradientNorm
from shoal.record import Recorder
from shoal.timeline import Kind
from shoal.train.buffers import ChangingBuffers
from shoal.train.learning_rate import RateCourse
from shoal.train.passes import Asked, Passed, Passes
from shoal.train.update import Update
from shoal.train.workers import Progress, Turn, Workers

__all__ = ["Made", "Stepping"]


@dataclass(frozen=True, slots=True)
class Made:
    """A step that was made, or left out.

    Attributes:
        turn: Which one it was.
        passed: The results of its forwards and backwards.
        norm: The gradient's norms.
        rate: Learning rate.
        progress: Where the training is after it.
        seconds: Seconds until the host went on.
    """

    turn: Turn
    passed: Passed
    norm: GradientNorm
    rate: float
    progress: Progress
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class Stepping:
    """Make steps; nobody is told of them.

    Attributes:
        parallel: The model.
        passes: Runs forwards and backwards.
        update: Makes the optimizer's step.
        workers: The course of the training, of which this rank's worker makes its part.
        rates: Sets learning rates.
        buffers: The buffers that steps change.
        recorder: Recorder of spans.
        replicas: Compares replicas, before the optimizer changes them.
        synchronises_buffers: Whether buffers that steps change are averaged over the ranks after each.
    """

    parallel: Parallel
    passes: Passes
    update: Update
    workers: Workers
    rates: RateCourse
    buffers: ChangingBuffers
    recorder: Recorder
    replicas: Replicas
    synchronises_buffers: bool

    def make(self, steps: int, position: int, *, stop: Asked = False) -> Made:
        """Make a step, or leave weights as they are if its loss or its gradient is not finite.

        Args:
            steps: Steps of the training before it.
            position: Position of its first sample in all data.
            stop: Whether this rank was asked to stop, or a function that returns it late in the step.

        Raises:
            ReplicaError: Replicas hold different bits; see `Replicas`.
        """
        began = time.perf_counter()
        turn = self.workers.begin(steps, position)
        rate = self.rates.set(turn.step)
        self.buffers.begin_step()
        self.parallel.set_step(turn.step)
        with self.recorder.step(turn.step + 1):
            counted_over = self.workers.counted_over
            passed = self.passes.run(turn.position, stop=stop, counted_over=counted_over)
            self.workers.require_like_counts(self.parallel, passed)
            self.workers.average(passed)
            self.replicas.compare_if_due(turn.step)
            with self.recorder.span(Kind.OPTIMIZER):
                norm = self.parallel.measure_gradient()
                is_finite = self.update.make(passed.loss, norm.whole, passed.counted)
            self.buffers.end_step(is_finite)
            if self.synchronises_buffers:
                self.buffers.average(self.parallel.axes.averaged)
        progress = self.workers.end(turn, passed)
        return Made(turn, passed, norm, rate, progress, time.perf_counter() - began)
