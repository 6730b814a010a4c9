"""Whether a user's loss of whole samples is the mean of its losses of parts: asked before the first step.

Context parallelism gives a rank a part of each sample. A loss that shifts the targets by itself, sums, or
weighs classes is another one then. So it is computed of random outputs in the form of the model's: once of
whole samples, and once of each rank's part, weighed by the targets that count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data import Samples, fetch, key_of
from shoal.data.generators import generators_put_aside
from shoal.errors import ModelError
from shoal.models.nested import map_tensors
from shoal.parallel import Parallel
from shoal.parallel.context.positions import local_sequence, whole_sequence
from shoal.parallel.pipeline.outputs import plain_output
from shoal.train.inputs import Inputs
from shoal.train.micro_batch import Reader

_EQUAL = 1e-4
"""Rounding moves a mean in fp32 by less than this share of it."""


def require_divided_loss(parallel: Parallel, reader: Reader, samples: Samples[Any], seed: int) -> None:
    """Check a user's loss on the first sample, if context parallelism cuts it; all ranks call this together.

    A loss that cannot be computed of random outputs passes.

    Args:
        parallel: The model as it is laid over the ranks.
        reader: Makes micro-batches, with the loss.
        samples: The samples.
        seed: The run's seed.

    Raises:
        ModelError: The loss of parts differs from that of whole samples.
    """
    axes, device, plan = parallel.axes, parallel.device, parallel.plan
    if axes.cp.size == 1 or reader.is_default_loss:
        return
    was_training = parallel.module.training
    parallel.module.eval()
    with generators_put_aside(), torch.no_grad():
        batch = fetch(samples, np.arange(1), lambda: [key_of(seed, 0, 0)])
        read = Inputs(device).move(reader.read(batch, parallel, 1, all_count=False))
        output = plain_output(parallel.evaluate(*read.arguments, **read.named))
    parallel.module.train(was_training)
    length = 0 if read.first is None or read.first.dim() < 2 else read.first.shape[1]

    def is_part(tensor: Tensor) -> bool:
        return tensor.dim() > 1 and tensor.shape[1] == length

    def drawn(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        shape = list(tensor.shape)
        if is_part(tensor):
            shape[1] *= axes.cp.size
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)

    def gathered(tensor: Tensor) -> Tensor:
        return whole_sequence(tensor.contiguous(), axes.cp, plan.context) if is_part(tensor) else tensor

    def own(tensor: Tensor) -> Tensor:
        is_whole = tensor.dim() > 1 and tensor.shape[1] == length * axes.cp.size
        return local_sequence(tensor, axes.cp, plan.context) if is_whole else tensor

    differs = torch.zeros(1, device=device)
    if output is not None and read.loss is not None:
        whole, targets = map_tensors(drawn, output), map_tensors(gathered, read.targets)
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        expected = torch.zeros((), dtype=torch.float64, device=device)
        with generators_put_aside(), torch.no_grad():
            try:
                expected += read.loss(whole, targets)
                part = read.loss(map_tensors(own, whole), read.targets) if read.counted else 0.0
                sums[0] += part * read.counted
                sums[1] += read.counted
            except Exception:  # the loss takes no such outputs
                sums[2] = 1.0
        axes.cp.all_reduce(sums, "probe").wait()
        found = sums[0] / sums[1]
        differs += float(not sums[2] and abs(found - expected) > _EQUAL * abs(expected))
    axes.world.all_reduce(differs, "probe").wait()
    if differs:
        raise ModelError(
            f"cp={axes.cp.size} was given, and the loss of parts of a sample differs from that of the whole",
            possible="a loss that is the mean over positions, of targets that are already shifted; with "
            "counted=, if it does not count the targets that are not -100 alike",
            change="shift the targets in the data, give counted= for weights, or leave out cp",
        )
