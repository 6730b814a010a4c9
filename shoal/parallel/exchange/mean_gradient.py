"""The mean of the workers' gradients, after a backward in which each worker summed its own."""

from __future__ import annotations

import torch

from shoal.parallel.communication import new_buffer
from shoal.parallel.exchange.fragments import vectors_of
from shoal.parallel.parallel import Parallel
from shoal.parallel.place import on_device


@torch.no_grad()
def average_gradients(parallel: Parallel) -> None:
    """Average the gradients over the workers; all ranks call it together.

    A parameter that a worker did not use counts as zero there, and gets the mean too. A parameter that no
    worker used keeps no gradient. Only a worker that lacks a gradient looks at how many have it.

    Args:
        parallel: The model, whose backward summed the gradients of one worker.
    """
    axis = parallel.axes.workers
    if axis.size == 1:
        return
    begun = []
    for each in vectors_of(parallel, parallel.owned):
        elements, gradients = each.elements, [owned.gradient for owned in each.owned]
        packed = new_buffer(elements + len(gradients), dtype=torch.float32, device=each.device)
        views, presence = each.views(packed[:elements]), packed[elements:]
        for view, gradient in zip(views, gradients, strict=True):
            view.zero_() if gradient is None else view.copy_(gradient)
        presence.copy_(on_device(tuple(float(gradient is not None) for gradient in gradients), each.device))
        begun.append((each.owned, views, presence, packed, axis.all_reduce(packed, "gradients")))
    for parts, views, presence, packed, pending in begun:
        pending.wait()
        absent = any(owned.gradient is None for owned in parts)
        counts = presence.tolist() if absent else [axis.size] * len(parts)
        packed.div_(axis.size)
        for owned, view, count in zip(parts, views, counts, strict=True):
            if owned.gradient is not None:
                owned.gradient.copy_(view)
            elif count and owned.parameter.requires_grad:
                owned.give(view.clone())
