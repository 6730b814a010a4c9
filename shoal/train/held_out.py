"""Samples and tasks that no step trains on, on which the guard of exchange=auto compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data import Loader, Samples, all_targets_count, as_samples, fetch, key_of
from shoal.models import logits_of
from shoal.train.evaluate import Evaluation, Evaluator

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
