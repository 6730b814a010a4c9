"""What a training with exchange=auto measures: seconds of links and codecs, and what gradients are like."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

import torch

from shoal.checkpoint import Coordinator
from shoal.collectives import codec_of
from shoal.parallel import Axis
from shoal.parallel.communication import new_buffer
from shoal.predict.planner import CodecMeasure, Conditions
from shoal.spec.plan import Compression

_SMALL, _LARGE = 1 << 10, 1 << 17  # elements of the all-reduces that are timed, at most
_ROUNDS = 3
_MOST_NOISE = 1e3


class Link(NamedTuple):
    """The time of an all-reduce between workers.

    Attributes:
        latency: Seconds of one of no bytes.
        per_byte: Seconds that it takes longer for each byte of its vector.
        price: Seconds that it took to measure both.
    """

    latency: float
    per_byte: float
    price: float = 0.0

    def all_reduce(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce of a vector of this many bytes."""
        return self.latency + nbytes * self.per_byte


@dataclass(frozen=True, slots=True)
class OwnGradient:
    """A gradient before the workers averaged it, and after.

    Attributes:
        own: Square of the norm of this worker's gradient.
        mean: Square of the norm of the workers' mean.
        seconds: Seconds of the step.
        average: Those of them for the average, and for the wait for other workers.
    """

    own: float
    mean: float
    seconds: float
    average: float


def measure_link(axis: Axis, device: torch.device, coordinator: Coordinator, elements: int) -> Link:
    """Return the time of an all-reduce between workers, on the slowest; all ranks call it together.

    Args:
        axis: The workers.
        device: This rank's device.
        coordinator: All ranks.
        elements: Elements of which this rank exchanges gradients.
    """
    most = max(coordinator.all_gather_object(elements))
    sizes = _SMALL, min(_LARGE, max(4 * _SMALL, most))
    seconds = []
    for elements in sizes:
        vector = new_buffer(elements, dtype=torch.float32, device=device).zero_()
        taken = []
        for _ in range(_ROUNDS + 1):
            began = _now(device)
            axis.all_reduce(vector, "link").wait()
            taken.append(_now(device) - began)
        seconds.append(max(coordinator.all_gather_object(median(taken[1:]))))
    per_byte = max(0.0, seconds[1] - seconds[0]) / (4 * (sizes[1] - sizes[0]))
    price = (_ROUNDS + 1) * sum(seconds)
    return Link(max(0.0, seconds[0] - 4 * sizes[0] * per_byte), per_byte, price)


def measure_codecs(gradient: torch.Tensor, texts: Sequence[str]) -> dict[str, CodecMeasure]:
    """Return what codecs keep of a gradient on this rank, and their seconds for an element.

    Args:
        gradient: A part of the gradient, `[elements]`, fp32.
        texts: Texts of compressions.
    """
    found = {}
    for text in texts:
        codec = codec_of(Compression.parse(text))
        payload = torch.empty(codec.payload(len(gradient)), dtype=torch.uint8, device=gradient.device)
        rest, decoded = torch.empty_like(gradient), torch.zeros_like(gradient)
        times = []
        for seed in range(2):  # the first one also brings memory into reach
            began = _now(gradient.device)
            codec.encode(gradient, payload, seed=seed, residual=rest)
            between = _now(gradient.device)
            codec.decode_add(payload, decoded, seed=seed)
            times = [between - began, _now(gradient.device) - between]
        square = float(gradient.square().sum())
        kept = 1 - float(rest.square().sum()) / square if square > 0 else 1.0
        encode, decode = (each / max(1, len(gradient)) for each in times)
        found[text] = CodecMeasure(min(1.0, max(kept, 1e-3)), encode, decode)
    return found


def conditions_of(
    gradients: Sequence[OwnGradient],
    codecs: Mapping[str, CodecMeasure],
    dense: Sequence[float],
    link: Link,
    *,
    workers: int,
    elements: int,
    coordinator: Coordinator,
) -> Conditions:
    """Return what all ranks measured together; all call it, and get equal values.

    The gradient noise scale over the batch follows from the mean square of the workers' gradients and the
    square of their mean (McCandlish et al., arXiv:1812.06162, appendix A).

    Seconds are the least of several steps, since other work only adds to them. An average takes as long as on
    the worker that comes last, which waits for nobody. It tells the seconds a byte better than the few bytes
    with which the link was timed, which buffers on the way may take in.

    Args:
        gradients: This rank's, of several steps; the first one's seconds do not count.
        codecs: This rank's codecs, by the text of their compression.
        dense: Seconds of several steps that averaged whole gradients.
        link: The time of an all-reduce.
        workers: Number of workers.
        elements: Elements of which this rank exchanges gradients.
        coordinator: All ranks.
    """
    own, mean = fmean(each.own for each in gradients), fmean(each.mean for each in gradients)
    timed = gradients[1:] or gradients
    seconds = [each.seconds - each.average for each in timed], [each.average for each in timed], dense
    ranks = coordinator.all_gather_object((seconds, own, mean, elements, dict(codecs)))
    computes, averages, steps = (list(zip(*(each[0][at] for each in ranks), strict=False)) for at in range(3))
    whole = min(map(max, steps))
    compute, exchanged = min(whole, *map(max, computes)), min(map(min, averages))
    own, mean = fmean(each[1] for each in ranks), fmean(each[2] for each in ranks)
    most = max(each[3] for each in ranks)
    signal = workers * mean - own
    noise = min(_MOST_NOISE, (own - mean) / signal) if signal > 0 else _MOST_NOISE
    return Conditions(
        workers=workers,
        elements=most,
        compute=compute,
        dense=whole,
        latency=link.latency,
        per_byte=max(0.0, exchanged - link.latency) / (4 * max(1, most)),
        hidden=compute + max(exchanged, link.latency) - whole,
        noise=max(0.0, noise),
        codecs={
            text: CodecMeasure(
                fmean(each[4][text].kept for each in ranks),
                max(each[4][text].encode for each in ranks),
                max(each[4][text].decode for each in ranks),
            )
            for text in codecs
        },
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
