"""Measure losses, and whatever else is asked for, on samples that are not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data import Loader, Samples, all_targets_count, as_samples, fetch, key_of
from shoal.models import logits_of
from shoal.parallel import Parallel
from shoal.record import Recorder
from shoal.spec.timeline import Kind
from shoal.train.agreement import StopTogether
from shoal.train.micro_batch import Inputs, Reader

Evaluation = Callable[[Any, Any], Any]
"""A function from the model's output and the targets to a mean over the elements that the loss averages."""

_EPOCH = -1  # epoch of held-out samples: their random draws are equal each time


@final
class Evaluator:
    """Measure on held-out samples. All ranks make one, and call it together.

    Args:
        parallel: The model.
        reader: Makes micro-batches of the samples.
        recorder: Recorder of spans.
        seed: The run's seed.
        microbatch: Samples of one forward of one rank.
    """

    def __init__(
        self, parallel: Parallel, reader: Reader, recorder: Recorder, seed: int, microbatch: int
    ) -> None:
        self._parallel = parallel
        self._reader = reader
        self._recorder = recorder
        self._seed = seed
        self._microbatch = microbatch

    def __call__(
        self,
        samples: Samples[Any],
        count: int,
        functions: Mapping[str, Evaluation],
        stop: Callable[[], bool] | None = None,
    ) -> dict[str, float]:
        """Return the means over the first `count` samples, of the loss and of functions; dropout is off.

        Args:
            samples: Held-out samples.
            count: Number of samples to use; all if there are fewer.
            functions: Functions by the name of their result. If a batch is a mapping that holds its loss,
                they get the mapping in place of the targets.
            stop: Returns whether this rank is asked to stop; all ranks give one, or none does.

        Returns:
            The means by name; nothing, on all ranks, if one of them was asked to stop before the last batch.
        """
        parallel, device = self._parallel, self._parallel.device
        count = min(count, len(samples))
        dp = parallel.axes.dp
        all_count = all_targets_count(samples)
        total = torch.zeros(2 + len(functions), dtype=torch.float64, device=device)
        inputs = Inputs(device)
        together, is_over = StopTogether(parallel.axes.world, device, stop), False
        was_training = parallel.module.training
        parallel.module.eval()
        with self._recorder.span(Kind.VALIDATION), torch.no_grad(), parallel.unchanged():
            # Every rank runs equally many forwards, since each of them gathers sharded weights.
            for start in range(0, count, dp.size * self._microbatch):
                if is_over := together.is_over():
                    break
                first = start + dp.index * self._microbatch
                held = max(0, min(count - first, self._microbatch))
                indices = np.arange(first, first + held) if held else np.arange(1)
                batch = fetch(samples, indices, partial(_keys, self._seed, indices))
                read = self._reader.read(batch, parallel, len(indices), all_count=all_count)
                read = inputs.move(read)
                output = parallel.evaluate(*read.arguments, **read.named)
                if output is None:
                    continue
                targets = dict(read.named) if read.targets is None else read.targets
                values = [read.mean_loss(output), *(each(output, targets) for each in functions.values())]
                if held and read.counted:
                    means = [torch.as_tensor(each, dtype=torch.float64, device=device) for each in values]
                    total += torch.stack([*means, torch.ones_like(total[0])]) * read.counted
        parallel.module.train(was_training)
        if is_over:
            return {}
        parallel.axes.world.all_reduce(total, "validation").wait()
        return {
            name: float(value / total[-1]) for name, value in zip(("loss", *functions), total, strict=False)
        }


def _keys(seed: int, indices: NDArray[np.int64]) -> list[int]:
    return [key_of(seed, _EPOCH, int(index)) for index in indices]


_COUNT = 64
"""Samples on which a trial compares, if nobody says how many."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What the guard of exchange=auto compares on.

    Attributes:
        samples: Samples, or a map-style dataset.
        count: Number of samples to use; all if there are fewer.
        functions: Tasks by name: functions from the model's output and the targets to a mean, of which more
            is better.
    """

    samples: Any
    count: int = _COUNT
    functions: Mapping[str, Evaluation] = field(default_factory=dict)


def values_on(
    held_out: HeldOut | None, evaluator: Evaluator, loader: Loader[Any], tasks: Mapping[str, Evaluation]
) -> Callable[[int], Mapping[str, float]]:
    """Return a function that gives held-out values: `loss`, and those of tasks.

    Its argument is the position of a sample that no step has seen.

    Args:
        held_out: What to compare on; None for the samples at that position, and `tasks`.
        evaluator: Measures.
        loader: Distributes the samples that are trained on.
        tasks: Tasks for a training that names none.
    """

    def values(position: int) -> Mapping[str, float]:
        if held_out is not None:
            return evaluator(as_samples(held_out.samples), held_out.count, held_out.functions)
        return evaluator(_following(loader, position), _COUNT, tasks)

    return values


def _following(loader: Loader[Any], position: int) -> Samples[Any]:
    """Return the samples that are trained on from a position on, which no step before it has seen.

    In later epochs they were trained on in earlier ones.
    """
    count = min(_COUNT, len(loader.samples))
    return _Chosen(loader.samples, loader.indices(position, count), loader.seed)


def accuracy(output: Any, targets: Any) -> torch.Tensor:
    """Return the share of targets that are the most likely token, or class; those that are -100 do not count.

    Args:
        output: Logits `[batch, seq, vocab]` or `[batch, classes]`, or an output that has them.
        targets: Tokens `[batch, seq]`, or classes `[batch]`.
    """
    counted = targets != -100
    hits: torch.Tensor = (logits_of(output).argmax(-1) == targets)[counted]
    return hits.double().mean()


@final
class _Chosen:
    """Some of other samples, in an order."""

    deterministic = True

    def __init__(self, samples: Samples[Any], indices: NDArray[np.int64], seed: int) -> None:
        self._samples = samples
        self._indices = indices
        self._seed = seed
        self.all_targets_count = all_targets_count(samples)

    def __len__(self) -> int:
        return len(self._indices)

    def batch(self, indices: NDArray[np.int64]) -> Any:
        """See `Samples.batch`."""
        chosen = self._indices[indices]
        return fetch(self._samples, chosen, lambda: [key_of(self._seed, -1, int(each)) for each in chosen])
