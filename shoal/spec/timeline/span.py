"""The span: one thing that one rank did, with its time. A Timeline is a list of spans.

Kinds on the compute lane nest: a `step` covers its data wait, forward, backward and optimizer spans,
and a `wait` or a `file_wait` lies inside whichever of these was blocked. Validation and checkpoints lie
between steps.

The lines of a timeline file: the JSON of a header and of a span.

A file holds one rank. Its first line is a header; each time the rank starts again it appends another,
since its clock has a new origin:

    {"timeline":1,"rank":0,"origin_unix_ns":1700000000000000000,"host":"90c4","origin_monotonic_ns":5000}
    {"kind":"forward","start":0.012000000,"duration":0.034000000}
    {"kind":"wait","name":"all_reduce:0","start":0.046000000,"duration":0.001000000}

The host and its monotonic clock may be absent; `shoal.spec.timeline.timeline` says what they are for.

A span whose times are those of a device has also those of the host that gave the device this work, as
`"host":[START,DURATION]`.

Starts count from the origin of the last header above. Absent keys have the defaults: no name, the
compute lane, no bytes, no group, no algorithm, no purpose, no times of the host. Times are rounded to the
nanosecond.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any


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


FORMAT = 1
"""The version that a header carries as "timeline"."""

_COMPUTE = Lane.COMPUTE.value


def header_line(rank: int, origin_unix_ns: int, host: str = "", origin_monotonic_ns: int = 0) -> str:
    """Return the line that opens a file, or a later part of it, with its newline."""
    header: dict[str, Any] = {"timeline": FORMAT, "rank": rank, "origin_unix_ns": origin_unix_ns}
    if host:
        header |= {"host": host, "origin_monotonic_ns": origin_monotonic_ns}
    return json.dumps(header, separators=(",", ":")) + "\n"


def span_line(
    kind: str,
    lane: str,
    name: str,
    start: float,
    duration: float,
    bytes: int,
    group: tuple[int, ...],
    algorithm: str = "",
    purpose: str = "",
    host: tuple[float, float] | None = None,
) -> str:
    """Return the line of one span, with its newline.

    It takes the fields and not a Span, and formats them itself: a recorder calls it for every span, and
    `json.dumps` takes several times as long.
    """
    head, tail = _around(kind, lane, name, bytes, group, algorithm, purpose)
    given = f',"host":[{host[0]:.9f},{host[1] - host[0]:.9f}]' if host else ""
    return f'{head}"start":{start:.9f},"duration":{duration:.9f}{tail}{given}}}\n'


@lru_cache(maxsize=4096)
def _around(
    kind: str, lane: str, name: str, bytes: int, group: tuple[int, ...], algorithm: str, purpose: str
) -> tuple[str, str]:
    """Return what stands before and behind the times of a span: the same in every step."""
    named = f',"name":{encode_basestring_ascii(name)}' if name else ""
    laned = "" if lane == _COMPUTE else f',"lane":"{lane}"'
    sized = f',"bytes":{bytes}' if bytes else ""
    grouped = f',"group":[{",".join(map(str, group))}]' if group else ""
    chosen = f',"algorithm":"{algorithm}"' if algorithm else ""
    meant = f',"purpose":"{purpose}"' if purpose else ""
    return f'{{"kind":"{kind}"{named}{laned},', f"{sized}{grouped}{chosen}{meant}"


def parse_span(fields: dict[str, Any], *, rank: int, offset: float) -> Span:
    """Return the span that a line describes.

    Args:
        fields: The object on the line.
        rank: The rank of the header above it.
        offset: Seconds to add to its start.

    Raises:
        KeyError: A key without a default is absent.
        TypeError: A value has the wrong type.
        ValueError: A value cannot be read.
    """
    kind, name = str(Kind(fields["kind"])), str(fields.get("name", ""))
    if kind == Kind.STEP:
        int(name)  # refuses a step without an index here, where the line is known
    return Span(
        rank=rank,
        lane=str(Lane(fields.get("lane", _COMPUTE))),
        kind=kind,
        name=name,
        start=float(fields["start"]) + offset,
        duration=float(fields["duration"]),
        bytes=int(fields.get("bytes", 0)),
        group=tuple(map(int, fields.get("group", ()))),
        algorithm=str(fields.get("algorithm", "")),
        purpose=str(fields.get("purpose", "")),
        host=_host(fields["host"], offset) if "host" in fields else None,
    )


def _host(times: list[float], offset: float) -> tuple[float, float]:
    start, duration = map(float, times)
    return start + offset, start + offset + duration
