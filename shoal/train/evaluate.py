"""Measure losses, and whatever else is asked for, on samples that are not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data import Samples, all_targets_count, fetch, key_of
from shoal.parallel import Parallel
from shoal.train.inputs import Inputs
from shoal.train.micro_batch import Reader

__all__ = ["Evaluation", "evaluate"]

Evaluation = Callable[[Any, Any], Any]
"""A function from the model's output and the targets to a mean over the elements that the loss averages."""

_EPOCH = -1  # epoch of held-out samples: their random draws are equal each time


def evaluate(
    parallel: Parallel,
    samples: Samples[Any],
    count: int,
    *,
    reader: Reader,
    functions: Mapping[str, Evaluation],
    seed: int,
    microbatch: int,
    device: torch.device,
) -> dict[str, float]:
    """Return the means over the first `count` samples, of the loss and of functions; dropout is off.

    Every rank calls it, and gets equal values.

    Args:
        parallel: The model.
        samples: Held-out samples.
        count: Number of samples to use; all if there are fewer.
        reader: Makes micro-batches of them.
        functions: Functions by the name of their result. If a batch is a mapping that holds its loss, they
            get the mapping in place of the targets.
        seed: The run's seed.
        microbatch: Samples of one forward of one rank.
        device: Device on which this rank computes.
    """
    count = min(count, len(samples))
    dp = parallel.axes.dp
    all_count = all_targets_count(samples)
    total = torch.zeros(2 + len(functions), dtype=torch.float64, device=device)
    inputs = Inputs(device)
    was_training = parallel.module.training
    parallel.module.eval()
    with torch.no_grad(), parallel.unchanged():
        # Every rank runs equally many forwards, since each of them gathers sharded weights.
        for start in range(0, count, dp.size * microbatch):
            first = start + dp.index * microbatch
            held = max(0, min(count - first, microbatch))
            indices = np.arange(first, first + held) if held else np.arange(1)
            batch = fetch(samples, indices, partial(_keys, seed, indices))
            read = reader.read(batch, parallel, len(indices), all_count=all_count)
            read = inputs.move(read)
            output = parallel.evaluate(*read.arguments, **read.named)
            if output is None:
                continue
            targets = dict(read.named) if read.targets is None else read.targets
            values = [read.mean_loss(output), *(each(output, targets) for each in functions.values())]
            if held and read.counted:
                means = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
                total += torch.stack([*means, torch.ones_like(total[0])]) * read.counted
    parallel.module.train(was_training)
    parallel.axes.world.all_reduce(total, "validation").wait()
    return {name: float(value / total[-1]) for name, value in zip(("loss", *functions), total, strict=False)}


def _keys(seed: int, indices: NDArray[np.int64]) -> list[int]:
    return [key_of(seed, _EPOCH, int(index)) for index in indices]
