"""The mean of the workers' gradients, after a backward in which each worker summed its own."""

from __future__ import annotations

import torch

from shoal.parallel.communication import new_buffer
from shoal.parallel.parallel import Parallel

__all__ = ["average_gradients"]


def average_gradients(parallel: Parallel) -> None:
    """Average the gradients over the workers; all ranks call it together.

    Args:
        parallel: The model, whose backward summed the gradients of one worker.
    """
    axis = parallel.axes.workers
    if axis.size == 1:
        return
    graded = [gradient for each in parallel.owned if (gradient := each.gradient) is not None]
    sizes = [each.numel() for each in graded]
    packed = new_buffer(sum(sizes), dtype=torch.float32, device=parallel.device)
    parts = [part.view(each.shape) for part, each in zip(packed.split(sizes), graded, strict=True)]
    torch._foreach_copy_(parts, graded)
    axis.all_reduce(packed, "gradients").wait()
    packed.div_(axis.size)
    torch._foreach_copy_(graded, parts)
