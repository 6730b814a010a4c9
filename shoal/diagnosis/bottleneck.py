"""The bottleneck of steps: the part of the step that a change should begin with."""

from __future__ import annotations

from enum import StrEnum

from shoal.diagnosis.policy import Policy
from shoal.timeline import Parts


class Bottleneck(StrEnum):
    """What bounds the step."""

    COMPUTE = "compute"
    MEMORY = "memory"
    """Compute that the rate of the device's memory bounds."""
    NETWORK = "network"
    DATA = "data"
    HOST = "host"
    """The host gives work too slowly, or does other work between spans."""
    STRAGGLER = "straggler"
    BUBBLE = "bubble"


ADVICE = {
    Bottleneck.COMPUTE: "Use more devices, a lower precision or compile=blocks; `shoal plan` compares Plans.",
    Bottleneck.MEMORY: "Fuse operations (compile=blocks), use a larger microbatch, or a lower precision.",
    Bottleneck.NETWORK: "`shoal report --collectives` lists what is exposed. `shoal plan` finds a layout "
    "that sends less or overlaps more.",
    Bottleneck.DATA: "Prepare data in more processes, or read it from a faster disk.",
    Bottleneck.HOST: "Give the device more work per launch: compile=blocks, or a larger microbatch.",
    Bottleneck.STRAGGLER: "No rank is late most of the time, so the ranks are late in turn: give them equal "
    "work, and keep other processes from their cores.",
    Bottleneck.BUBBLE: "Use more micro-batches, or a schedule with a smaller bubble: `shoal schedule`.",
}
"""What to do next."""


def bottleneck_of(
    parts: Parts, straggler_seconds: float, memory_share: float | None, policy: Policy
) -> tuple[Bottleneck, float]:
    """Return the bottleneck and its seconds of a step.

    It is the largest part other than compute, if that has its share of the step; else it is compute.

    Args:
        parts: The parts of the mean step.
        straggler_seconds: Seconds that the stragglers cost that were found.
        memory_share: Share of compute that the rate of memory bounds; None if it is not known.
        policy: The thresholds.
    """
    others = {
        Bottleneck.NETWORK: parts.exposed_communication,
        Bottleneck.DATA: parts.data_wait,
        Bottleneck.HOST: (parts.launch or 0.0) + parts.other,
        Bottleneck.STRAGGLER: max(parts.straggler_wait, straggler_seconds),
        Bottleneck.BUBBLE: parts.bubble,
    }
    largest = max(others, key=lambda part: others[part])
    if others[largest] >= policy.bottleneck * parts.wall:
        return largest, others[largest]
    if memory_share is not None and memory_share > 0.5:
        return Bottleneck.MEMORY, parts.compute * memory_share
    return Bottleneck.COMPUTE, parts.compute
