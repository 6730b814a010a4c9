"""The span: one thing that one rank did, with its time. A Timeline is a list of spans.

Kinds on the compute lane nest: a `step` covers its data wait, forward, backward and optimizer spans,
and a `wait` or a `file_wait` lies inside whichever of these was blocked. Validation and checkpoints lie
between steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Lane(StrEnum):
    """The lane of a span: a rank has all of them, and they run at the same time."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    COPY = "copy"
    """Copies between the host and the device, on a stream of their own."""
    HOST = "host"
    """The host, which gives the device its work. Where the host computes, it has no lane of its own."""


class Kind(StrEnum):
    """The kind of a span; these are all kinds."""

    STEP = "step"
    """One training step of one rank; its name is the index of the step."""
    HELD_STEP = "held_step"
    """A step in which the recorder held the device back, to measure its work without the host's delays."""
    DATA_WAIT = "data_wait"
    """Nothing to compute on yet: the input is late."""
    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECTIVE = "collective"
    """A collective or a send or receive, from its start on this rank to its end."""
    WAIT = "wait"
    """The compute lane is blocked on a collective, whose name it has."""
    FILE_WAIT = "file_wait"
    """The compute lane is blocked on a read or a write of offloaded state."""
    OPTIMIZER = "optimizer"
    BUBBLE = "bubble"
    """Idle time that the pipeline schedule forces."""
    COPY = "copy"
    """A copy between the host and the device."""
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    OTHER = "other"


class Purpose(StrEnum):
    """The purpose of a communication: an axis of the mesh, or an agreement of all ranks.

    Several axes may join the same ranks, so the span's purpose names the axis.
    """

    TENSOR = "tensor"
    CONTEXT = "context"
    EXPERT = "expert"
    DATA = "data"
    PIPELINE = "pipeline"
    CONTROL = "control"
    """The norm of the gradient, the loss, validation, whether to stop; a wait for the slowest rank."""


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that one rank did.

    Attributes:
        rank: The global rank.
        lane: One of `Lane`.
        kind: One of `Kind`.
        name: Which span of its kind: the index of a step, or an operation such as "all_reduce:bucket3", where
            the part before the colon groups spans in tables.
        start: Seconds from the origin of the timeline.
        duration: Seconds.
        bytes: Bytes moved, for collectives: the size of the tensor, as in nccl-tests' algbw.
        group: Global ranks that take part, for collectives.
        algorithm: Algorithm of a collective, such as "ring", if the backend reports it.
        purpose: One of `Purpose`, for collectives and waits for them; "" if it is not known.
        host: Start and stop on the host, in seconds from the origin of the timeline, if the span's own times
            are those of a device; else None.
    """

    rank: int
    lane: str
    kind: str
    name: str
    start: float
    duration: float
    bytes: int = 0
    group: tuple[int, ...] = ()
    algorithm: str = ""
    purpose: str = ""
    host: tuple[float, float] | None = None

    @property
    def stop(self) -> float:
        """End of the span, in seconds from the origin of the timeline."""
        return self.start + self.duration

    def on_host(self) -> Span | None:
        """Return the span on the lane of the host; None if the host did not give it to a device."""
        if self.host is None:
            return None
        start, stop = self.host
        return Span(self.rank, Lane.HOST, self.kind, self.name, start, stop - start)
